locals {
  # Only where there are GPU nodes to share.
  shares_gpu_nodes = var.placement.share_gpu_nodes && var.gpu_enabled
  gpu_selector     = var.infrastructure.gpu_node_selector

  # The mark of a node on which CPU pods may run: it is on a pod there, not on the node.
  marks_node = { for key, value in { "oriel.dev/cpu-here" = "true" } : key => value if local.shares_gpu_nodes }

  gpu_toleration = {
    key      = var.infrastructure.gpu_taint.key
    operator = "Equal"
    value    = var.infrastructure.gpu_taint.value
    effect   = var.infrastructure.gpu_taint.effect
  }

  priority_of = {
    for component in ["gpu", "gateway", "cpu"] :
    component => { for key, value in { priorityClassName = "oriel-${component}" } : key => value if local.shares_gpu_nodes }
  }

  gpu_placement = merge(
    { nodeSelector = local.gpu_selector, tolerations = [local.gpu_toleration] },
    local.priority_of.gpu,
  )

  cpu_prefers = concat(
    [
      for each in [
        { weight = 100, preference = { matchExpressions = [for key in sort(keys(local.gpu_selector)) : { key = key, operator = "In", values = [local.gpu_selector[key]] }] } },
      ] : each if local.shares_gpu_nodes && length(local.gpu_selector) > 0
    ],
    [{ weight = 50, preference = { matchExpressions = [{ key = "oriel.dev/pool", operator = "In", values = ["cpu"] }] } }],
  )
  cpu_placement = merge(
    {
      affinity = merge(
        { nodeAffinity = { preferredDuringSchedulingIgnoredDuringExecution = local.cpu_prefers } },
        {
          for key, value in {
            podAffinity = {
              requiredDuringSchedulingIgnoredDuringExecution = [
                { topologyKey = "kubernetes.io/hostname", labelSelector = { matchLabels = { "oriel.dev/cpu-here" = "true" } } },
              ]
            }
          } : key => value if local.shares_gpu_nodes
        },
      )
    },
    { for key, value in { tolerations = [local.gpu_toleration] } : key => value if local.shares_gpu_nodes },
    local.priority_of.cpu,
  )

  placement_of = { cpu = local.cpu_placement, gpu = local.gpu_placement }

  # Over zones and nodes as evenly as it goes, each version of a Deployment for itself.
  spread_over = {
    for topology in ["topology.kubernetes.io/zone", "kubernetes.io/hostname"] : topology => {
      maxSkew            = 1
      topologyKey        = topology
      whenUnsatisfiable  = "ScheduleAnyway"
      matchLabelKeys     = ["pod-template-hash"]
      nodeAffinityPolicy = "Honor"
      nodeTaintsPolicy   = "Honor"
    }
  }
  spread = {
    for component in ["gateway", "logic"] : component => [
      for topology in sort(keys(local.spread_over)) : merge(local.spread_over[topology], { labelSelector = { matchLabels = local.selectors[component] } })
    ]
  }
  group_spread = {
    for group in keys(local.model_groups) : group => [
      for topology in sort(keys(local.spread_over)) : merge(local.spread_over[topology], { labelSelector = { matchLabels = local.group_selectors[group] } })
    ]
  }

  priority_objects = [
    for name, priority in { gpu = 100000, gateway = 50000, cpu = 0 } : {
      apiVersion                = "scheduling.k8s.io/v1"
      kind                      = "PriorityClass"
      metadata                  = { name = "oriel-${name}", labels = local.labels }
      value                     = priority
      globalDefault             = false
      description               = "Of Oriel's ${name} pods: a GPU pod displaces CPU pods from its node, never the other way round."
    } if local.shares_gpu_nodes
  ]

  placement_objects = [
    for each in [
      {
        apiVersion = "apps/v1"
        kind       = "DaemonSet"
        metadata   = { name = "anchor", namespace = local.namespace, labels = local.component_labels.anchor }
        spec = {
          selector       = { matchLabels = local.selectors.anchor }
          updateStrategy = { type = "RollingUpdate", rollingUpdate = { maxUnavailable = "10%" } }
          template = {
            metadata = { labels = merge(local.component_labels.anchor, local.marks_node) }
            spec = merge(local.pod_base, local.priority_of.gateway, {
              terminationGracePeriodSeconds = 1
              affinity                      = local.anchor_affinity
              containers = [
                {
                  name            = "anchor"
                  image           = var.placement.pause_image
                  imagePullPolicy = var.images.pull_policy
                  resources       = { requests = { cpu = "1m", memory = "8Mi" }, limits = { memory = "8Mi" } }
                  securityContext = local.container_security
                }
              ]
            })
          }
        }
      },
    ] : each if local.shares_gpu_nodes
  ]
  # Not (a = 1 and b = 2) is: a is not 1, or b is not 2. Terms are joined by or.
  anchor_affinity = {
    nodeAffinity = {
      requiredDuringSchedulingIgnoredDuringExecution = {
        nodeSelectorTerms = [
          for key in sort(keys(local.gpu_selector)) :
          { matchExpressions = [{ key = key, operator = "NotIn", values = [local.gpu_selector[key]] }] }
        ]
      }
    }
  }
}
