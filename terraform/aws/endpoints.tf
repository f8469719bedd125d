# AWS's own services from inside the network: no model, image or token goes over the internet.

locals {
  # Who calls what without the NAT gateway: nodes that join (ec2, ecr, eks), the CNI and the disks' driver (ec2),
  # the autoscaler (autoscaling, ec2, eks), pods' identities (eks-auth, sts), log shippers (logs).
  endpoints = toset(local.own_network ? ["autoscaling", "ec2", "ecr.api", "ecr.dkr", "eks", "eks-auth", "logs", "sts"] : [])

  # What leaves by these doors is signed by this account. Its resources may be another's: EKS's own images are.
  endpoint_statements = { for service in local.endpoints : service => concat(
    [{
      Sid       = "OwnPrincipals"
      Effect    = "Allow"
      Principal = "*"
      Action    = "${split(".", service)[0]}:*"
      Resource  = "*"
      Condition = { StringEquals = { "aws:PrincipalAccount" = local.account } }
    }],
    # Whoever shows a token of another issuer has no account yet.
    [for each in ["sts"] : {
      Sid       = "OwnRolesByToken"
      Effect    = "Allow"
      Principal = "*"
      Action    = "sts:AssumeRoleWithWebIdentity"
      Resource  = "arn:${local.partition}:iam::${local.account}:role/*"
    } if each == service],
  ) }
  # Nothing is written to a bucket of another account. Reading is not narrowed: registries (ECR too) keep their layers in
  # buckets of their own, signed by themselves or public, and a model group's bucket may be somebody else's.
  s3_statements = [
    {
      Sid       = "OwnBuckets"
      Effect    = "Allow"
      Principal = "*"
      Action    = "s3:*"
      Resource  = "*"
      Condition = { StringEquals = { "aws:PrincipalAccount" = local.account, "aws:ResourceAccount" = local.account } }
    },
    {
      Sid       = "Read"
      Effect    = "Allow"
      Principal = "*"
      Action    = ["s3:GetObject", "s3:ListBucket"]
      Resource  = "*"
    },
  ]
}

resource "aws_vpc_endpoint" "s3" {
  count = local.own_network ? 1 : 0

  vpc_id            = local.vpc_id
  policy            = jsonencode({ Version = "2012-10-17", Statement = local.s3_statements })
  service_name      = "com.amazonaws.${var.region}.s3"
  vpc_endpoint_type = "Gateway"
  route_table_ids   = [aws_route_table.private[0].id]
  tags              = { Name = "${var.name}-s3" }
}

# Not every zone has every service, and AWS refuses an endpoint with a subnet in one that lacks it.
data "aws_vpc_endpoint_service" "interface" {
  for_each = local.endpoints

  service_name = "com.amazonaws.${var.region}.${each.key}"
}

# As they were when the endpoint was first planned, like the zones themselves.
resource "terraform_data" "endpoint_zones" {
  for_each = { for service in local.endpoints : "${service} in ${join(", ", local.zones)}" => service }

  input = [for zone in local.zones : zone if contains(data.aws_vpc_endpoint_service.interface[each.value].availability_zones, zone)]
  lifecycle {
    ignore_changes = [input]
    postcondition {
      condition     = length(self.input) > 0
      error_message = "region: ${each.key} is not offered there."
    }
  }
}

resource "aws_vpc_endpoint" "interface" {
  for_each = local.endpoints

  vpc_id              = local.vpc_id
  service_name        = "com.amazonaws.${var.region}.${each.key}"
  policy              = jsonencode({ Version = "2012-10-17", Statement = local.endpoint_statements[each.key] })
  vpc_endpoint_type   = "Interface"
  private_dns_enabled = true
  subnet_ids          = [for zone in terraform_data.endpoint_zones["${each.key} in ${join(", ", local.zones)}"].input : aws_subnet.private[zone].id]
  security_group_ids  = [aws_security_group.endpoints[0].id]
  tags                = { Name = "${var.name}-${each.key}" }
}

resource "aws_security_group" "endpoints" {
  count = local.own_network ? 1 : 0

  name        = "${var.name}-endpoints"
  description = "Endpoints of AWS services: HTTPS from inside the network"
  vpc_id      = local.vpc_id
  tags        = { Name = "${var.name}-endpoints" }
}

resource "aws_vpc_security_group_ingress_rule" "endpoints" {
  count = local.own_network ? 1 : 0

  security_group_id = aws_security_group.endpoints[0].id
  description       = "HTTPS from inside the network"
  cidr_ipv4         = var.network_cidr
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
}
