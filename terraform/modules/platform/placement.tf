# Placement: GPU nodes have CPUs to spare, and they are paid for.
#
# A node with one GPU comes with 8 CPUs and more; the pod on the GPU uses some of them. CPU pods (logic servers, CPU
# inference) use the rest. What has to hold, and by what:
#
# 1. A CPU pod runs on a GPU node that a GPU pod already pays for. It tolerates the taint and prefers these nodes.
# 2. It never makes anybody buy one, and never moves to an empty one. A preference alone would not do: when no node has
#    room, an autoscaler asks of each kind of node whether a new one would take the pod, and a pod that tolerates the taint
#    fits. So it also has to be where a pod with the label oriel.dev/cpu-here is (required podAffinity, by host). Two kinds
#    of pods carry it: GPU inference, and `anchor`, a DaemonSet that does nothing on every node without a GPU. A new CPU
#    node comes with its anchor (autoscalers count DaemonSets when they imagine a node): the pod fits. A new GPU node comes
#    with nothing: it does not fit, until a GPU pod is there. CPU pods themselves do not carry the label: the exception
#    "the first pod of a group may go anywhere" is for pods that match their own affinity.
# 3. It never hurts a GPU pod. A GPU pod that finds no CPUs or memory displaces CPU pods (PriorityClass oriel-gpu above
#    oriel-cpu; they spill to CPU nodes). While both run, CPU time is shared by requests, and each pod's memory has a limit
#    equal to its request, so that none can drive the node into eviction. Model caches are counted as ephemeral storage.
# 4. It keeps no node from going. All pods may be evicted (PodDisruptionBudgets allow one at least, emptyDirs are marked
#    as no obstacle), and autoscalers judge GPU nodes by their GPUs alone. What affinity cannot do: it is looked at when a
#    pod is placed, so CPU pods stay when the GPU pod beside them ends. An autoscaler then removes the node only if these
#    pods fit on nodes that exist; while every CPU node is full they hold it. If that costs more than it saves, set
#    placement.share_gpu_nodes = false: then none of all this is made, and CPU pods keep to CPU nodes.
#
# Where clouds differ. The taint is nvidia.com/gpu=present:NoSchedule on all three:
#   GKE   sets it by itself on a pool with GPUs, and adds a toleration to every pod that asks for nvidia.com/gpu. Not to
#         CPU pods: theirs stands here.
#   EKS   sets no taint: the node group does, as `taint` (effects are spelled NO_SCHEDULE there). When a group is at zero, its
#         autoscaler learns labels and taints from the group's tags, which the root sets: without them it would imagine an
#         untainted node without a label and be wrong about both kinds of pods.
#   AKS   sets no taint for GPUs either: the pool does (`node_taints`). It adds one of its own to spot pools only.
# Their autoscalers are all the Kubernetes cluster-autoscaler. Karpenter (also as EKS Auto Mode and AKS node
# auto-provisioning) does not satisfy an affinity to pods of a DaemonSet when it imagines a node: there CPU pods would
# wait for ever. Use node groups, or share_gpu_nodes = false.

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

  # Gateways have theirs in any case: on full nodes they displace logic servers and CPU inference, not the other way round.
  priority_of = {
    for component in ["gpu", "gateway", "cpu"] :
    component => { for key, value in { priorityClassName = "oriel-${component}" } : key => value if component == "gateway" || local.shares_gpu_nodes }
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
  # A single node that goes may not take every gateway with it, so for them this is no wish: where there are two nodes they
  # are on both, and their priority makes the room. On a cluster of one node they share it.
  spread_strictly = { gateway = ["kubernetes.io/hostname"], logic = [] }
  spread = {
    for component in ["gateway", "logic"] : component => [
      for topology in sort(keys(local.spread_over)) : merge(
        local.spread_over[topology],
        { labelSelector = { matchLabels = local.selectors[component] } },
        { whenUnsatisfiable = contains(local.spread_strictly[component], topology) ? "DoNotSchedule" : "ScheduleAnyway" },
      )
    ]
  }
  group_spread = {
    for group in keys(local.model_groups) : group => [
      for topology in sort(keys(local.spread_over)) : merge(local.spread_over[topology], { labelSelector = { matchLabels = local.group_selectors[group] } })
    ]
  }

  # Whether pods name them or not: a class that goes while pods still name it (GPUs or sharing are turned off, a release is
  # rolled back) keeps every new pod of theirs from being made.
  priority_objects = [
    for name, priority in { gpu = 100000, gateway = 50000, cpu = 0 } : {
      apiVersion                = "scheduling.k8s.io/v1"
      kind                      = "PriorityClass"
      metadata                  = { name = "oriel-${name}", labels = local.common_labels }
      value                     = priority
      globalDefault             = false
      description               = "Of Oriel's ${name} pods: a GPU pod displaces CPU pods from its node, never the other way round."
    }
  ]

  placement_objects = [
    for each in [
      {
        apiVersion = "apps/v1"
        kind       = "DaemonSet"
        metadata   = { name = "anchor", namespace = local.namespace, labels = local.labels.anchor }
        spec = {
          selector       = { matchLabels = local.selectors.anchor }
          updateStrategy = { type = "RollingUpdate", rollingUpdate = { maxUnavailable = "10%" } }
          template = {
            metadata = { labels = merge(local.labels.anchor, local.marks_node) }
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
