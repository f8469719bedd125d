variable "infrastructure" {
  description = "The outputs of terraform/aws, gcp, azure or local, as they are. This is all that is known of the cloud."
  type = object({
    cloud                  = string
    cluster_name           = string
    cluster_endpoint       = string
    cluster_ca_certificate = string
    # How helm gets a token: a command that prints one.
    cluster_auth = object({
      api_version = string
      command     = string
      args        = list(string)
      env         = optional(map(string), {})
    })
    registry_url         = string
    model_repository_url = string
    # redis://HOST:PORT or rediss://HOST:PORT, without a password; null: a small one is run in the cluster.
    redis_url = optional(string)
    redis_tls = bool
    # The Kubernetes Secret, in the platform's namespace, that holds Redis's password; null: it has none.
    redis_auth_secret_ref = optional(object({ name = string, key = string }))
    # What lets the pods of a unit (gateway, logic, inference) act in the cloud without a key.
    workload_identity = object({
      service_account_annotations = optional(map(map(string)), {})
      pod_labels                  = optional(map(string), {})
    })
    gpu_node_selector = map(string)
    # As Kubernetes spells it: NoSchedule, PreferNoSchedule, NoExecute.
    gpu_taint     = object({ key = string, value = string, effect = string })
    storage_class = string
  })
}
