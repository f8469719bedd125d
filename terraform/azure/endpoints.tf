# Registry, models and Redis by private addresses in our network, under their usual names.

locals {
  endpoints = merge({
    registry = { id = azurerm_container_registry.images.id, part = "registry", zone = "privatelink.azurecr.io" }
    models   = { id = azurerm_storage_account.models.id, part = "blob", zone = "privatelink.blob.core.windows.net" }
    }, var.redis.managed ? {
    redis = { id = azurerm_managed_redis.this[0].id, part = "redisEnterprise", zone = "privatelink.redis.azure.net" }
  } : {})
}

resource "azurerm_private_dns_zone" "this" {
  for_each = local.endpoints

  name                = each.value.zone
  resource_group_name = azurerm_resource_group.this.name
  tags                = local.tags
}

resource "azurerm_private_dns_zone_virtual_network_link" "this" {
  for_each = local.endpoints

  name                  = var.name
  resource_group_name   = azurerm_resource_group.this.name
  private_dns_zone_name = azurerm_private_dns_zone.this[each.key].name
  virtual_network_id    = local.network_id
  registration_enabled  = false
  tags                  = local.tags
}

resource "azurerm_private_endpoint" "this" {
  for_each = local.endpoints

  name                = "${var.name}-${each.key}"
  resource_group_name = azurerm_resource_group.this.name
  location            = azurerm_resource_group.this.location
  subnet_id           = local.endpoints_subnet
  tags                = local.tags

  private_service_connection {
    name                           = each.key
    private_connection_resource_id = each.value.id
    subresource_names              = [each.value.part]
    is_manual_connection           = false
  }
  private_dns_zone_group {
    name                 = "default"
    private_dns_zone_ids = [azurerm_private_dns_zone.this[each.key].id]
  }
}
