# Who decides how many replicas there are: a HorizontalPodAutoscaler by CPU, or, with keda.enabled, KEDA by the gateway's
# queue. Never both for one Deployment: they would undo each other's work. The gateway is always scaled by CPU: KEDA asks
# the gateway, which is there to be asked.

locals {
  scaled = merge(
    { logic = { component = "logic", replicas = var.logic.replicas, cpu_percent = 70, settle_s = 300 } },
    { for name, group in local.model_groups : "inference-${name}" => {
      component = "inference"
      replicas  = group.replicas
      # Queues grow long before a model server's CPUs are all busy, above all one with a GPU, which no
      # HorizontalPodAutoscaler sees without an adapter for its metrics.
      cpu_percent = group.on_gpu ? 50 : 70
      # What took long to load is not dropped for a short lull. 3600: the most Kubernetes takes.
      settle_s = min(3600, max(300, 2 * group.load_grace_s))
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
    spec = {
      scaleTargetRef  = { apiVersion = "apps/v1", kind = "Deployment", name = name }
      pollingInterval = var.keda.polling_interval_s
      cooldownPeriod  = max(var.keda.cooldown_s, target.settle_s)
      minReplicaCount = var.scale_to_zero ? 0 : target.replicas.min
      maxReplicaCount = target.replicas.max
      # A gateway that cannot be asked three times is no reason to lose what serves.
      fallback = { failureThreshold = 3, replicas = target.replicas.min }
      advanced = {
        restoreToOriginalReplicaCount = false
        # By KEDA's own name for it, keda-hpa-NAME: one of ours may still be there, or be there again, under NAME.
        horizontalPodAutoscalerConfig = { behavior = local.behavior[name] }
      }
      triggers = [{
        type       = "external-push"
        metricType = "AverageValue"
        metadata = {
          scalerAddress = "gateway-scaler.${var.namespace}.svc.cluster.local:8083"
          target        = name
        }
      }]
    }
  } if var.keda.enabled]
}
