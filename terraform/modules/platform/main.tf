# Every Kubernetes object is an HCL value, a file per concern; releases.tf hands them to Kubernetes. So terraform itself
# evaluates them before there is a cluster, and a plan shows each change of each field.
#
# The names the concern files share: labels (by component), common_labels, selectors, model_groups, telemetry_env, pod_base.

locals {
  namespace = var.namespace

  # Fixed: images, documents, dashboards and network policies rely on them.
  ports = {
    gateway   = { http = 8080, grpc = 8081, admin = 8082, scaler = 8083, internal = 8084 }
    logic     = { http = 8090, admin = 8092 }
    inference = { http = 8000, grpc = 8001, metrics = 8002 }
    redis     = { redis = 6379 }
  }

  common_labels = {
    "app.kubernetes.io/name"       = "oriel"
    "app.kubernetes.io/part-of"    = "oriel"
    "app.kubernetes.io/managed-by" = "terraform"
  }
  labels = {
    for component in ["gateway", "logic", "inference", "redis", "collector", "anchor"] :
    component => merge(local.common_labels, { "app.kubernetes.io/component" = component })
  }
  # What finds the pods of a component again. It may never change: Kubernetes refuses another selector of a Deployment.
  selectors = {
    for component in keys(local.labels) :
    component => { "app.kubernetes.io/name" = "oriel", "app.kubernetes.io/component" = component }
  }

  group_labels = {
    for group in keys(local.model_groups) : group => merge(local.labels.inference, { "oriel.dev/model-group" = group })
  }
  group_selectors = {
    for group in keys(local.model_groups) : group => merge(local.selectors.inference, { "oriel.dev/model-group" = group })
  }

  image_registry = var.images.registry
  pull_secrets   = [for name in compact([var.images.pull_secret]) : { name = name }]

  # What the units themselves need to finish after SIGTERM (their README: 25 s, 20 s for logic, then 1.5 s at most), and
  # before that a pause for whoever still sends: Kubernetes takes a pod out of DNS and load balancers while it is being
  # stopped, not before. Names are looked up every 5 s; the cluster's DNS caches
  # them for 5 s on the clouds, for 30 s where its Corefile says `ttl 30` (kubeadm, kind). Who still sends to one that drains is
  # answered, and one that is gone is found out at the first call. Cloud load balancers take longer.
  unit_drain_s  = 25
  pause_s       = { gateway = 20, logic = 12, inference = 12 }
  stop_margin_s = 8

  # Pod addresses, whose x-oriel-* headers (deadline, tier, tenant) count. Which pods can send any is what the network
  # policies say: only the gateway reaches logic; it alone, or with logic, reaches inference.
  cluster_networks = ["10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7"]
  trusted_peers    = flatten([for network in local.cluster_networks : ["--trusted-peer", network]])

  unit_env = concat([
    { name = "ORIEL_STATE", value = "/var/lib/oriel" },
    { name = "XDG_CACHE_HOME", value = "/var/lib/oriel/cache" },
  ], local.telemetry_env)

  pod_security = {
    runAsNonRoot   = true
    runAsUser      = 65532
    runAsGroup     = 65532
    fsGroup        = 65532
    seccompProfile = { type = "RuntimeDefault" }
  }
  container_security = {
    allowPrivilegeEscalation = false
    readOnlyRootFilesystem   = true
    capabilities             = { drop = ["ALL"] }
  }
  # Everything of ours may be moved: cluster autoscalers keep a node for a pod that has an emptyDir, unless it says so.
  movable = { "cluster-autoscaler.kubernetes.io/safe-to-evict" = "true" }

  # Same wherever a unit runs: nothing but these two can be written.
  scratch_volumes = [
    { name = "tmp", emptyDir = { sizeLimit = "512Mi" } },
    # The usage ledger keeps up to 1 GiB there; a pod whose emptyDir overflows is evicted.
    { name = "state", emptyDir = { sizeLimit = "1536Mi" } },
  ]
  scratch_mounts = [
    { name = "tmp", mountPath = "/tmp" },
    { name = "state", mountPath = "/var/lib/oriel" },
  ]

  service_accounts = [
    for component in ["gateway", "logic", "inference"] : {
      apiVersion = "v1"
      kind       = "ServiceAccount"
      metadata = merge(
        { name = component, namespace = local.namespace, labels = local.labels[component] },
        length(try(var.infrastructure.workload_identity.service_account_annotations[component], {})) == 0 ? {} : {
          annotations = var.infrastructure.workload_identity.service_account_annotations[component]
        },
      )
      # The clouds put their own short-lived token into the pods. Kubernetes' own is for its API, which only the gateway calls:
      # it mounts its token by itself (gateway.tf).
      automountServiceAccountToken = false
    }
  ]

  # Before everything else, in a release of their own: pods are refused without their namespace and their priority class.
  base_objects = concat([
    {
      apiVersion = "v1"
      kind       = "Namespace"
      metadata = {
        name = local.namespace
        # Helm leaves it, and with it the Secrets that people put there, on destroy and when a first install is rolled back.
        annotations = { "helm.sh/resource-policy" = "keep" }
        labels = merge(local.common_labels, {
          "pod-security.kubernetes.io/enforce" = "restricted"
          "pod-security.kubernetes.io/audit"   = "restricted"
          "pod-security.kubernetes.io/warn"    = "restricted"
        })
      }
    },
  ], local.priority_objects)

  objects = concat(
    local.service_accounts,
    local.gateway_role,
    local.policies_objects,
    local.redis_objects,
    local.inference_objects,
    local.logic_objects,
    local.gateway_objects,
    local.placement_objects,
    local.network_objects,
    local.scaling_objects,
    local.observability_objects,
  )
  # Kinds that a chart has to bring first.
  custom_objects = concat(local.scaling_custom_objects, local.observability_custom_objects)
}
