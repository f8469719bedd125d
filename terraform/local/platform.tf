module "platform" {
  source = "../modules/platform"

  infrastructure = local.infrastructure
  images         = merge(try(var.platform.images, {}), { registry = var.image_registry, tag = var.image_tag })
  gpu_enabled    = var.gpu_enabled
  scale_to_zero  = var.scale_to_zero
  namespace      = try(var.platform.namespace, null)
  store_networks = try(var.platform.store_networks, null)
  gateway        = try(var.platform.gateway, null)
  logic          = try(var.platform.logic, null)
  model_groups   = try(var.platform.model_groups, null)
  policies       = try(var.platform.policies, null)
  redis          = try(var.platform.redis, null)
  placement      = try(var.platform.placement, null)
  keda           = try(var.platform.keda, null)
  charts         = try(var.platform.charts, null)
  observability  = try(var.platform.observability, null)

  depends_on = [data.kubernetes_server_version.this]
}
