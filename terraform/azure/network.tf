# One network with two subnets: nodes, and private endpoints. Pods have addresses of their own (overlay) and services too,
# both out of network_cidr but, as AKS wants, outside the virtual network. Nodes have no public address: they go out by NAT.

locals {
  cidr = {
    network   = cidrsubnet(var.network_cidr, 2, 0)
    nodes     = cidrsubnet(var.network_cidr, 4, 0)
    endpoints = try(reverse(values(data.azurerm_subnet.existing))[0].address_prefixes[0], cidrsubnet(var.network_cidr, 8, 16))
    services  = cidrsubnet(var.network_cidr, 4, 4)
    pods      = cidrsubnet(var.network_cidr, 1, 1)
  }
  # The overlay gives every node a /24.
  max_nodes = pow(2, 24 - tonumber(split("/", local.cidr.pods)[1]))

  own_network      = var.cluster.network == null
  network_id       = try(azurerm_virtual_network.this[0].id, var.cluster.network.id)
  nodes_subnet     = try(azurerm_subnet.nodes[0].id, var.cluster.network.subnets[0])
  endpoints_subnet = try(azurerm_subnet.endpoints[0].id, reverse(var.cluster.network.subnets)[0])
  # The parts of resource IDs: /subscriptions/ID/resourceGroups/GROUP/providers/Microsoft.Network/virtualNetworks/NAME.
  network_parts = split("/", try(var.cluster.network.id, ""))
}

# A network that is there stays as it is: its owner has given its nodes a way out, by a NAT gateway or a route table.
data "azurerm_virtual_network" "existing" {
  count = local.own_network ? 0 : 1

  resource_group_name = local.network_parts[4]
  name                = local.network_parts[8]
  lifecycle {
    postcondition {
      condition     = self.location == var.region
      error_message = "cluster.network.id: ${self.name} is in ${self.location}, and not in ${var.region}."
    }
    # network_cidr is a /16; two networks overlap if they are the same in the bits that both have.
    postcondition {
      condition = !local.own_cluster || alltrue([
        for space in self.address_space : length(distinct([
          for cidr in [space, var.network_cidr] : cidrhost("${split("/", cidr)[0]}/${min(16, split("/", space)[1])}", 0)
        ])) == 2
      ])
      error_message = "network_cidr: pods and services get parts of it, so it has to lie outside of ${join(", ", self.address_space)}."
    }
  }
}

data "azurerm_subnet" "existing" {
  for_each = { for i, id in try(var.cluster.network.subnets, []) : i => split("/", id) }

  resource_group_name  = local.network_parts[4]
  virtual_network_name = local.network_parts[8]
  name                 = try(each.value[10], "no resource ID")
  lifecycle {
    postcondition {
      condition     = startswith(lower(join("/", each.value)), lower("${var.cluster.network.id}/"))
      error_message = "cluster.network.subnets: resource IDs of subnets of cluster.network.id: nodes, and private endpoints."
    }
  }
}

resource "azurerm_virtual_network" "this" {
  count = local.own_network ? 1 : 0

  name                = var.name
  resource_group_name = azurerm_resource_group.this.name
  location            = azurerm_resource_group.this.location
  address_space       = [local.cidr.network]
  tags                = local.tags
}

resource "azurerm_subnet" "nodes" {
  count = local.own_network ? 1 : 0

  name                            = "nodes"
  resource_group_name             = azurerm_resource_group.this.name
  virtual_network_name            = azurerm_virtual_network.this[0].name
  address_prefixes                = [local.cidr.nodes]
  default_outbound_access_enabled = false
}

resource "azurerm_subnet" "endpoints" {
  count = local.own_network ? 1 : 0

  name                            = "endpoints"
  resource_group_name             = azurerm_resource_group.this.name
  virtual_network_name            = azurerm_virtual_network.this[0].name
  address_prefixes                = [local.cidr.endpoints]
  default_outbound_access_enabled = false
}

# The address that others see calls from. Nothing can be reached at it.
resource "azurerm_public_ip" "nat" {
  count = local.own_network ? 1 : 0

  name                = "${var.name}-nat"
  resource_group_name = azurerm_resource_group.this.name
  location            = azurerm_resource_group.this.location
  allocation_method   = "Static"
  sku                 = "Standard"
  tags                = local.tags
}

resource "azurerm_nat_gateway" "this" {
  count = local.own_network ? 1 : 0

  name                    = var.name
  resource_group_name     = azurerm_resource_group.this.name
  location                = azurerm_resource_group.this.location
  sku_name                = "Standard"
  idle_timeout_in_minutes = 10
  tags                    = local.tags
}

resource "azurerm_nat_gateway_public_ip_association" "this" {
  count = local.own_network ? 1 : 0

  nat_gateway_id       = azurerm_nat_gateway.this[0].id
  public_ip_address_id = azurerm_public_ip.nat[0].id
}

resource "azurerm_subnet_nat_gateway_association" "nodes" {
  count = local.own_network ? 1 : 0

  subnet_id      = azurerm_subnet.nodes[0].id
  nat_gateway_id = azurerm_nat_gateway.this[0].id
}
