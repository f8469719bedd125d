# Metrics are read by whatever Prometheus there is, spans go through one collector. Its address is what the units get as
# OTEL_EXPORTER_OTLP_ENDPOINT (local.telemetry_env); the endpoint behind it and its credential are the collector's alone.

locals {
  metrics_ports = merge(
    { gateway = 8082, logic = 8092, inference = 8002 },
    { for name, port in { collector = 8888 } : name => port if var.observability.otlp != null },
  )

  telemetry_env = [for each in [
    { name = "OTEL_EXPORTER_OTLP_ENDPOINT", value = "http://collector.${var.namespace}.svc.cluster.local:4318" },
    { name = "OTEL_TRACES_SAMPLER_ARG", value = tostring(try(var.observability.otlp.sample_ratio, 0)) },
  ] : each if var.observability.otlp != null]

  collector_secret = try(var.observability.otlp.authorization_secret_ref, null)

  collector_config = {
    receivers = { otlp = { protocols = { http = { endpoint = "0.0.0.0:4318" } } } }
    processors = {
      # First in the pipeline: it refuses what there is no memory for, and the units count what they drop.
      memory_limiter = { check_interval = "1s", limit_percentage = 75, spike_limit_percentage = 20 }
      batch          = { send_batch_size = 512, send_batch_max_size = 2048, timeout = "2s" }
    }
    exporters = {
      otlphttp = merge(
        {
          endpoint         = try(var.observability.otlp.endpoint, "")
          compression      = "gzip"
          timeout          = "10s"
          sending_queue    = { enabled = true, num_consumers = 4, queue_size = 1000 }
          retry_on_failure = { enabled = true, initial_interval = "1s", max_interval = "30s", max_elapsed_time = "300s" }
        },
        { for name, headers in { headers = { authorization = "$${env:OTLP_AUTHORIZATION}" } } : name => headers if local.collector_secret != null },
      )
    }
    extensions = { health_check = { endpoint = "0.0.0.0:13133" } }
    service = {
      extensions = ["health_check"]
      pipelines  = { traces = { receivers = ["otlp"], processors = ["memory_limiter", "batch"], exporters = ["otlphttp"] } }
      telemetry = {
        logs    = { level = "warn" }
        metrics = { readers = [{ pull = { exporter = { prometheus = { host = "0.0.0.0", port = 8888 } } } }] }
      }
    }
  }

  collector_objects = [for each in [
    {
      apiVersion = "v1"
      kind       = "ConfigMap"
      metadata   = { name = "collector", namespace = local.namespace, labels = local.labels.collector }
      data       = { "config.yaml" = yamlencode(local.collector_config) }
    },
    {
      apiVersion = "v1"
      kind       = "Service"
      metadata   = { name = "collector", namespace = local.namespace, labels = local.labels.collector }
      spec = {
        type     = "ClusterIP"
        selector = local.selectors.collector
        ports    = [{ name = "otlp-http", port = 4318, targetPort = "otlp-http", protocol = "TCP" }]
      }
    },
    {
      apiVersion                   = "v1"
      kind                         = "ServiceAccount"
      metadata                     = { name = "collector", namespace = local.namespace, labels = local.labels.collector }
      automountServiceAccountToken = false
    },
    {
      apiVersion = "apps/v1"
      kind       = "Deployment"
      metadata   = { name = "collector", namespace = local.namespace, labels = local.labels.collector }
      spec = {
        # One: what it holds while it is moved is lost, and the units count what they could not hand over meanwhile.
        replicas = 1
        selector = { matchLabels = local.selectors.collector }
        strategy = { type = "RollingUpdate", rollingUpdate = { maxUnavailable = 0, maxSurge = 1 } }
        template = {
          metadata = {
            labels = local.labels.collector
            # It reads its configuration once.
            annotations = { "oriel.dev/config" = sha256(yamlencode(local.collector_config)) }
          }
          spec = merge(local.pod_base, local.gateway_placement, {
            serviceAccountName            = "collector"
            terminationGracePeriodSeconds = 30
            containers = [{
              name  = "collector"
              image = try(var.observability.otlp.image, "")
              args  = ["--config=/etc/otelcol/config.yaml"]
              env = [for secret in [local.collector_secret] : {
                name      = "OTLP_AUTHORIZATION"
                valueFrom = { secretKeyRef = { name = secret.name, key = secret.key } }
              } if secret != null]
              ports = [
                { name = "otlp-http", containerPort = 4318, protocol = "TCP" },
                { name = "metrics", containerPort = 8888, protocol = "TCP" },
                { name = "health", containerPort = 13133, protocol = "TCP" },
              ]
              resources = {
                requests = { cpu = "100m", memory = "256Mi" }
                limits   = { memory = "256Mi" }
              }
              securityContext = local.container_security
              startupProbe    = { httpGet = { path = "/", port = "health" }, periodSeconds = 2, failureThreshold = 30 }
              readinessProbe  = { httpGet = { path = "/", port = "health" }, periodSeconds = 5 }
              livenessProbe   = { httpGet = { path = "/", port = "health" }, periodSeconds = 10 }
              volumeMounts    = [{ name = "config", mountPath = "/etc/otelcol", readOnly = true }]
            }]
            volumes = [{ name = "config", configMap = { name = "collector" } }]
          })
        }
      }
    },
  ] : each if var.observability.otlp != null]

  # Of their own: the gateway's Service is public, and each pod has to be behind exactly one port that is read.
  metrics_services = [for component, port in local.metrics_ports : {
    apiVersion = "v1"
    kind       = "Service"
    metadata = {
      name      = "${component}-metrics"
      namespace = local.namespace
      labels    = merge(local.labels[component], { "oriel.dev/metrics" = "true" })
    }
    spec = {
      type                     = "ClusterIP"
      clusterIP                = "None"
      publishNotReadyAddresses = true
      selector                 = local.selectors[component]
      ports                    = [{ name = "metrics", port = port, targetPort = port, protocol = "TCP" }]
    }
  } if var.observability.service_monitors]

  # The files as they are, for whoever has no Kubernetes as well (docs/monitoring.md).
  dashboard_objects = [for name in ["gateway", "inference", "logic"] : {
    apiVersion = "v1"
    kind       = "ConfigMap"
    metadata = {
      name      = "dashboard-${name}"
      namespace = local.namespace
      labels    = merge(local.labels[name], { grafana_dashboard = "1" })
    }
    data = { "oriel-${name}.json" = file("${path.module}/monitoring/dashboards/${name}.json") }
  } if var.observability.dashboards]

  observability_objects = concat(local.collector_objects, local.metrics_services, local.dashboard_objects)

  observability_custom_objects = [for each in concat(
    [for component in keys(local.metrics_ports) : {
      apiVersion = "monitoring.coreos.com/v1"
      kind       = "ServiceMonitor"
      metadata = {
        name      = component
        namespace = local.namespace
        labels    = merge(var.observability.monitor_labels, local.labels[component])
      }
      spec = {
        selector          = { matchLabels = merge(local.selectors[component], { "oriel.dev/metrics" = "true" }) }
        namespaceSelector = { matchNames = [var.namespace] }
        podTargetLabels   = ["oriel.dev/model-group"]
        endpoints = [{
          port          = "metrics"
          path          = "/metrics"
          scheme        = "http"
          interval      = "15s" # the alert on a plain outage reads windows of one and two minutes
          scrapeTimeout = "10s"
          # The operator's own `service` would rename the logic server's label of that name to exported_service.
          relabelings = [{ action = "labeldrop", regex = "service" }]
        }]
      }
    }],
    [{
      apiVersion = "monitoring.coreos.com/v1"
      kind       = "PrometheusRule"
      metadata = {
        name      = "oriel"
        namespace = local.namespace
        labels    = merge(var.observability.monitor_labels, local.common_labels)
      }
      spec = yamldecode(file("${path.module}/monitoring/alerts.yaml"))
    }],
  ) : each if var.observability.service_monitors]
}
