# The gateway's address and its name, in a zone that is there already.

data "azurerm_dns_zone" "this" {
  count = var.dns == null ? 0 : 1

  name = var.dns.zone
}

resource "azurerm_public_ip" "gateway" {
  count = var.dns == null ? 0 : 1

  name                = "${var.name}-gateway"
  resource_group_name = azurerm_resource_group.this.name
  location            = azurerm_resource_group.this.location
  allocation_method   = "Static"
  sku                 = "Standard"
  zones               = length(local.zones) == 0 ? null : local.zones
  tags                = local.tags
  lifecycle {
    # The load balancer writes down whose it is.
    ignore_changes = [tags]
  }
}

# The load balancer looks for the address in our group, and takes it.
resource "azurerm_role_assignment" "address" {
  for_each = var.dns == null ? {} : {
    "Reader"              = azurerm_resource_group.this.id
    "Network Contributor" = azurerm_public_ip.gateway[0].id
  }

  scope                            = each.value
  role_definition_name             = each.key
  principal_id                     = local.cluster_principal
  principal_type                   = "ServicePrincipal"
  skip_service_principal_aad_check = true
}

resource "azurerm_dns_a_record" "gateway" {
  count = var.dns == null ? 0 : 1

  name                = trimsuffix(var.dns.host, ".${var.dns.zone}")
  zone_name           = data.azurerm_dns_zone.this[0].name
  resource_group_name = data.azurerm_dns_zone.this[0].resource_group_name
  ttl                 = 60
  records             = [azurerm_public_ip.gateway[0].ip_address]
  tags                = local.tags
}
