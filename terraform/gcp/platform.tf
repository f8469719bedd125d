# What runs on it: the same module on every cloud.

module "platform" {
  count  = var.deploy_platform ? 1 : 0
  source = "../modules/platform"

  infrastructure = merge(local.infrastructure, {
    # GKE's own storage classes leave out our key.
    storage = {
      provisioner = "pd.csi.storage.gke.io"
      parameters  = { type = "pd-balanced", disk-encryption-kms-key = google_kms_crypto_key.this["disks"].id }
    }
    # Redis's password and the certificates that sign for this one instance, two of them while Google changes it. They are in
    # Terraform's state, so the state has to be encrypted and remote (backend.tf.example).
    secrets = !var.redis.managed ? {} : { (local.infrastructure.redis_auth_secret_ref.name) = {
      (local.infrastructure.redis_auth_secret_ref.key) = google_redis_instance.this[0].auth_string
      "ca.crt"                                         = join("\n", [for each in google_redis_instance.this[0].server_ca_certs : each.cert])
    } }
  })
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
  ]
}

locals {
  gateway_service = {
    # The passthrough load balancer that GKE now makes by backend services; the older kind cannot be changed into it.
    annotations = { "cloud.google.com/l4-rbs" = "enabled" }
    address     = one(google_compute_address.gateway[*].address)
  }
}
