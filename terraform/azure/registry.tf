# Premium: the only kind with private endpoints. Open to api_access_cidrs, from where images are pushed; to nobody else.

resource "azurerm_container_registry" "images" {
  name                          = local.unique_name
  resource_group_name           = azurerm_resource_group.this.name
  location                      = azurerm_resource_group.this.location
  sku                           = "Premium"
  admin_enabled                 = false
  anonymous_pull_enabled        = false
  zone_redundancy_enabled       = length(local.zones) > 0
  public_network_access_enabled = !local.private
  network_rule_bypass_option    = "None"
  network_rule_set = [{
    default_action = "Deny"
    ip_rule        = [for cidr in var.cluster.api_access_cidrs : { action = "Allow", ip_range = cidr }]
  }]
  tags = local.tags
}

resource "azurerm_role_assignment" "registry" {
  scope                            = azurerm_container_registry.images.id
  role_definition_name             = "AcrPull"
  principal_id                     = try(azurerm_user_assigned_identity.nodes[0].principal_id, local.aks.kubelet_identity[0].object_id)
  principal_type                   = "ServicePrincipal"
  skip_service_principal_aad_check = true
}
