# Nodes, pods, Redis and the endpoints of AWS's services are in private subnets; the public ones hold only the NAT
# gateway and the gateway's load balancer.

data "aws_availability_zones" "available" {
  state = "available"
  # EKS can't put its interfaces into these.
  exclude_zone_ids = ["use1-az3", "usw1-az2", "cac1-az3"]
  filter {
    name   = "opt-in-status"
    values = ["opt-in-not-required"]
  }
}

# As they were at the first apply in this region: AWS leaves out a zone in trouble, and a list that is read again would move
# the networks, and with them everything.
resource "terraform_data" "zones" {
  for_each = toset([for region in [var.region] : region if var.cluster.network == null])

  input = slice(data.aws_availability_zones.available.names, 0, min(3, length(data.aws_availability_zones.available.names)))
  lifecycle {
    ignore_changes = [input]
    postcondition {
      condition     = length(self.input) == 3
      error_message = "region: three availability zones are needed; this account sees fewer in ${var.region}."
    }
  }
}

locals {
  own_network = var.cluster.network == null
  own_zones   = local.own_network ? terraform_data.zones[var.region].input : []
  # Of a /16: a /18 per zone for nodes and pods (each pod has an address of the network), the last /18 for the rest.
  private_cidrs = { for i, zone in local.own_zones : zone => cidrsubnet(var.network_cidr, 2, i) }
  public_cidrs  = { for i, zone in local.own_zones : zone => cidrsubnet(var.network_cidr, 8, 192 + i) }

  existing = { for kind in ["subnets", "public_subnets"] : kind => {
    for id in try(var.cluster.network[kind], []) : data.aws_subnet.existing[id].availability_zone => id...
  } }
  # Zone -> subnet. Nobody outside reaches the gateway where there are no public ones.
  private_subnets = merge({ for zone, subnet in aws_subnet.private : zone => subnet.id }, { for zone, ids in local.existing.subnets : zone => ids[0] })
  public_subnets  = merge({ for zone, subnet in aws_subnet.public : zone => subnet.id }, { for zone, ids in local.existing.public_subnets : zone => ids[0] })
  zones           = local.own_network ? local.own_zones : keys(local.existing.subnets)
  public_zones    = local.own_network ? local.own_zones : keys(local.existing.public_subnets)
  vpc_id          = try(aws_vpc.this[0].id, var.cluster.network.id)
  vpc_cidr        = try(data.aws_vpc.existing[0].cidr_block, var.network_cidr)
}

# A network that is there stays as it is: its owner has routed its subnets to the internet, or to endpoints of AWS's services.
data "aws_vpc" "existing" {
  count = local.own_network ? 0 : 1

  id = var.cluster.network.id
  lifecycle {
    postcondition {
      condition     = self.enable_dns_support && self.enable_dns_hostnames
      error_message = "cluster.network.id: EKS needs DNS support and DNS host names in ${self.id}."
    }
    postcondition {
      condition     = length(local.existing.subnets) >= 2 && length(local.existing.subnets) == length(var.cluster.network.subnets) && length(local.existing.public_subnets) == length(var.cluster.network.public_subnets)
      error_message = "cluster.network: at least two subnets, and of subnets and of public_subnets one per zone."
    }
  }
}

data "aws_subnet" "existing" {
  for_each = toset(local.own_network ? [] : concat(var.cluster.network.subnets, var.cluster.network.public_subnets))

  id = each.key
  lifecycle {
    postcondition {
      condition     = self.vpc_id == var.cluster.network.id
      error_message = "cluster.network: ${each.key} is in ${self.vpc_id}, and not in ${var.cluster.network.id}."
    }
  }
}

resource "aws_vpc" "this" {
  count = local.own_network ? 1 : 0

  cidr_block           = var.network_cidr
  enable_dns_support   = true
  enable_dns_hostnames = true
  tags                 = { Name = var.name }
}

# Its rules let everything in it talk: taken away, so that nothing is in it by oversight.
resource "aws_default_security_group" "none" {
  count = local.own_network ? 1 : 0

  vpc_id = local.vpc_id
}

resource "aws_internet_gateway" "this" {
  count = local.own_network ? 1 : 0

  vpc_id = local.vpc_id
  tags   = { Name = var.name }
}

# The tags are how Kubernetes finds subnets for load balancers.
resource "aws_subnet" "public" {
  for_each = local.public_cidrs

  vpc_id                  = local.vpc_id
  availability_zone       = each.key
  cidr_block              = each.value
  map_public_ip_on_launch = false
  tags = {
    Name                                = "${var.name}-public-${each.key}"
    "kubernetes.io/role/elb"            = "1"
    "kubernetes.io/cluster/${var.name}" = "shared"
  }
}

resource "aws_subnet" "private" {
  for_each = local.private_cidrs

  vpc_id                  = local.vpc_id
  availability_zone       = each.key
  cidr_block              = each.value
  map_public_ip_on_launch = false
  tags = {
    Name                                = "${var.name}-private-${each.key}"
    "kubernetes.io/role/internal-elb"   = "1"
    "kubernetes.io/cluster/${var.name}" = "shared"
  }
}

# One, not one per zone: an account has five public addresses by default and the gateway's take three. Without its zone
# new nodes still join and pull from ECR through the endpoints; other registries and JWT issuers are out of reach.
resource "aws_eip" "nat" {
  count = local.own_network ? 1 : 0

  domain     = "vpc"
  tags       = { Name = "${var.name}-nat" }
  depends_on = [aws_internet_gateway.this]
}

resource "aws_nat_gateway" "this" {
  count = local.own_network ? 1 : 0

  allocation_id = aws_eip.nat[0].allocation_id
  subnet_id     = aws_subnet.public[local.zones[0]].id
  tags          = { Name = var.name }
  depends_on    = [aws_route.public, aws_route_table_association.public]
}

resource "aws_route_table" "public" {
  count = local.own_network ? 1 : 0

  vpc_id = local.vpc_id
  tags   = { Name = "${var.name}-public" }
}

resource "aws_route" "public" {
  count = local.own_network ? 1 : 0

  route_table_id         = aws_route_table.public[0].id
  destination_cidr_block = "0.0.0.0/0"
  gateway_id             = aws_internet_gateway.this[0].id
}

resource "aws_route_table_association" "public" {
  for_each = aws_subnet.public

  subnet_id      = each.value.id
  route_table_id = aws_route_table.public[0].id
}

resource "aws_route_table" "private" {
  count = local.own_network ? 1 : 0

  vpc_id = local.vpc_id
  tags   = { Name = "${var.name}-private" }
}

resource "aws_route" "private" {
  count = local.own_network ? 1 : 0

  route_table_id         = aws_route_table.private[0].id
  destination_cidr_block = "0.0.0.0/0"
  nat_gateway_id         = aws_nat_gateway.this[0].id
}

resource "aws_route_table_association" "private" {
  for_each = aws_subnet.private

  subnet_id      = each.value.id
  route_table_id = aws_route_table.private[0].id
}
