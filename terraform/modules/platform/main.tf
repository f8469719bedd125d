# The installation, in this order: the namespace, the charts of others, and the platform: the chart of deploy/chart, whose values
# are this module's variables. Destroyed the other way round.

locals {
  # A server of another namespace, by the name of its Service.
  of_a_service = "^[a-z0-9-]+\\.([a-z0-9-]+)\\.svc(?:\\.cluster\\.local)?\\.?$"

  # URLs and registries with a port that there is not, and labels that the chart has itself: as in values.schema.json.
  no_port    = "^([a-z0-9]+://)*[^/]*:(0+|6553[6-9]|655[4-9][0-9]|65[6-9][0-9]{2}|6[6-9][0-9]{3}|[7-9][0-9]{4}|[0-9]{6,})(/|$)"
  own_labels = "^(app[.]kubernetes[.]io/(name|component|part-of|managed-by)|oriel[.]dev/.*)$"

  # As the chart has them if none are named: what a plan has to know of them.
  default_groups = {
    for name in ["cpu", "gpu"] : name => { accelerator = name, models = [], replicas = { min = null, max = 4, spare = 0 }, load_grace_s = 900, place_models = false, engine = null }
    if var.model_groups == null && (name == "cpu" || var.gpu_enabled)
  }
  model_groups = merge(local.default_groups, var.model_groups)

  # A release waits until its pods are ready: a GPU node starts, an image of several GB is pulled (15 min), models load. An
  # upgrade replaces a group's pods one after the other on GPUs, a quarter at a time elsewhere, and each waits for its models:
  # less time than that would roll back an upgrade that is going well.
  node_start_s = 900
  rollout_s = [for group in values(local.model_groups) :
    (group.load_grace_s + 60) * (contains(["gpu", "tensorrt"], group.accelerator) ? group.replicas.max : ceil(group.replicas.max / ceil(group.replicas.max * 0.25)))
  ]
  platform_timeout_s = local.node_start_s + min(86400, max(300, local.rollout_s...))

  # Calls with a pool of their own.
  named_calls = concat(
    flatten([for group in values(local.model_groups) : concat([for model in group.models : "model ${model}"], [for service in try(group.engine.services, []) : "service ${service}"])]),
    flatten([for pool in values(var.policies.pools) : concat([for model in pool.models : "model ${model}"], [for service in pool.services : "service ${service}"])]),
  )

  charts = {
    keda = {
      enabled    = var.keda.enabled && var.keda.install
      repository = "https://kedacore.github.io/charts"
      chart      = "keda"
      version    = var.keda.chart_version
      namespace  = var.keda.namespace
      values = {
        # Its operator may read Secrets and scale: in one namespace, not in all of them.
        watchNamespace = var.namespace
      }
    }
    nvidia-device-plugin = {
      enabled    = var.gpu_enabled && var.charts.nvidia_device_plugin.enabled
      repository = "https://nvidia.github.io/k8s-device-plugin"
      chart      = "nvidia-device-plugin"
      version    = var.charts.nvidia_device_plugin.version
      namespace  = "kube-system"
      values = {
        nodeSelector = var.infrastructure.gpu_node_selector
        # null takes the chart's own away: it asks for labels that only node-feature-discovery sets.
        affinity    = null
        tolerations = [for key in [var.infrastructure.gpu_taint.key, "oriel.dev/spot", "kubernetes.azure.com/scalesetpriority"] : { key = key, operator = "Exists" }]
      }
    }
    metrics-server = {
      enabled    = var.charts.metrics_server.enabled
      repository = "https://kubernetes-sigs.github.io/metrics-server"
      chart      = "metrics-server"
      version    = var.charts.metrics_server.version
      namespace  = "kube-system"
      values     = { replicas = 2, podDisruptionBudget = { enabled = true, maxUnavailable = 1 } }
    }
    kube-prometheus-stack = {
      enabled    = var.charts.kube_prometheus_stack.enabled
      repository = "https://prometheus-community.github.io/helm-charts"
      chart      = "kube-prometheus-stack"
      version    = var.charts.kube_prometheus_stack.version
      namespace  = var.observability.namespace
      values = {
        # The monitors, rules and dashboards of all namespaces: by default it takes only those of its own release.
        prometheus = {
          prometheusSpec = {
            serviceMonitorSelectorNilUsesHelmValues = false
            ruleSelectorNilUsesHelmValues           = false
          }
        }
        grafana = { sidecar = { dashboards = { enabled = true, label = "grafana_dashboard", labelValue = "1", searchNamespace = "ALL" } } }
      }
    }
    prometheus-operator-crds = {
      enabled    = var.charts.prometheus_operator_crds.enabled && !var.charts.kube_prometheus_stack.enabled
      repository = "https://prometheus-community.github.io/helm-charts"
      chart      = "prometheus-operator-crds"
      version    = var.charts.prometheus_operator_crds.version
      namespace  = var.observability.namespace
      values     = {}
    }
  }
}

# The namespace comes first and from a release elsewhere: a release is kept in its namespace, so that none could make its own with
# the labels that it needs. It may be there before, made by hand for the Secrets that pods name (docs/deploy.md): then it is
# taken over, and given the labels.
resource "helm_release" "namespace" {
  name            = "oriel-namespace"
  namespace       = "kube-system"
  chart           = "${path.module}/namespace"
  values          = [jsonencode({ name = var.namespace })]
  take_ownership  = true
  atomic          = true
  cleanup_on_fail = true
  wait            = true
  max_history     = 10
  timeout         = 300
}

resource "helm_release" "charts" {
  for_each = { for name, chart in local.charts : name => chart if chart.enabled }

  name             = each.key
  namespace        = each.value.namespace
  create_namespace = !contains(["kube-system", var.namespace], each.value.namespace)
  repository       = each.value.repository
  chart            = each.value.chart
  version          = each.value.version
  values           = [jsonencode(each.value.values)]
  atomic           = true
  cleanup_on_fail  = true
  wait             = true
  max_history      = 10
  timeout          = 900

  depends_on = [helm_release.namespace]
}

resource "helm_release" "oriel" {
  name      = "oriel"
  namespace = var.namespace
  chart     = "${path.module}/../../../deploy/chart"
  values = [jsonencode({
    # The members that objects use; the chart refuses names that it does not know.
    infrastructure = { for name in [
      "cloud", "model_repository_url", "redis_url", "redis_tls", "redis_auth_secret_ref", "workload_identity", "store_networks",
      "gpu_node_selector", "gpu_taint", "storage_class", "storage",
    ] : name => var.infrastructure[name] }
    keda           = { for name, value in var.keda : name => value if !contains(["chart_version", "install"], name) }
    store_networks = var.store_networks
    images         = var.images
    gateway        = var.gateway
    logic          = var.logic
    model_groups   = var.model_groups
    policies       = var.policies
    redis          = var.redis
    gpu_enabled    = var.gpu_enabled
    scale_to_zero  = var.scale_to_zero
    placement      = var.placement
    observability  = var.observability
  })]
  # By its path: the key ca.crt is one name.
  set_sensitive = flatten([for name, texts in var.infrastructure.secrets : [
    for key, text in texts : { name = "infrastructure.secrets.${replace(name, ".", "\\.")}.${replace(key, ".", "\\.")}", value = text, type = "string" }
  ]])
  atomic          = true
  cleanup_on_fail = true
  wait            = true
  max_history     = 10
  timeout         = local.platform_timeout_s

  depends_on = [helm_release.namespace, helm_release.charts]

  # What two variables decide: a validation would not be looked at while the other one has a mistake.
  lifecycle {
    # Nobody could say which of two groups without a pod to start for a model that neither names.
    precondition {
      condition     = !var.keda.enabled || length([for group in values(local.model_groups) : group if length(group.models) == 0 && group.engine == null]) <= 1
      error_message = "keda.enabled: several model groups name no models, so that a call could not tell which one to start: give all groups but one `models` (names, or patterns such as \"gpu-*\"), for example model_groups = { cpu = { accelerator = \"cpu\" }, gpu = { accelerator = \"gpu\", models = [\"gpu-*\"] } }."
    }
    precondition {
      condition     = var.keda.enabled || alltrue([for group in values(local.model_groups) : coalesce(group.replicas.min, 1) != 0])
      error_message = "model_groups: replicas.min is 0 only with keda.enabled: nothing else would start the first pod."
    }
    precondition {
      condition     = var.keda.enabled || alltrue([for group in values(local.model_groups) : group.engine == null && try(group.spot, null) == null])
      error_message = "model_groups: an engine needs keda.enabled, and so does spot: without it, all groups are servers of one pool, for models."
    }
    precondition {
      condition     = length(local.named_calls) == length(distinct(local.named_calls))
      error_message = "policies.pools: a model or service stands in two pools, or a model in model_groups as well: calls go to one pool only."
    }
    precondition {
      condition     = var.keda.enabled || length(local.model_groups) == 1 || alltrue([for group in values(local.model_groups) : !group.place_models || length(group.models) > 0])
      error_message = "model_groups: place_models needs a pool for this group alone: name its models, or set keda.enabled."
    }
    precondition {
      condition     = var.keda.enabled || coalesce(var.logic.replicas.min, 2) != 0
      error_message = "logic.replicas: min is 0 only with keda.enabled: nothing else would start the first pod."
    }
  }
}
