# Who decides how many replicas there are: a HorizontalPodAutoscaler by CPU, or, with keda.enabled, KEDA by the gateway's
# queue. Never both for one Deployment: they would undo each other's work. The gateway is always scaled by CPU: KEDA asks
# the gateway, which is there to be asked.

locals {
  # Of pods of a group that names no number.
  fewest = var.keda.enabled && var.scale_to_zero ? 0 : 1

  # By the names of the Deployments, which are those of the gateway's pools as well.
  scaled = merge(
    { logic = {
      component   = "logic"
      replicas    = { min = coalesce(var.logic.replicas.min, local.fewest == 0 ? 0 : 2), max = var.logic.replicas.max }
      cpu_percent = 70
      settle_s    = 300
      # A node, if there has to be another one, and the image.
      start_s  = 120
      capacity = var.logic.workers
    } },
    { for name, group in local.model_groups : "inference-${name}" => {
      component = "inference"
      replicas  = group.replicas
      # Queues grow long before a model server's CPUs are all busy, above all one with a GPU, which no
      # HorizontalPodAutoscaler sees without an adapter for its metrics.
      cpu_percent = group.on_gpu ? 50 : 70
      # What took long to load is not dropped for a short lull. 3600: the most Kubernetes takes.
      settle_s = min(3600, max(300, 2 * group.load_grace_s))
      start_s  = group.start_s
      capacity = 1
    } },
  )

  behavior = { for name, target in merge(local.scaled, { gateway = { settle_s = 300 } }) : name => {
    scaleUp = {
      stabilizationWindowSeconds = 0
      selectPolicy               = "Max"
      policies = [
        { type = "Percent", value = 100, periodSeconds = 30 },
        { type = "Pods", value = 2, periodSeconds = 30 },
      ]
    }
    scaleDown = {
      stabilizationWindowSeconds = target.settle_s
      selectPolicy               = "Max"
      policies                   = [{ type = "Pods", value = 1, periodSeconds = 60 }]
    }
  } }

  # KEDA's metric is the number of pods that are wanted, so one poll of its HorizontalPodAutoscaler is enough to get there.
  # The gateway plans falls too, by how long a start takes: a window of a minute is enough (docs/scaling.md).
  wanted_at_once = { for name, target in local.scaled : name => merge(local.behavior[name], {
    scaleUp = {
      stabilizationWindowSeconds = 0
      selectPolicy               = "Max"
      policies                   = [{ type = "Pods", value = target.replicas.max, periodSeconds = 15 }]
    }
    scaleDown = merge(local.behavior[name].scaleDown, { stabilizationWindowSeconds = 60 })
  }) }

  by_cpu = merge(
    { gateway = { component = "gateway", replicas = var.gateway.replicas, cpu_percent = 60 } },
    var.keda.enabled ? {} : local.scaled,
  )

  scaling_objects = concat(
    [for name, target in local.by_cpu : {
      apiVersion = "autoscaling/v2"
      kind       = "HorizontalPodAutoscaler"
      metadata   = { name = name, namespace = local.namespace, labels = local.labels[target.component] }
      spec = {
        scaleTargetRef = { apiVersion = "apps/v1", kind = "Deployment", name = name }
        minReplicas    = target.replicas.min
        maxReplicas    = target.replicas.max
        metrics = [{
          type     = "Resource"
          resource = { name = "cpu", target = { type = "Utilization", averageUtilization = target.cpu_percent } }
        }]
        behavior = local.behavior[name]
      }
    }],
    # Not a port of the gateway's own Service, which is public.
    [for each in [{
      apiVersion = "v1"
      kind       = "Service"
      metadata   = { name = "gateway-scaler", namespace = local.namespace, labels = local.labels.gateway }
      spec = {
        type     = "ClusterIP"
        selector = local.selectors.gateway
        ports    = [{ name = "grpc-scaler", port = 8083, targetPort = 8083, protocol = "TCP", appProtocol = "kubernetes.io/h2c" }]
      }
    }] : each if var.keda.enabled],
  )

  scaling_custom_objects = [for name, target in local.scaled : {
    apiVersion = "keda.sh/v1alpha1"
    kind       = "ScaledObject"
    metadata   = { name = name, namespace = local.namespace, labels = local.labels[target.component] }
    spec = merge({
      scaleTargetRef  = { apiVersion = "apps/v1", kind = "Deployment", name = name }
      pollingInterval = var.keda.polling_interval_s
      # Short: the gateway says for how long an idle pool is kept, and reports it as active until then.
      cooldownPeriod = var.keda.cooldown_s
      # A new object must not stop what has served up to now before the gateway has seen a call.
      initialCooldownPeriod = 300
      minReplicaCount       = target.replicas.min
      maxReplicaCount       = target.replicas.max
      advanced = {
        restoreToOriginalReplicaCount = false
        # By KEDA's own name for it, keda-hpa-NAME: one of ours may still be there, or be there again, under NAME.
        horizontalPodAutoscalerConfig = { behavior = local.wanted_at_once[name] }
      }
      triggers = [{
        type       = "external-push"
        metricType = "AverageValue"
        metadata = {
          scalerAddress = "gateway-scaler.${var.namespace}.svc.cluster.local:8083"
          target        = name
        }
      }]
      },
      # A gateway that cannot be asked three times is no reason to lose what serves. Where there may be no replica, not even
      # that: since KEDA 2.19 a fallback wakes a pool without a call. Without one, a failure changes nothing.
      { for key, value in { fallback = { failureThreshold = 3, replicas = target.replicas.min } } : key => value if target.replicas.min > 0 },
    )
  } if var.keda.enabled]
}
