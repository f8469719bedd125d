# Where gateways share their limits. It holds counters and leases: what is lost with it is a burst of each rate, and quotas
# are restored from what the gateways saw last (docs/policies.md). So it keeps nothing on disk and runs once.

locals {
  bundles_redis = var.infrastructure.redis_url == null
  redis_url     = coalesce(var.infrastructure.redis_url, "redis://redis:${local.ports.redis.redis}")
  redis_secret  = local.bundles_redis ? local.own_key.redis : var.infrastructure.redis_auth_secret_ref

  # Who signs for a Redis with TLS may stand beside its password.
  redis_ca = !local.bundles_redis && var.infrastructure.redis_tls && local.redis_secret != null

  redis_password_env = [
    for ref in local.redis_secret == null ? [] : [local.redis_secret] :
    { name = "ORIEL_LIMITER_PASSWORD", valueFrom = { secretKeyRef = { name = ref.name, key = ref.key } } }
  ]

  redis_args = [
    "--save", "", "--appendonly", "no", "--maxmemory", "${var.redis.memory}mb", "--maxmemory-policy", "noeviction",
    "--requirepass", "$(REDISCLI_AUTH)", # of its environment: Kubernetes puts it in
  ]

  redis_probe = { exec = { command = ["redis-cli", "-e", "ping"] }, timeoutSeconds = 3 }

  redis_objects = [
    for each in [
      {
        apiVersion = "v1"
        kind       = "Service"
        metadata   = { name = "redis", namespace = local.namespace, labels = local.labels.redis }
        spec = {
          selector = local.selectors.redis
          ports    = [{ name = "redis", port = local.ports.redis.redis, targetPort = "redis", protocol = "TCP" }]
        }
      },
      {
        apiVersion = "apps/v1"
        kind       = "Deployment"
        metadata   = { name = "redis", namespace = local.namespace, labels = local.labels.redis }
        spec = {
          replicas             = 1
          revisionHistoryLimit = 3
          # Two at once would count apart.
          strategy = { type = "Recreate" }
          selector = { matchLabels = local.selectors.redis }
          template = {
            metadata = { labels = local.labels.redis, annotations = local.movable }
            spec = merge(local.pod_base, local.gateway_placement, {
              # Of the image's own user. Another image's would do as well: nothing is written.
              securityContext = merge(local.pod_security, { runAsUser = 999, runAsGroup = 999, fsGroup = 999 })
              volumes         = [{ name = "data", emptyDir = { sizeLimit = "64Mi" } }]
              containers = [
                {
                  name            = "redis"
                  image           = var.redis.image
                  imagePullPolicy = var.images.pull_policy
                  command         = ["redis-server"]
                  args            = local.redis_args
                  env             = [{ name = "REDISCLI_AUTH", valueFrom = { secretKeyRef = local.own_key.redis } }]
                  workingDir      = "/data"
                  volumeMounts    = [{ name = "data", mountPath = "/data" }]
                  ports           = [{ name = "redis", containerPort = local.ports.redis.redis, protocol = "TCP" }]
                  readinessProbe  = merge(local.redis_probe, { periodSeconds = 5, failureThreshold = 2 })
                  livenessProbe   = merge(local.redis_probe, { periodSeconds = 10, failureThreshold = 6 })
                  # Records, and as much again for connections and fragments.
                  resources = {
                    requests = { cpu = "100m", memory = "${var.redis.memory * 2}Mi" }
                    limits   = { memory = "${var.redis.memory * 2}Mi" }
                  }
                  securityContext = local.container_security
                }
              ]
            })
          }
        }
      },
    ] : each if local.bundles_redis
  ]
}
