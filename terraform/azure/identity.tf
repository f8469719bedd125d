# Who may do what. The cluster: join its network, use its subnet, its nodes' identity (and the gateway's address). Nodes:
# pull images (registry.tf). Pods: by a
# token of their service account, exchanged for one of these identities; gateway and inference read the models, nobody
# writes. logic has an identity without a role: what its services may use is yours to give.

locals {
  # A role is given out in a group, not in a network.
  network_group = local.own_network ? azurerm_resource_group.this.id : join("/", slice(local.network_parts, 0, 5))
}

resource "azurerm_user_assigned_identity" "cluster" {
  count = local.own_cluster ? 1 : 0

  name                = "${var.name}-cluster"
  resource_group_name = azurerm_resource_group.this.name
  location            = azurerm_resource_group.this.location
  tags                = local.tags
}

resource "azurerm_role_assignment" "subnet" {
  count = local.own_cluster ? 1 : 0

  scope                            = local.nodes_subnet
  role_definition_name             = "Network Contributor"
  principal_id                     = local.cluster_principal
  principal_type                   = "ServicePrincipal"
  skip_service_principal_aad_check = true
}

# A private cluster links the zone with its API's name to the network, and Azure asks for a right on the network for that;
# the one on the subnet does not hold there, and Network Contributor would let it change the network.
resource "azurerm_role_definition" "network" {
  count = local.own_cluster ? 1 : 0

  name              = "${var.name}-${local.suffix}-network-join"
  scope             = local.network_group
  description       = "Link private DNS zones to the network of ${var.name}."
  assignable_scopes = [local.network_group]
  permissions {
    actions = ["Microsoft.Network/virtualNetworks/join/action", "Microsoft.Network/virtualNetworks/read"]
  }
}

resource "azurerm_role_assignment" "network" {
  count = local.own_cluster ? 1 : 0

  scope                            = local.network_id
  role_definition_id               = azurerm_role_definition.network[0].role_definition_resource_id
  principal_id                     = local.cluster_principal
  principal_type                   = "ServicePrincipal"
  skip_service_principal_aad_check = true
}

# The nodes' identity is made here and not by AKS: what it may do counts before the first node pulls an image.
resource "azurerm_user_assigned_identity" "nodes" {
  count = local.own_cluster ? 1 : 0

  name                = "${var.name}-nodes"
  resource_group_name = azurerm_resource_group.this.name
  location            = azurerm_resource_group.this.location
  tags                = local.tags
}

resource "azurerm_role_assignment" "nodes" {
  count = local.own_cluster ? 1 : 0

  scope                            = azurerm_user_assigned_identity.nodes[0].id
  role_definition_name             = "Managed Identity Operator"
  principal_id                     = local.cluster_principal
  principal_type                   = "ServicePrincipal"
  skip_service_principal_aad_check = true
}

# Whoever applies installs the platform. Where that changes from one apply to the next, so does this.
resource "azurerm_role_assignment" "operator" {
  count = local.own_cluster ? 1 : 0

  scope                = azurerm_resource_group.this.id
  role_definition_name = "Azure Kubernetes Service RBAC Cluster Admin"
  principal_id         = data.azurerm_client_config.current.object_id
}

resource "azurerm_role_assignment" "administrators" {
  for_each = setsubtract(var.cluster.administrators, local.own_cluster ? [data.azurerm_client_config.current.object_id] : [])

  scope                = local.own_cluster ? azurerm_resource_group.this.id : var.cluster.existing
  role_definition_name = "Azure Kubernetes Service RBAC Cluster Admin"
  principal_id         = each.key
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
  issuer              = local.aks.oidc_issuer_url
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
