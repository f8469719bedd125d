# One file, to which all roots have links. `platform` is of any type, so that no default of modules/platform is written twice;
# the price is that Terraform itself would drop a misspelt name without a word. Here each name is looked up (a test keeps
# the list equal to the module's types).

variable "platform" {
  description = "Settings of Oriel itself: inputs of modules/platform by their names (namespace, images, gateway, logic, model_groups, policies, redis, placement, keda, charts, observability)."
  type        = any
  default     = {}
  validation {
    condition     = can(keys(var.platform))
    error_message = "platform: an object, { gateway = {...}, model_groups = {...} }."
  }
}

locals {
  # What may stand below each input, as regular expressions. [^.]+: a name of one's own.
  platform_names = {
    namespace      = []
    store_networks = []
    images         = ["digests(\\.[^.]+)?", "pull_policy", "pull_secret"]
    gateway        = ["replicas(\\.(min|max))?", "cpu", "memory", "service_type", "service_annotations(\\..+)?", "load_balancer_ip", "load_balancer_class", "source_ranges", "tls_secret", "plain_http", "admin_token_secret_ref(\\.(name|key))?", "ticket_keys_secret_ref(\\.(name|key))?", "credentials", "args"]
    logic          = ["replicas(\\.(min|max|spare))?", "image", "services(\\..+)?", "folders", "workers", "through_gateway", "cpu", "memory", "args"]
    model_groups   = ["[^.]+", "[^.]+\\.(accelerator|repository|models|replicas|replicas\\.(min|max|spare)|cpu|memory|cache|cache\\.gb|cache\\.claim|load_grace_s|start_s|place_models|gpus|spot|spot\\.(replicas|tiers)|credentials|args|engine|engine\\.(kind|image|command|services|health))"]
    policies       = ["tenants(\\.[^.]+)?", "tenants\\.[^.]+\\.(tier|keys_sha256|models|services)", "pools(\\.[^.]+)?", "pools\\.[^.]+\\.(address|port|grpc_port|models|services|networks|probe|engine|max_inflight|idle_timeout_ms|pod_labels(\\..+)?)", "documents(\\..+)?", "store"]
    redis          = ["image", "memory"]
    placement      = ["share_gpu_nodes", "pause_image"]
    keda           = ["enabled", "install", "namespace", "chart_version", "polling_interval_s", "cooldown_s"]
    charts         = ["(nvidia_device_plugin|metrics_server|kube_prometheus_stack|prometheus_operator_crds|cluster_autoscaler)(\\.(enabled|version))?"]
    observability  = ["namespace", "service_monitors", "monitor_labels(\\..+)?", "runbooks_url", "dashboards", "otlp(\\.(endpoint|trace_tail|decision_wait_s|sample_ratio|image|authorization_secret_ref))?", "otlp\\.authorization_secret_ref\\.(name|key)"]
  }
  platform_given = { for input, value in var.platform : input => flatten([
    for a in try(keys(value), []) : [a, [
      for b in try(keys(value[a]), []) : ["${a}.${b}", [
        for c in try(keys(value[a][b]), []) : "${a}.${b}.${c}"
      ]]
    ]]
  ]) }
  platform_unknown = concat(
    [for input in keys(var.platform) : input if !contains(keys(local.platform_names), input)],
    flatten([for input, given in local.platform_given : [
      for name in given : "${input}.${name}" if !anytrue([for known in try(local.platform_names[input], []) : can(regex("^(${known})$", name))])
    ] if contains(keys(local.platform_names), input)]),
  )
}
