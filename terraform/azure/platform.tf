# What runs on it: the same module on every cloud.

module "platform" {
  count  = var.deploy_platform ? 1 : 0
  source = "../modules/platform"

  infrastructure = merge(local.infrastructure, {
    # Redis's key. It is in Terraform's state, so the state has to be encrypted and remote (backend.tf.example).
    secrets = !var.redis.managed ? {} : { (local.infrastructure.redis_auth_secret_ref.name) = {
      (local.infrastructure.redis_auth_secret_ref.key) = azurerm_managed_redis.this[0].default_database[0].primary_access_key
    } }
  })
  namespace      = local.namespace
  store_networks = try(var.platform.store_networks, null)
  images         = merge(try(var.platform.images, {}), { registry = coalesce(var.image_registry, local.infrastructure.registry_url), tag = var.image_tag })
  gpu_enabled    = var.gpu_enabled
  scale_to_zero  = var.scale_to_zero

  gateway = merge(try(var.platform.gateway, {}), {
    service_annotations = merge(local.gateway_service.annotations, try(var.platform.gateway.service_annotations, {}))
    load_balancer_ip    = try(var.platform.gateway.load_balancer_ip, null)
    tls_secret          = try(var.platform.gateway.tls_secret, var.dns.tls_secret, null)
  })
  logic         = try(var.platform.logic, {})
  model_groups  = try(var.platform.model_groups, null)
  policies      = try(var.platform.policies, {})
  redis         = try(var.platform.redis, {})
  placement     = try(var.platform.placement, {})
  keda          = try(var.platform.keda, {})
  charts        = try(var.platform.charts, {})
  observability = try(var.platform.observability, {})

  # Pods start on these, pull with that, and read the models by this; the load balancer takes the address.
  depends_on = [
    azurerm_kubernetes_cluster_node_pool.scaled,
    azurerm_role_assignment.registry,
    azurerm_role_assignment.models,
    azurerm_role_assignment.address,
    azurerm_federated_identity_credential.units,
    azurerm_private_endpoint.this,
    azurerm_private_dns_zone_virtual_network_link.this,
  ]
}

locals {
  gateway_service = {
    annotations = merge(
      # From the ports' appProtocol AKS would make probes of GET /, which the gateway answers with 404.
      { for port in [80, 443, 8081] : "service.beta.kubernetes.io/port_${port}_health-probe_protocol" => "tcp" },
      var.dns == null ? {} : {
        "service.beta.kubernetes.io/azure-load-balancer-resource-group" = azurerm_resource_group.this.name
        "service.beta.kubernetes.io/azure-pip-name"                     = azurerm_public_ip.gateway[0].name
      },
    )
  }
}
