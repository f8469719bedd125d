# What is installed, in this order: base (the namespace and the priorities everything else names), the charts of others,
# the platform, and last what needs the charts' custom resources. Destroyed the other way round.

locals {
  # The Secret with the keys that are made here, of which each is used where the inputs name no other.
  keys_secret = "oriel-keys"
  own_key     = { for name in ["admin", "redis", "tickets"] : name => { name = local.keys_secret, key = name } }

  # A release waits until its pods are ready: a GPU node starts, an image of several GB is pulled (15 min), models load. An
  # upgrade replaces a group's pods one after the other on GPUs, a quarter at a time elsewhere (local.rollout), and each
  # waits for its models: less time than that would roll back an upgrade that is going well.
  node_start_s = 900
  rollout_s = [for group in values(local.model_groups) :
    (group.load_grace_s + 60) * (group.on_gpu ? group.replicas.max : ceil(group.replicas.max / ceil(group.replicas.max * 0.25)))
  ]
  platform_timeout_s = local.node_start_s + min(86400, max(300, local.rollout_s...))

  charts = {
    keda = {
      enabled    = var.keda.enabled
      repository = "https://kedacore.github.io/charts"
      chart      = "keda"
      version    = var.keda.chart_version
      namespace  = local.keda_namespace
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
        affinity = null
        tolerations = [{
          key      = var.infrastructure.gpu_taint.key
          operator = "Exists"
          effect   = var.infrastructure.gpu_taint.effect
        }]
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

# The namespace is an object of a release elsewhere: create_namespace could not give it its labels. It may be there before, made
# by hand for the Secrets that pods name (docs/deploy.md): then it is taken over, and given the labels.
resource "helm_release" "base" {
  name            = "oriel-base"
  namespace       = "kube-system"
  chart           = "${path.module}/chart"
  values          = [jsonencode({ objects = local.base_objects })]
  take_ownership  = true
  atomic          = true
  cleanup_on_fail = true
  wait            = true
  max_history     = 10
  timeout         = 300
}

# Keys that nobody has to know. uuid() is random (twice 122 bits) and new in each run, hence ignored once made; `apply -replace` of
# one rotates it, and its pods take it at their next start.
resource "terraform_data" "keys" {
  for_each = local.own_key

  triggers_replace = sensitive(sha256("${uuid()}${uuid()}"))
  lifecycle {
    ignore_changes = [triggers_replace]
  }
}

resource "helm_release" "keys" {
  name      = local.keys_secret
  namespace = var.namespace
  chart     = "${path.module}/chart"
  values = [jsonencode({ objects = [{
    apiVersion = "v1"
    kind       = "Secret"
    metadata   = { name = local.keys_secret, namespace = var.namespace, labels = local.common_labels }
    type       = "Opaque"
    stringData = { for name in keys(local.own_key) : name => "" }
  }] })]
  set_sensitive = [for name in keys(local.own_key) : {
    name  = "objects[0].stringData.${name}"
    value = terraform_data.keys[name].triggers_replace
    type  = "string"
  }]
  atomic          = true
  cleanup_on_fail = true
  max_history     = 10
  timeout         = 300

  depends_on = [helm_release.base]
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

  depends_on = [helm_release.base]
}

resource "helm_release" "platform" {
  name            = "oriel"
  namespace       = var.namespace
  chart           = "${path.module}/chart"
  values          = [jsonencode({ objects = local.objects })]
  atomic          = true
  cleanup_on_fail = true
  wait            = true
  max_history     = 10
  timeout         = local.platform_timeout_s

  depends_on = [helm_release.base, helm_release.charts, helm_release.keys]

  # What two variables decide: a validation would not be looked at while the other one has a mistake.
  lifecycle {
    # Nobody could say which of two groups without a pod to start for a model that neither names.
    precondition {
      condition     = !var.keda.enabled || (var.model_groups == null ? !var.gpu_enabled : length([for group in values(coalesce(var.model_groups, {})) : group if length(group.models) == 0 && group.engine == null]) <= 1)
      error_message = "keda.enabled: several model groups name no models, so that a call could not tell which one to start: give all groups but one `models` (names, or patterns such as \"gpu-*\"), for example model_groups = { cpu = { accelerator = \"cpu\" }, gpu = { accelerator = \"gpu\", models = [\"gpu-*\"] } }."
    }
    precondition {
      condition     = var.keda.enabled || alltrue([for group in values(coalesce(var.model_groups, {})) : coalesce(group.replicas.min, 1) != 0])
      error_message = "model_groups: replicas.min is 0 only with keda.enabled: nothing else would start the first pod."
    }
    precondition {
      condition     = var.keda.enabled || length(local.engines) == 0
      error_message = "model_groups: an engine needs keda.enabled: without it, all groups are servers of one pool, for models."
    }
    precondition {
      condition     = length(local.named) == length(local.named_routes)
      error_message = "policies.pools: a model or service stands in two pools, or a model in model_groups as well: calls go to one pool only."
    }
    precondition {
      condition     = alltrue([for name, group in local.model_groups : !group.place_models || contains(keys(local.pool_discovery), "inference-${name}") || length(local.model_groups) == 1])
      error_message = "model_groups: place_models needs a pool for this group alone: name its models, or set keda.enabled."
    }
    precondition {
      condition     = var.keda.enabled || coalesce(var.logic.replicas.min, 2) != 0
      error_message = "logic.replicas: min is 0 only with keda.enabled: nothing else would start the first pod."
    }
  }
}

# In a release of its own: Helm refuses a release with a kind the cluster does not know yet.
resource "helm_release" "custom" {
  count = var.keda.enabled || var.observability.service_monitors ? 1 : 0

  name            = "oriel-custom"
  namespace       = var.namespace
  chart           = "${path.module}/chart"
  values          = [jsonencode({ objects = local.custom_objects })]
  atomic          = true
  cleanup_on_fail = true
  wait            = true
  max_history     = 10
  timeout         = 300

  depends_on = [helm_release.charts, helm_release.platform]
}
