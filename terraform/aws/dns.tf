# The only public addresses besides the NAT gateway's: one per zone for the gateway's load balancer, which Kubernetes
# makes from the Service. Kept apart from it, so that a new Service keeps the addresses and names can be set before.

resource "aws_eip" "gateway" {
  for_each = toset(local.public_zones)

  domain     = "vpc"
  tags       = { Name = "${var.name}-gateway-${each.key}" }
  depends_on = [aws_internet_gateway.this]
}

data "aws_route53_zone" "gateway" {
  count = var.dns == null ? 0 : 1

  name         = var.dns.zone
  private_zone = false
}

resource "aws_route53_record" "gateway" {
  count = var.dns == null ? 0 : 1

  zone_id = data.aws_route53_zone.gateway[0].zone_id
  name    = var.dns.host
  type    = "A"
  ttl     = 60
  records = [for address in aws_eip.gateway : address.public_ip]
  lifecycle {
    precondition {
      condition     = length(local.public_zones) > 0
      error_message = "dns: the gateway has a public address only where cluster.network.public_subnets are given."
    }
  }
}
