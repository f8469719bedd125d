# Azure Managed Redis: with a replica, TLS and a key, reachable by its private endpoint only.

resource "azurerm_managed_redis" "this" {
  count = var.redis.managed ? 1 : 0

  name                      = "${var.name}-${local.suffix}"
  resource_group_name       = azurerm_resource_group.this.name
  location                  = azurerm_resource_group.this.location
  sku_name                  = coalesce(var.redis.size, "Balanced_B0")
  high_availability_enabled = true
  public_network_access     = "Disabled"
  tags                      = local.tags

  default_database {
    client_protocol                    = "Encrypted"
    access_keys_authentication_enabled = true
    # One address, and scripts with several keys: gateways speak to it as to a single Redis.
    clustering_policy = "NoCluster"
    # Its records are counters and leases: none of them may be thrown out early.
    eviction_policy = "NoEviction"
  }
}
