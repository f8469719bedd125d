# The model repository: no keys, no public objects, older versions for 30 days. Open to api_access_cidrs, from where models
# are uploaded; to nobody else.

locals {
  # What a storage account takes: single addresses without a mask.
  upload_addresses = flatten([
    for cidr in var.cluster.api_access_cidrs : (
      endswith(cidr, "/32") ? [cidrhost(cidr, 0)] : endswith(cidr, "/31") ? [cidrhost(cidr, 0), cidrhost(cidr, 1)] : [cidr]
    )
  ])
}

resource "azurerm_storage_account" "models" {
  name                              = local.unique_name
  resource_group_name               = azurerm_resource_group.this.name
  location                          = azurerm_resource_group.this.location
  account_kind                      = "StorageV2"
  account_tier                      = "Standard"
  account_replication_type          = length(local.zones) > 0 ? "ZRS" : "LRS"
  min_tls_version                   = "TLS1_2"
  https_traffic_only_enabled        = true
  infrastructure_encryption_enabled = true
  shared_access_key_enabled         = false
  default_to_oauth_authentication   = true
  local_user_enabled                = false
  allow_nested_items_to_be_public   = false
  cross_tenant_replication_enabled  = false
  public_network_access_enabled     = !local.private
  tags                              = local.tags

  network_rules {
    default_action = "Deny"
    bypass         = ["None"]
    ip_rules       = local.upload_addresses
  }
  blob_properties {
    versioning_enabled = true
    delete_retention_policy {
      days = 30
    }
    container_delete_retention_policy {
      days = 30
    }
  }
}

resource "azurerm_storage_management_policy" "models" {
  storage_account_id = azurerm_storage_account.models.id
  rule {
    name    = "old-versions"
    enabled = true
    filters {
      blob_types = ["blockBlob"]
    }
    actions {
      version {
        delete_after_days_since_creation = 30
      }
    }
  }
}

resource "azurerm_storage_container" "models" {
  name                  = "models"
  storage_account_id    = azurerm_storage_account.models.id
  container_access_type = "private"
}

# The gateway's documents (policies.store), which inference servers cannot read.
resource "azurerm_storage_container" "policies" {
  name                  = "policies"
  storage_account_id    = azurerm_storage_account.models.id
  container_access_type = "private"
}
