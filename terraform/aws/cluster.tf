# A cluster that is there gets our pools, and keeps its own settings, add-ons and administrators.
data "aws_eks_cluster" "existing" {
  count = local.own_cluster ? 0 : 1

  name = var.cluster.existing
  lifecycle {
    postcondition {
      condition     = self.vpc_config[0].vpc_id == var.cluster.network.id
      error_message = "cluster.existing: ${self.name} is in ${self.vpc_config[0].vpc_id}, and not in cluster.network.id."
    }
    postcondition {
      condition     = self.access_config[0].authentication_mode != "CONFIG_MAP"
      error_message = "cluster.existing: the authentication mode of ${self.name} has to be API or API_AND_CONFIG_MAP."
    }
    postcondition {
      condition     = tonumber(split(".", self.version)[1]) >= 30
      error_message = "cluster.existing: ${self.name} has Kubernetes ${self.version}; 1.30 or newer is needed."
    }
  }
}

# By it pods get their roles: without the add-on this fails the plan.
data "aws_eks_addon" "pod_identity" {
  count = local.own_cluster ? 0 : 1

  cluster_name = var.cluster.existing
  addon_name   = "eks-pod-identity-agent"
}

locals {
  own_cluster  = var.cluster.existing == null
  cluster_name = coalesce(var.cluster.existing, var.name)
  eks          = try(aws_eks_cluster.this[0], data.aws_eks_cluster.existing[0])
  # The version of the nodes, never newer than that of the control plane.
  kubernetes_version = try(data.aws_eks_cluster.existing[0].version, var.cluster.kubernetes_version)
  cluster_log_group  = "/aws/eks/${var.name}/cluster"
}

# Before the cluster, which would make it itself: unencrypted and kept for ever.
resource "aws_cloudwatch_log_group" "cluster" {
  count = local.own_cluster ? 1 : 0

  name              = local.cluster_log_group
  retention_in_days = 30
  kms_key_id        = aws_kms_key.this["cluster"].arn
}

# On the API's interfaces only: the security group EKS makes is on the nodes, too.
resource "aws_security_group" "api" {
  count = local.own_cluster ? 1 : 0

  name        = "${var.name}-api"
  description = "Kubernetes API: HTTPS from inside the network"
  vpc_id      = local.vpc_id
  tags        = { Name = "${var.name}-api" }
}

resource "aws_vpc_security_group_ingress_rule" "api" {
  count = local.own_cluster ? 1 : 0

  security_group_id = aws_security_group.api[0].id
  description       = "HTTPS from inside the network: whoever runs terraform or kubectl there"
  cidr_ipv4         = local.vpc_cidr
  ip_protocol       = "tcp"
  from_port         = 443
  to_port           = 443
}

resource "aws_eks_cluster" "this" {
  count = local.own_cluster ? 1 : 0

  name     = var.name
  role_arn = aws_iam_role.cluster[0].arn
  version  = var.cluster.kubernetes_version
  # EKS itself refuses to delete it, whoever asks.
  deletion_protection = var.cluster.deletion_protection
  # The add-ons below bring them, with our settings; these can't be changed once they are there.
  bootstrap_self_managed_addons = false
  enabled_cluster_log_types     = ["api", "audit", "authenticator"]

  # EXTENDED costs six times as much from then on; with STANDARD, EKS takes the control plane to the next version.
  upgrade_policy {
    support_type = var.cluster.extended_support ? "EXTENDED" : "STANDARD"
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
    subnet_ids              = values(local.private_subnets)
    security_group_ids      = [aws_security_group.api[0].id]
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
  count = local.own_cluster ? 1 : 0

  cluster_name  = local.eks.name
  principal_arn = data.aws_iam_session_context.caller.issuer_arn
  type          = "STANDARD"
  lifecycle {
    ignore_changes = [principal_arn]
  }
}

resource "aws_eks_access_policy_association" "deployer" {
  count = local.own_cluster ? 1 : 0

  cluster_name  = local.eks.name
  principal_arn = aws_eks_access_entry.deployer[0].principal_arn
  policy_arn    = "arn:${local.partition}:eks::aws:cluster-access-policy/AmazonEKSClusterAdminPolicy"
  access_scope {
    type = "cluster"
  }
}

resource "aws_eks_access_entry" "administrator" {
  for_each = setsubtract(var.cluster.administrators, aws_eks_access_entry.deployer[*].principal_arn)

  cluster_name  = local.eks.name
  principal_arn = each.key
  type          = "STANDARD"
}

resource "aws_eks_access_policy_association" "administrator" {
  for_each = aws_eks_access_entry.administrator

  cluster_name  = local.eks.name
  principal_arn = each.value.principal_arn
  policy_arn    = "arn:${local.partition}:eks::aws:cluster-access-policy/AmazonEKSClusterAdminPolicy"
  access_scope {
    type = "cluster"
  }
}
