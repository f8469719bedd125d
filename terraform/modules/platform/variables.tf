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

variable "keda" {
  description = "Scaling by the gateway's queue, also to no replica, in place of HorizontalPodAutoscalers. Off: the gateway's scaler on port 8083 does not exist yet."
  type = object({
    enabled            = optional(bool, false)
    chart_version      = optional(string, "2.18.1")
    polling_interval_s = optional(number, 15)
    cooldown_s         = optional(number, 300)
  })
  default  = {}
  nullable = false
  validation {
    condition     = can(regex("^[0-9]+\\.[0-9]+\\.[0-9]+$", var.keda.chart_version))
    error_message = "keda.chart_version: an exact version, such as 2.18.1."
  }
  validation {
    condition     = var.keda.polling_interval_s >= 1 && var.keda.polling_interval_s <= 300 && var.keda.cooldown_s >= 0 && var.keda.cooldown_s <= 3600
    error_message = "keda: polling_interval_s from 1 to 300, cooldown_s from 0 to 3600."
  }
}

variable "charts" {
  description = "Charts of others, each with an exact version. A cluster that brings one (metrics-server on GKE and AKS, the device plugin on GKE) needs none."
  type = object({
    nvidia_device_plugin     = optional(object({ enabled = optional(bool, true), version = optional(string, "0.18.2") }), {})
    metrics_server           = optional(object({ enabled = optional(bool, false), version = optional(string, "3.13.0") }), {})
    kube_prometheus_stack    = optional(object({ enabled = optional(bool, false), version = optional(string, "79.5.0") }), {})
    prometheus_operator_crds = optional(object({ enabled = optional(bool, false), version = optional(string, "24.0.2") }), {})
  })
  default  = {}
  nullable = false
  validation {
    condition     = alltrue([for chart in values(var.charts) : can(regex("^[0-9]+\\.[0-9]+\\.[0-9]+$", chart.version))])
    error_message = "charts: exact versions, such as 0.18.2."
  }
}

variable "observability" {
  description = "Where metrics are read from, and where spans go. service_monitors needs the Prometheus operator's custom resources (charts); otlp null: no collector."
  type = object({
    # The only namespace that may read metrics.
    namespace        = optional(string, "monitoring")
    service_monitors = optional(bool, false)
    # What this Prometheus selects ServiceMonitors and PrometheusRules by, such as { release = "kube-prometheus-stack" }.
    monitor_labels = optional(map(string), {})
    dashboards     = optional(bool, true)
    otlp = optional(object({
      endpoint = string
      # A Secret in the platform's namespace whose value is sent as the header authorization.
      authorization_secret_ref = optional(object({ name = string, key = string }))
      sample_ratio             = optional(number, 0.01)
      image                    = optional(string, "ghcr.io/open-telemetry/opentelemetry-collector-releases/opentelemetry-collector:0.136.0")
    }))
  })
  default  = {}
  nullable = false
  validation {
    condition     = can(regex("^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$", var.observability.namespace))
    error_message = "observability.namespace: the name of a Kubernetes namespace."
  }
  validation {
    condition     = var.observability.otlp == null || can(regex("^https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?(/[^ ]*)?$", var.observability.otlp.endpoint))
    error_message = "observability.otlp.endpoint: http(s)://HOST[:PORT][/PATH] of an OTLP/HTTP receiver."
  }
  validation {
    condition     = var.observability.otlp == null || try(var.observability.otlp.sample_ratio >= 0 && var.observability.otlp.sample_ratio <= 1, false)
    error_message = "observability.otlp.sample_ratio: from 0 to 1."
  }
  validation {
    condition     = var.observability.otlp == null || !can(regex(":latest$", var.observability.otlp.image))
    error_message = "observability.otlp.image: not latest."
  }
}
