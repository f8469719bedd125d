# Who may do what. The cluster: join its network, use its subnet, its nodes' identity (and the gateway's address). Nodes:
# pull images (registry.tf). Pods: by a
# token of their service account, exchanged for one of these identities; gateway and inference read the models, nobody
# writes. logic has an identity without a role: what its services may use is yours to give.

resource "azurerm_user_assigned_identity" "cluster" {
  name                = "${var.name}-cluster"
  resource_group_name = azurerm_resource_group.this.name
  location            = azurerm_resource_group.this.location
  tags                = local.tags
}

resource "azurerm_role_assignment" "subnet" {
  scope                            = azurerm_subnet.nodes.id
  role_definition_name             = "Network Contributor"
  principal_id                     = azurerm_user_assigned_identity.cluster.principal_id
  principal_type                   = "ServicePrincipal"
  skip_service_principal_aad_check = true
}

# A private cluster links the zone with its API's name to the network, and Azure asks for a right on the network for that;
# the one on the subnet does not hold there, and Network Contributor would let it change the network.
resource "azurerm_role_definition" "network" {
  name              = "${var.name}-${local.suffix}-network-join"
  scope             = azurerm_resource_group.this.id
  description       = "Link private DNS zones to the network of ${var.name}."
  assignable_scopes = [azurerm_resource_group.this.id]
  permissions {
    actions = ["Microsoft.Network/virtualNetworks/join/action", "Microsoft.Network/virtualNetworks/read"]
  }
}

resource "azurerm_role_assignment" "network" {
  scope                            = azurerm_virtual_network.this.id
  role_definition_id               = azurerm_role_definition.network.role_definition_resource_id
  principal_id                     = azurerm_user_assigned_identity.cluster.principal_id
  principal_type                   = "ServicePrincipal"
  skip_service_principal_aad_check = true
}

# The nodes' identity is made here and not by AKS: what it may do counts before the first node pulls an image.
resource "azurerm_user_assigned_identity" "nodes" {
  name                = "${var.name}-nodes"
  resource_group_name = azurerm_resource_group.this.name
  location            = azurerm_resource_group.this.location
  tags                = local.tags
}

resource "azurerm_role_assignment" "nodes" {
  scope                            = azurerm_user_assigned_identity.nodes.id
  role_definition_name             = "Managed Identity Operator"
  principal_id                     = azurerm_user_assigned_identity.cluster.principal_id
  principal_type                   = "ServicePrincipal"
  skip_service_principal_aad_check = true
}

# Whoever applies installs the platform. Where that changes from one apply to the next, so does this.
resource "azurerm_role_assignment" "operator" {
  scope                = azurerm_resource_group.this.id
  role_definition_name = "Azure Kubernetes Service RBAC Cluster Admin"
  principal_id         = data.azurerm_client_config.current.object_id
}

resource "azurerm_user_assigned_identity" "units" {
  for_each = toset(["gateway", "logic", "inference"])

  name                = "${var.name}-${each.value}"
  resource_group_name = azurerm_resource_group.this.name
  location            = azurerm_resource_group.this.location
  tags                = local.tags
}

resource "azurerm_federated_identity_credential" "units" {
  for_each = azurerm_user_assigned_identity.units

  name                = "kubernetes"
  resource_group_name = azurerm_resource_group.this.name
  parent_id           = each.value.id
  issuer              = azurerm_kubernetes_cluster.this.oidc_issuer_url
  subject             = "system:serviceaccount:${local.namespace}:${each.key}"
  audience            = ["api://AzureADTokenExchange"]
}

resource "azurerm_role_assignment" "models" {
  for_each = { gateway = azurerm_storage_container.policies.id, inference = azurerm_storage_container.models.id }

  scope                            = each.value
  role_definition_name             = "Storage Blob Data Reader"
  principal_id                     = azurerm_user_assigned_identity.units[each.key].principal_id
  principal_type                   = "ServicePrincipal"
  skip_service_principal_aad_check = true
}
