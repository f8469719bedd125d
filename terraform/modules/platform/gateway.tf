locals {
  # Every pod of the platform.
  pod_base = merge(
    {
      automountServiceAccountToken = false
      enableServiceLinks           = false
      securityContext              = local.pod_security
    },
    length(local.pull_secrets) == 0 ? {} : { imagePullSecrets = local.pull_secrets },
  )
  # Not on GPU nodes, whose taint it does not tolerate: the public door has to outlive the last GPU.
  gateway_placement = merge(
    {
      affinity = {
        nodeAffinity = {
          preferredDuringSchedulingIgnoredDuringExecution = [
            { weight = 50, preference = { matchExpressions = [{ key = "oriel.dev/pool", operator = "In", values = ["system"] }] } },
          ]
        }
      }
    },
    local.priority_of.gateway,
  )

  gateway_policies = coalesce(var.policies.store, "/etc/oriel/policies")
  gateway_args = concat(
    ["--policies", local.gateway_policies, "--host", "0.0.0.0", "--admin-host", "0.0.0.0"],
    local.through_gateway ? ["--internal-host", "0.0.0.0"] : [],
    ["--limiter", local.redis_url, "--limiter-replicas", tostring(var.gateway.replicas.min)],
    local.redis_ca ? ["--limiter-ca", "/etc/oriel/redis/ca.crt"] : [],
    var.gateway.tls_secret == null ? [] : ["--tls-cert", "/etc/oriel/tls/tls.crt", "--tls-key", "/etc/oriel/tls/tls.key"],
    var.keda.enabled ? ["--scaler-port", tostring(local.ports.gateway.scaler)] : [],
    local.collector_tail ? ["--trace-tail", "collector"] : [],
    var.gateway.args,
  )
  gateway_env = concat(
    local.unit_env,
    local.redis_password_env,
    [
      for variable, ref in {
        ORIEL_ADMIN_TOKEN = coalesce(var.gateway.admin_token_secret_ref, local.own_key.admin)
        ORIEL_TICKET_KEYS = coalesce(var.gateway.ticket_keys_secret_ref, local.own_key.tickets)
      } :
      { name = variable, valueFrom = { secretKeyRef = { name = ref.name, key = ref.key } } } if variable != "ORIEL_TICKET_KEYS" || local.through_gateway
    ],
  )
  gateway_mounts = concat(
    local.scratch_mounts,
    [{ name = "kubernetes", mountPath = "/var/run/secrets/kubernetes.io/serviceaccount", readOnly = true }],
    [for each in [{ name = "policies", mountPath = "/etc/oriel/policies", readOnly = true }] : each if var.policies.store == null],
    [for each in [{ name = "tls", mountPath = "/etc/oriel/tls", readOnly = true }] : each if var.gateway.tls_secret != null],
    [for each in [{ name = "redis", mountPath = "/etc/oriel/redis", readOnly = true }] : each if local.redis_ca],
  )
  # A mirror of policies.store also holds up to three sets of 512 MiB there while it changes them.
  gateway_scratch = [
    for volume in local.scratch_volumes : volume.name == "state" && var.policies.store != null ? merge(volume, { emptyDir = { sizeLimit = "3Gi" } }) : volume
  ]
  # The gateway watches which pods its pools have: EndpointSlices of this namespace, and nothing else.
  gateway_role = [
    {
      apiVersion = "rbac.authorization.k8s.io/v1"
      kind       = "Role"
      metadata   = { name = "gateway-endpoints", namespace = local.namespace, labels = local.labels.gateway }
      rules      = [{ apiGroups = ["discovery.k8s.io"], resources = ["endpointslices"], verbs = ["get", "list", "watch"] }]
    },
    {
      apiVersion = "rbac.authorization.k8s.io/v1"
      kind       = "RoleBinding"
      metadata   = { name = "gateway-endpoints", namespace = local.namespace, labels = local.labels.gateway }
      roleRef    = { apiGroup = "rbac.authorization.k8s.io", kind = "Role", name = "gateway-endpoints" }
      subjects   = [{ kind = "ServiceAccount", name = "gateway", namespace = local.namespace }]
    },
  ]
  # What Kubernetes would mount for automountServiceAccountToken, for this container alone. 0440, read by the group.
  gateway_account = {
    name = "kubernetes"
    projected = {
      defaultMode = 288
      sources = [
        { serviceAccountToken = { path = "token", expirationSeconds = 3607 } },
        { configMap = { name = "kube-root-ca.crt", items = [{ key = "ca.crt", path = "ca.crt" }] } },
        { downwardAPI = { items = [{ path = "namespace", fieldRef = { apiVersion = "v1", fieldPath = "metadata.namespace" } }] } },
      ]
    }
  }
  gateway_volumes = concat(
    local.gateway_scratch,
    [local.gateway_account],
    [for each in [{ name = "policies", configMap = { name = "policies" } }] : each if var.policies.store == null],
    # Only the certificate, and only if there is one: other clouds' Redis is signed for by whom everybody trusts.
    [
      for each in [
        { name = "redis", secret = { secretName = try(local.redis_secret.name, ""), items = [{ key = "ca.crt", path = "ca.crt" }], optional = true } },
      ] : each if local.redis_ca
    ],
    # 0440, read by the group: the process is not root.
    [for name in compact([var.gateway.tls_secret]) : { name = "tls", secret = { secretName = name, defaultMode = 288 } }],
  )

  # Ports without appProtocol: told that one speaks HTTP, Azure's balancer asks for "/" and takes a 404 for a dead pod.
  gateway_service = merge(
    {
      type     = var.gateway.service_type
      selector = local.selectors.gateway
      ports = [
        {
          name       = var.gateway.tls_secret == null ? "http" : "https"
          port       = var.gateway.tls_secret == null ? 80 : 443
          targetPort = "http"
          protocol   = "TCP"
        },
        { name = "grpc", port = local.ports.gateway.grpc, targetPort = "grpc", protocol = "TCP" },
      ]
    },
    { for key, value in { loadBalancerIP = var.gateway.load_balancer_ip, loadBalancerClass = var.gateway.load_balancer_class } :
    key => value if value != null && var.gateway.service_type == "LoadBalancer" },
    { for key, value in { loadBalancerSourceRanges = var.gateway.source_ranges } :
    key => value if length(value) > 0 && var.gateway.service_type == "LoadBalancer" },
  )

  gateway_objects = concat([for each in [
    {
      apiVersion = "v1"
      kind       = "Service"
      metadata   = { name = "gateway-internal", namespace = local.namespace, labels = local.labels.gateway }
      spec = {
        # Every pod by its own address: logic servers choose by load.
        clusterIP = "None"
        selector  = local.selectors.gateway
        ports     = [{ name = "internal", port = local.ports.gateway.internal, targetPort = "internal", protocol = "TCP" }]
      }
    },
    ] : each if local.through_gateway], [
    {
      apiVersion = "v1"
      kind       = "Service"
      metadata = merge(
        { name = "gateway", namespace = local.namespace, labels = local.labels.gateway },
        length(var.gateway.service_annotations) == 0 ? {} : { annotations = var.gateway.service_annotations },
      )
      spec = local.gateway_service
    },
    {
      apiVersion = "apps/v1"
      kind       = "Deployment"
      metadata   = { name = "gateway", namespace = local.namespace, labels = local.labels.gateway }
      spec = {
        # How many is the autoscaler's to say: a number here would set it back at each apply.
        revisionHistoryLimit = 5
        strategy             = { type = "RollingUpdate", rollingUpdate = { maxSurge = 1, maxUnavailable = 0 } }
        selector             = { matchLabels = local.selectors.gateway }
        template = {
          metadata = { labels = merge(local.labels.gateway, var.infrastructure.workload_identity.pod_labels), annotations = local.movable }
          spec = merge(local.pod_base, local.gateway_placement, {
            serviceAccountName            = "gateway"
            terminationGracePeriodSeconds = local.pause_s.gateway + local.unit_drain_s + local.stop_margin_s
            topologySpreadConstraints     = local.spread.gateway
            volumes                       = local.gateway_volumes
            containers = [
              {
                name            = "gateway"
                image           = "${local.image_registry}/oriel-gateway:${var.images.tag}"
                imagePullPolicy = var.images.pull_policy
                args            = local.gateway_args
                env             = local.gateway_env
                envFrom         = [for name in compact([var.gateway.credentials]) : { secretRef = { name = name } }]
                ports = [
                  for name in concat(["http", "grpc", "admin"], var.keda.enabled ? ["scaler"] : [], local.through_gateway ? ["internal"] : []) :
                  { name = name, containerPort = local.ports.gateway[name], protocol = "TCP" }
                ]
                volumeMounts = local.gateway_mounts
                startupProbe = {
                  httpGet          = { path = "/health/live", port = "admin" }
                  periodSeconds    = 2
                  failureThreshold = 60
                }
                readinessProbe = {
                  httpGet          = { path = "/health/ready", port = "admin" }
                  periodSeconds    = 2
                  timeoutSeconds   = 2
                  failureThreshold = 2
                }
                # Slow to act: a busy gateway that is killed drops every call it holds.
                livenessProbe = {
                  httpGet          = { path = "/health/live", port = "admin" }
                  periodSeconds    = 10
                  timeoutSeconds   = 5
                  failureThreshold = 6
                }
                lifecycle = { preStop = { sleep = { seconds = local.pause_s.gateway } } }
                # No limit on CPUs: a queue that is throttled is late for everybody. Memory is bounded in the gateway itself.
                resources = {
                  requests = { cpu = tostring(var.gateway.cpu), memory = "${var.gateway.memory * 1024}Mi" }
                  limits   = { memory = "${var.gateway.memory * 1024}Mi" }
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
      metadata   = { name = "gateway", namespace = local.namespace, labels = local.labels.gateway }
      spec       = { maxUnavailable = 1, selector = { matchLabels = local.selectors.gateway }, unhealthyPodEvictionPolicy = "AlwaysAllow" }
    },
  ])
}
