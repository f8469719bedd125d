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
  for_each = toset([var.region])

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
  zones = terraform_data.zones[var.region].input
  # Of a /16: a /18 per zone for nodes and pods (each pod has an address of the network), the last /18 for the rest.
  private_cidrs = { for i, zone in local.zones : zone => cidrsubnet(var.network_cidr, 2, i) }
  public_cidrs  = { for i, zone in local.zones : zone => cidrsubnet(var.network_cidr, 8, 192 + i) }
}

resource "aws_vpc" "this" {
  cidr_block           = var.network_cidr
  enable_dns_support   = true
  enable_dns_hostnames = true
  tags                 = { Name = var.name }
}

# Its rules let everything in it talk: taken away, so that nothing is in it by oversight.
resource "aws_default_security_group" "none" {
  vpc_id = aws_vpc.this.id
}

resource "aws_internet_gateway" "this" {
  vpc_id = aws_vpc.this.id
  tags   = { Name = var.name }
}

# The tags are how Kubernetes finds subnets for load balancers.
resource "aws_subnet" "public" {
  for_each = local.public_cidrs

  vpc_id                  = aws_vpc.this.id
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

  vpc_id                  = aws_vpc.this.id
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
  domain     = "vpc"
  tags       = { Name = "${var.name}-nat" }
  depends_on = [aws_internet_gateway.this]
}

resource "aws_nat_gateway" "this" {
  allocation_id = aws_eip.nat.allocation_id
  subnet_id     = aws_subnet.public[local.zones[0]].id
  tags          = { Name = var.name }
  depends_on    = [aws_route.public, aws_route_table_association.public]
}

resource "aws_route_table" "public" {
  vpc_id = aws_vpc.this.id
  tags   = { Name = "${var.name}-public" }
}

resource "aws_route" "public" {
  route_table_id         = aws_route_table.public.id
  destination_cidr_block = "0.0.0.0/0"
  gateway_id             = aws_internet_gateway.this.id
}

resource "aws_route_table_association" "public" {
  for_each = aws_subnet.public

  subnet_id      = each.value.id
  route_table_id = aws_route_table.public.id
}

resource "aws_route_table" "private" {
  vpc_id = aws_vpc.this.id
  tags   = { Name = "${var.name}-private" }
}

resource "aws_route" "private" {
  route_table_id         = aws_route_table.private.id
  destination_cidr_block = "0.0.0.0/0"
  nat_gateway_id         = aws_nat_gateway.this.id
}

resource "aws_route_table_association" "private" {
  for_each = aws_subnet.private

  subnet_id      = each.value.id
  route_table_id = aws_route_table.private.id
}
