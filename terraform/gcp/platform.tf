# What runs on it: the same module on every cloud, and two objects that need this one.

locals {
  carrier_chart = "${path.module}/../modules/platform/chart"
}

# GKE's own storage classes leave out our key.
resource "helm_release" "storage" {
  count = var.deploy_platform ? 1 : 0

  name            = "oriel-storage"
  namespace       = "kube-system"
  chart           = local.carrier_chart
  atomic          = true
  cleanup_on_fail = true
  max_history     = 2
  timeout         = 300

  values = [jsonencode({ objects = [{
    apiVersion           = "storage.k8s.io/v1"
    kind                 = "StorageClass"
    metadata             = { name = local.infrastructure.storage_class }
    provisioner          = "pd.csi.storage.gke.io"
    parameters           = { type = "pd-balanced", disk-encryption-kms-key = google_kms_crypto_key.this["disks"].id }
    volumeBindingMode    = "WaitForFirstConsumer"
    allowVolumeExpansion = true
    reclaimPolicy        = "Delete"
  }] })]

  depends_on = [google_container_node_pool.system]
}

module "platform" {
  count  = var.deploy_platform ? 1 : 0
  source = "../modules/platform"

  infrastructure = local.infrastructure
  namespace      = local.namespace
  store_networks = try(var.platform.store_networks, null)
  images         = merge(try(var.platform.images, {}), { registry = coalesce(var.image_registry, local.registry_url), tag = var.image_tag })
  gpu_enabled    = var.gpu_enabled
  scale_to_zero  = var.scale_to_zero

  gateway = merge(try(var.platform.gateway, {}), {
    service_annotations = merge(local.gateway_service.annotations, try(var.platform.gateway.service_annotations, {}))
    load_balancer_ip    = try(var.platform.gateway.load_balancer_ip, local.gateway_service.address)
    tls_secret          = try(var.platform.gateway.tls_secret, var.dns.tls_secret, null)
  })
  logic        = try(var.platform.logic, {})
  model_groups = try(var.platform.model_groups, null)
  policies     = try(var.platform.policies, {})
  redis        = try(var.platform.redis, {})
  placement    = try(var.platform.placement, {})
  keda         = try(var.platform.keda, {})
  # GKE brings the device plugin with the driver, and metrics-server.
  charts = merge(try(var.platform.charts, {}), {
    nvidia_device_plugin = merge(try(var.platform.charts.nvidia_device_plugin, {}), { enabled = false })
  })
  observability = try(var.platform.observability, {})

  # Pods start on these, pull with that, and read the bucket.
  depends_on = [
    google_container_node_pool.system,
    google_container_node_pool.scaled,
    google_artifact_registry_repository_iam_member.nodes,
    google_storage_bucket_iam_member.readers,
    helm_release.storage,
  ]
}

locals {
  gateway_service = {
    # The passthrough load balancer that GKE now makes by backend services; the older kind cannot be changed into it.
    annotations = { "cloud.google.com/l4-rbs" = "enabled" }
    address     = one(google_compute_address.gateway[*].address)
  }
}

# Redis's password and the certificate that signs for it. They are in Terraform's state, so the state has to be encrypted
# and remote (backend.tf.example). The namespace is the platform's: it is there before, and goes after.
resource "helm_release" "secrets" {
  count = var.deploy_platform && var.redis.managed ? 1 : 0

  name            = "oriel-secrets"
  namespace       = module.platform[0].namespace
  chart           = local.carrier_chart
  atomic          = true
  cleanup_on_fail = true
  max_history     = 2
  timeout         = 300

  values = [jsonencode({ objects = [{
    apiVersion = "v1"
    kind       = "Secret"
    metadata   = { name = local.infrastructure.redis_auth_secret_ref.name, namespace = module.platform[0].namespace }
    type       = "Opaque"
    # It signs for this one instance; two of them while Google changes it.
    stringData = { "ca.crt" = join("\n", [for each in google_redis_instance.this[0].server_ca_certs : each.cert]) }
  }] })]
  set_sensitive = [{
    name  = "objects[0].stringData.${local.infrastructure.redis_auth_secret_ref.key}"
    value = google_redis_instance.this[0].auth_string
    type  = "string"
  }]
}
