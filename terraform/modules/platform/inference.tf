locals {
  default_groups = merge(
    { cpu = { accelerator = "cpu" } },
    { for name, group in { gpu = { accelerator = "gpu" } } : name => group if var.gpu_enabled },
  )
  accelerated = ["gpu", "tensorrt"]
  # CPUs and memory in GiB for which the default nodes are chosen (terraform/README.md).
  group_sizes = {
    cpu      = { cpu = 2, memory = 4 }
    openvino = { cpu = 2, memory = 4 }
    gpu      = { cpu = 2, memory = 12 }
    tensorrt = { cpu = 2, memory = 12 }
  }
  # What the caller said, and what follows from it.
  model_groups = {
    for name, group in merge({ for key, value in local.default_groups : key => value if var.model_groups == null }, var.model_groups) : name => {
      accelerator  = group.accelerator
      on_gpu       = contains(local.accelerated, group.accelerator)
      kind         = contains(local.accelerated, group.accelerator) ? "gpu" : "cpu"
      repository   = coalesce(try(group.repository, null), "${trimsuffix(var.infrastructure.model_repository_url, "/")}/${name}")
      credentials  = try(group.credentials, null)
      models       = try(group.models, [])
      replicas     = { min = coalesce(try(group.replicas.min, null), local.fewest), max = try(group.replicas.max, 4) }
      start_s      = coalesce(try(group.start_s, null), contains(local.accelerated, group.accelerator) ? 300 : 120)
      cpu          = coalesce(try(group.cpu, null), local.group_sizes[group.accelerator].cpu)
      memory       = coalesce(try(group.memory, null), local.group_sizes[group.accelerator].memory)
      cache        = try(group.cache, { gb = 20, claim = false })
      load_grace_s = try(group.load_grace_s, 900)
      place_models = try(group.place_models, false)
      args         = try(group.args, [])
      engine       = try(group.engine, null)
    }
  }

  inference_args = {
    for name, group in local.model_groups : name => concat(
      ["--model-repository", group.repository, "--model-control-mode", group.place_models ? "demand" : "poll", "--repository-poll-secs", "15"],
      # The rest of the memory is for the server itself and for what waits in it.
      group.place_models ? ["--model-memory-budget", format("%d", floor(group.memory * 0.6 * 1073741824))] : [],
      # Less than the volume has: a pod whose emptyDir overflows is evicted. What is being fetched comes on top.
      ["--model-cache", "/var/lib/oriel/models", "--model-cache-bytes", format("%d", floor(group.cache.gb * 0.9 * 1073741824))],
      ["--host", "0.0.0.0", "--id", "inference-${name}"],
      # A bad upload takes no other model away; a pod on which nothing loads is no part of a rollout that succeeds.
      ["--strict-readiness=any"],
      # Requests, not what the node has: the rest is other pods'.
      ["--cores", tostring(max(1, floor(group.cpu)))],
      local.trusted_peers,
      group.args,
    )
  }
  # The start of a container: arguments of Oriel's server, or the command of an engine of others.
  started_by = { for name, group in local.model_groups : name => merge(
    { for key, value in { args = local.inference_args[name] } : key => value if group.engine == null },
    { for key, value in { command = try(group.engine.command, []) } : key => value if group.engine != null },
  ) }
  # Fetched models. A claim is a disk of its own for each pod, made and deleted with it; else a share of the node's.
  cache_volume = {
    for name, group in local.model_groups : name => merge(
      { name = "models" },
      { for key, value in { emptyDir = { sizeLimit = "${group.cache.gb}Gi" } } : key => value if !group.cache.claim },
      {
        for key, value in {
          ephemeral = {
            volumeClaimTemplate = {
              metadata = { labels = local.group_labels[name] }
              spec = {
                accessModes      = ["ReadWriteOnce"]
                storageClassName = var.infrastructure.storage_class
                resources        = { requests = { storage = "${group.cache.gb}Gi" } }
              }
            }
          }
        } : key => value if group.cache.claim
      },
    )
  }
  disk_requests = {
    for name, group in local.model_groups : name => { for key, value in { "ephemeral-storage" = "${group.cache.gb + 1}Gi" } : key => value if !group.cache.claim }
  }

  rollout = {
    cpu = { type = "RollingUpdate", rollingUpdate = { maxSurge = "25%", maxUnavailable = 0 } }
    # One GPU more than are bought may not be there: the old pod goes first.
    gpu = { type = "RollingUpdate", rollingUpdate = { maxSurge = 0, maxUnavailable = 1 } }
  }

  inference_ports = [
    { name = "http", port = local.ports.inference.http, targetPort = "http", protocol = "TCP" },
    { name = "grpc", port = local.ports.inference.grpc, targetPort = "grpc", protocol = "TCP" },
  ]

  inference_objects = concat(
    [
      # All groups under one name, for logic servers and for models no group claims.
      {
        apiVersion = "v1"
        kind       = "Service"
        metadata   = { name = "inference", namespace = local.namespace, labels = local.labels.inference }
        spec = {
          clusterIP = "None"
          selector  = local.selectors.inference
          ports     = local.inference_ports
        }
      },
    ],
    [
      for name, group in local.model_groups : {
        apiVersion = "v1"
        kind       = "Service"
        metadata   = { name = "inference-${name}", namespace = local.namespace, labels = local.group_labels[name] }
        spec = {
          clusterIP = "None"
          selector  = local.group_selectors[name]
          ports     = local.inference_ports
        }
      }
    ],
    [
      for name, group in local.model_groups : {
        apiVersion = "apps/v1"
        kind       = "Deployment"
        metadata   = { name = "inference-${name}", namespace = local.namespace, labels = local.group_labels[name] }
        spec = {
          revisionHistoryLimit    = 5
          strategy                = local.rollout[group.kind]
          progressDeadlineSeconds = group.load_grace_s + 600
          selector                = { matchLabels = local.group_selectors[name] }
          template = {
            metadata = {
              labels = merge(
                local.group_labels[name],
                group.on_gpu ? local.marks_node : {},
                var.infrastructure.workload_identity.pod_labels,
              )
              annotations = local.movable
            }
            spec = merge(local.pod_base, local.placement_of[group.kind], {
              serviceAccountName            = "inference"
              terminationGracePeriodSeconds = local.pause_s.inference + local.unit_drain_s + local.stop_margin_s
              topologySpreadConstraints     = local.group_spread[name]
              volumes                       = concat(local.scratch_volumes, [local.cache_volume[name]])
              containers = [
                merge(local.started_by[name], {
                  name            = "inference"
                  image           = group.engine == null ? "${local.image_registry}/oriel-inference:${var.images.tag}-${group.accelerator}" : group.engine.image
                  imagePullPolicy = var.images.pull_policy
                  # Engines fetch their models where this says, which is the only large disk that they may write to.
                  env     = concat(local.unit_env, [for path in ["/var/lib/oriel/models"] : { name = "HF_HOME", value = path } if group.engine != null])
                  envFrom = [for name in compact([group.credentials]) : { secretRef = { name = name } }]
                  ports = [
                    for port in ["http", "grpc", "metrics"] :
                    { name = port, containerPort = local.ports.inference[port], protocol = "TCP" }
                  ]
                  volumeMounts = concat(local.scratch_mounts, [{ name = "models", mountPath = "/var/lib/oriel/models" }])
                  # Models are fetched and loaded before it is ready; the port answers meanwhile. What is not ready after the
                  # grace is begun anew, with what was fetched still there.
                  startupProbe = {
                    httpGet          = { path = group.engine == null ? "/v2/health/ready" : group.engine.health, port = "http" }
                    periodSeconds    = 5
                    timeoutSeconds   = 2
                    failureThreshold = ceil(group.load_grace_s / 5)
                  }
                  readinessProbe = {
                    httpGet          = { path = group.engine == null ? "/v2/health/ready" : group.engine.health, port = "http" }
                    periodSeconds    = 2
                    timeoutSeconds   = 2
                    failureThreshold = 2
                  }
                  livenessProbe = {
                    httpGet          = { path = group.engine == null ? "/v2/health/live" : group.engine.health, port = "http" }
                    periodSeconds    = 10
                    timeoutSeconds   = 5
                    failureThreshold = 6
                  }
                  lifecycle = { preStop = { sleep = { seconds = local.pause_s.inference } } }
                  resources = {
                    requests = merge(
                      { cpu = tostring(group.cpu), memory = "${group.memory * 1024}Mi" },
                      local.disk_requests[name],
                      { for key, value in { "nvidia.com/gpu" = "1" } : key => value if group.on_gpu },
                    )
                    limits = merge(
                      { memory = "${group.memory * 1024}Mi" },
                      { for key, value in { "nvidia.com/gpu" = "1" } : key => value if group.on_gpu },
                    )
                  }
                  securityContext = local.container_security
                })
              ]
            })
          }
        }
      }
    ],
    [
      for name, group in local.model_groups : {
        apiVersion = "policy/v1"
        kind       = "PodDisruptionBudget"
        metadata   = { name = "inference-${name}", namespace = local.namespace, labels = local.group_labels[name] }
        spec       = { maxUnavailable = "25%", selector = { matchLabels = local.group_selectors[name] }, unhealthyPodEvictionPolicy = "AlwaysAllow" }
      }
    ],
  )
}
