locals {
  cluster_log_group = "/aws/eks/${var.name}/cluster"
}

# Before the cluster, which would make it itself: unencrypted and kept for ever.
resource "aws_cloudwatch_log_group" "cluster" {
  name              = local.cluster_log_group
  retention_in_days = 30
  kms_key_id        = aws_kms_key.this["cluster"].arn
}

# On the API's interfaces only: the security group EKS makes is on the nodes, too.
resource "aws_security_group" "api" {
  name        = "${var.name}-api"
  description = "Kubernetes API: HTTPS from inside the network"
  vpc_id      = aws_vpc.this.id
  tags        = { Name = "${var.name}-api" }
}

resource "aws_vpc_security_group_ingress_rule" "api" {
  security_group_id = aws_security_group.api.id
  description       = "HTTPS from inside the network: whoever runs terraform or kubectl there"
  cidr_ipv4         = var.network_cidr
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
}

resource "aws_eks_cluster" "this" {
  name     = var.name
  role_arn = aws_iam_role.cluster.arn
  version  = var.cluster.kubernetes_version
  # EKS itself refuses to delete it, whoever asks.
  deletion_protection = var.cluster.deletion_protection
  # The add-ons below bring them, with our settings; these can't be changed once they are there.
  bootstrap_self_managed_addons = false
  enabled_cluster_log_types     = ["api", "audit", "authenticator"]

  # No extended support at six times the price: when a version's standard support ends, EKS takes the control plane to the next.
  upgrade_policy {
    support_type = "STANDARD"
  }

  access_config {
    authentication_mode                         = "API"
    bootstrap_cluster_creator_admin_permissions = false
  }

  encryption_config {
    resources = ["secrets"]
    provider {
      key_arn = aws_kms_key.this["cluster"].arn
    }
  }

  vpc_config {
    subnet_ids              = [for subnet in aws_subnet.private : subnet.id]
    security_group_ids      = [aws_security_group.api.id]
    endpoint_private_access = true
    endpoint_public_access  = length(var.cluster.api_access_cidrs) > 0
    public_access_cidrs     = length(var.cluster.api_access_cidrs) > 0 ? var.cluster.api_access_cidrs : null
  }

  # On destroy the other way round: EKS takes its interfaces away with the role's rights.
  depends_on = [
    aws_cloudwatch_log_group.cluster,
    aws_iam_role_policy.cluster,
    aws_iam_role_policy_attachment.cluster,
    aws_vpc_security_group_ingress_rule.api,
  ]
}

# Who applies first administers the cluster, helm included; another's plan must not take that away.
data "aws_iam_session_context" "caller" {
  arn = data.aws_caller_identity.current.arn
}

resource "aws_eks_access_entry" "deployer" {
  cluster_name  = aws_eks_cluster.this.name
  principal_arn = data.aws_iam_session_context.caller.issuer_arn
  type          = "STANDARD"
  lifecycle {
    ignore_changes = [principal_arn]
  }
}

resource "aws_eks_access_policy_association" "deployer" {
  cluster_name  = aws_eks_cluster.this.name
  principal_arn = aws_eks_access_entry.deployer.principal_arn
  policy_arn    = "arn:${local.partition}:eks::aws:cluster-access-policy/AmazonEKSClusterAdminPolicy"
  access_scope {
    type = "cluster"
  }
}
