locals {
  logic_folders = concat([for each in ["/etc/oriel/services"] : each if length(var.logic.services) > 0 || length(var.logic.folders) == 0], var.logic.folders)
  logic_args = concat(
    ["--host", "0.0.0.0"],
    flatten([for folder in local.logic_folders : ["--services", folder]]),
    # All groups under one name: a server that has not the model says so, and another one is asked. Through the gateway where
    # a group may have no server: calls wait there, and are counted.
    local.through_gateway ? ["--gateway", "gateway-internal:${local.ports.gateway.internal}"] : [
      "--inference", "inference:${local.ports.inference.http}", "--inference-grpc", "inference:${local.ports.inference.grpc}",
    ],
    ["--workers", tostring(var.logic.workers)],
    local.trusted_peers,
    var.logic.args,
  )
  # The gateway does not see direct calls, and would let KEDA stop the pods under them.
  through_gateway = coalesce(var.logic.through_gateway, var.keda.enabled)

  logic_objects = [
    # There even when it is empty, so that the first service needs no other pods.
    {
      apiVersion = "v1"
      kind       = "ConfigMap"
      metadata   = { name = "services", namespace = local.namespace, labels = local.labels.logic }
      data       = var.logic.services
    },
    {
      apiVersion = "v1"
      kind       = "Service"
      metadata   = { name = "logic", namespace = local.namespace, labels = local.labels.logic }
      spec = {
        # Every pod by its own address: the gateway chooses by load, and finds out within a second who is gone.
        clusterIP = "None"
        selector  = local.selectors.logic
        ports = [
          { name = "http", port = local.ports.logic.http, targetPort = "http", protocol = "TCP" },
        ]
      }
    },
    {
      apiVersion = "apps/v1"
      kind       = "Deployment"
      metadata   = { name = "logic", namespace = local.namespace, labels = local.labels.logic }
      spec = {
        revisionHistoryLimit = 5
        strategy             = { type = "RollingUpdate", rollingUpdate = { maxSurge = "25%", maxUnavailable = 0 } }
        selector             = { matchLabels = local.selectors.logic }
        template = {
          metadata = { labels = merge(local.labels.logic, var.infrastructure.workload_identity.pod_labels), annotations = local.movable }
          spec = merge(local.pod_base, local.cpu_placement, {
            serviceAccountName            = "logic"
            terminationGracePeriodSeconds = local.pause_s.logic + local.unit_drain_s + local.stop_margin_s
            topologySpreadConstraints     = local.spread.logic
            volumes                       = concat(local.scratch_volumes, [{ name = "services", configMap = { name = "services" } }])
            containers = [
              {
                name            = "logic"
                image           = coalesce(var.logic.image, "${local.image_registry}/oriel-logic:${var.images.tag}")
                imagePullPolicy = var.images.pull_policy
                args            = local.logic_args
                env             = local.unit_env
                ports = [
                  for name in ["http", "admin"] :
                  { name = name, containerPort = local.ports.logic[name], protocol = "TCP" }
                ]
                volumeMounts = concat(local.scratch_mounts, [{ name = "services", mountPath = "/etc/oriel/services", readOnly = true }])
                # Services may load tokenizers and tables at start.
                startupProbe = {
                  httpGet          = { path = "/health/live", port = "admin" }
                  periodSeconds    = 2
                  failureThreshold = 150
                }
                readinessProbe = {
                  httpGet          = { path = "/health/ready", port = "admin" }
                  periodSeconds    = 2
                  timeoutSeconds   = 2
                  failureThreshold = 2
                }
                livenessProbe = {
                  httpGet          = { path = "/health/live", port = "admin" }
                  periodSeconds    = 10
                  timeoutSeconds   = 5
                  failureThreshold = 6
                }
                lifecycle = { preStop = { sleep = { seconds = local.pause_s.logic } } }
                resources = {
                  requests = { cpu = tostring(var.logic.cpu), memory = "${var.logic.memory * 1024}Mi" }
                  limits   = { memory = "${var.logic.memory * 1024}Mi" }
                }
                securityContext = local.container_security
              }
            ]
          })
        }
      }
    },
    {
      apiVersion = "policy/v1"
      kind       = "PodDisruptionBudget"
      metadata   = { name = "logic", namespace = local.namespace, labels = local.labels.logic }
      spec       = { maxUnavailable = "25%", selector = { matchLabels = local.selectors.logic }, unhealthyPodEvictionPolicy = "AlwaysAllow" }
    },
  ]
}
