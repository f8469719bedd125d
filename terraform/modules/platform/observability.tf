# Metrics are read by whatever Prometheus there is, spans go through one collector. Its address is what the units get as
# OTEL_EXPORTER_OTLP_ENDPOINT (local.telemetry_env); the endpoint behind it and its credential are the collector's alone.

locals {
  metrics_ports = merge(
    { gateway = 8082, logic = 8092, inference = 8002 },
    { for name, port in { collector = 8888 } : name => port if var.observability.otlp != null },
  )

  # Which pod a span is of; service.instance.id follows from the pod's uid.
  pod_fields = {
    POD_NAMESPACE = "metadata.namespace"
    POD_NAME      = "metadata.name"
    POD_UID       = "metadata.uid"
    POD_NODE      = "spec.nodeName"
  }
  telemetry_env = [for each in concat(
    [
      { name = "OTEL_EXPORTER_OTLP_ENDPOINT", value = "http://collector.${var.namespace}.svc.cluster.local:4318" },
      { name = "OTEL_TRACES_SAMPLER_ARG", value = tostring(try(var.observability.otlp.sample_ratio, 0)) },
    ],
    [for name, path in local.pod_fields : { name = name, valueFrom = { fieldRef = { apiVersion = "v1", fieldPath = path } } }],
    [{
      name  = "OTEL_RESOURCE_ATTRIBUTES" # Kubernetes puts in the variables, which have to stand before it
      value = "k8s.namespace.name=$(POD_NAMESPACE),k8s.pod.name=$(POD_NAME),k8s.pod.uid=$(POD_UID),k8s.node.name=$(POD_NODE)"
    }],
  ) : each if var.observability.otlp != null]

  # The collector chooses among whole traces: it gets the spans of all requests and holds them until it has decided.
  collector_tail  = try(var.observability.otlp.trace_tail, "gateway") == "collector"
  collector_image = "ghcr.io/open-telemetry/opentelemetry-collector-releases/opentelemetry-collector${local.collector_tail ? "-contrib" : ""}:0.136.0"
  # 100,000 traces are those of 32 s at 3,000 requests a second. docs/tracing.md has the same policy.
  collector_sampling = {
    decision_wait  = "${try(var.observability.otlp.decision_wait_s, 0)}s"
    num_traces     = 100000
    decision_cache = { sampled_cache_size = 200000, non_sampled_cache_size = 200000 }
    policies = [
      { name = "promises", type = "string_attribute", string_attribute = { key = "oriel.sla.result", values = ["late", "missed"] } },
      { name = "share", type = "probabilistic", probabilistic = { sampling_percentage = try(var.observability.otlp.sample_ratio * 100, 0) } },
    ]
  }
  collector_memory = local.collector_tail ? "2Gi" : "256Mi"

  collector_secret = try(var.observability.otlp.authorization_secret_ref, null)

  collector_config = {
    receivers = { otlp = { protocols = { http = { endpoint = "0.0.0.0:4318" } } } }
    processors = merge(
      {
        # First in the pipeline: it refuses what there is no memory for, and the units count what they drop.
        memory_limiter = { check_interval = "1s", limit_percentage = 75, spike_limit_percentage = 20 }
        batch          = { send_batch_size = 512, send_batch_max_size = 2048, timeout = "2s" }
      },
      { for name, sampling in { tail_sampling = local.collector_sampling } : name => sampling if local.collector_tail },
    )
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
      pipelines  = { traces = { receivers = ["otlp"], processors = concat(["memory_limiter"], local.collector_tail ? ["tail_sampling"] : [], ["batch"]), exporters = ["otlphttp"] } }
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
        # One: what it holds while it is moved is lost, and the units count what they could not hand over meanwhile. And to
        # choose among traces, it has to get all spans of each.
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
              image = try(coalesce(var.observability.otlp.image, local.collector_image), "")
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
                requests = { cpu = local.collector_tail ? "500m" : "100m", memory = local.collector_memory }
                limits   = { memory = local.collector_memory }
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
    data = { "oriel-${name}.json" = file("${path.module}/../../../deploy/chart/monitoring/dashboards/${name}.json") }
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
      spec = yamldecode(file("${path.module}/../../../deploy/chart/monitoring/alerts.yaml"))
    }],
  ) : each if var.observability.service_monitors]
}
