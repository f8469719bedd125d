# One network with two subnets: nodes, and private endpoints. Pods have addresses of their own (overlay) and services too,
# both out of network_cidr but, as AKS wants, outside the virtual network. Nodes have no public address: they go out by NAT.

locals {
  cidr = {
    network   = cidrsubnet(var.network_cidr, 2, 0)
    nodes     = cidrsubnet(var.network_cidr, 4, 0)
    endpoints = cidrsubnet(var.network_cidr, 8, 16)
    services  = cidrsubnet(var.network_cidr, 4, 4)
    pods      = cidrsubnet(var.network_cidr, 1, 1)
  }
  # The overlay gives every node a /24.
  max_nodes = pow(2, 24 - tonumber(split("/", local.cidr.pods)[1]))
}

resource "azurerm_virtual_network" "this" {
  name                = var.name
  resource_group_name = azurerm_resource_group.this.name
  location            = azurerm_resource_group.this.location
  address_space       = [local.cidr.network]
  tags                = local.tags
}

resource "azurerm_subnet" "nodes" {
  name                            = "nodes"
  resource_group_name             = azurerm_resource_group.this.name
  virtual_network_name            = azurerm_virtual_network.this.name
  address_prefixes                = [local.cidr.nodes]
  default_outbound_access_enabled = false
}

resource "azurerm_subnet" "endpoints" {
  name                            = "endpoints"
  resource_group_name             = azurerm_resource_group.this.name
  virtual_network_name            = azurerm_virtual_network.this.name
  address_prefixes                = [local.cidr.endpoints]
  default_outbound_access_enabled = false
}

# The address that others see calls from. Nothing can be reached at it.
resource "azurerm_public_ip" "nat" {
  name                = "${var.name}-nat"
  resource_group_name = azurerm_resource_group.this.name
  location            = azurerm_resource_group.this.location
  allocation_method   = "Static"
  sku                 = "Standard"
  tags                = local.tags
}

resource "azurerm_nat_gateway" "this" {
  name                    = var.name
  resource_group_name     = azurerm_resource_group.this.name
  location                = azurerm_resource_group.this.location
  sku_name                = "Standard"
  idle_timeout_in_minutes = 10
  tags                    = local.tags
}

resource "azurerm_nat_gateway_public_ip_association" "this" {
  nat_gateway_id       = azurerm_nat_gateway.this.id
  public_ip_address_id = azurerm_public_ip.nat.id
}

resource "azurerm_subnet_nat_gateway_association" "nodes" {
  subnet_id      = azurerm_subnet.nodes.id
  nat_gateway_id = azurerm_nat_gateway.this.id
}
