# Add-ons of EKS, at AWS's default version for the cluster's: an upgrade of the cluster takes them along.

locals {
  on_system_pool = { nodeSelector = { "oriel.dev/pool" = "system" } }
  # A node is ready only with these; they run on each of them.
  node_addons = { for addon, values in { kube-proxy = {}, vpc-cni = { enableNetworkPolicy = "true" } } : addon => values if local.own_cluster }
  # These have pods that need a node.
  system_addons = { for addon, values in { coredns = local.on_system_pool, aws-ebs-csi-driver = { controller = local.on_system_pool } } : addon => values if local.own_cluster }
  # The service accounts whose rights come with the add-on.
  addon_identities = {
    vpc-cni            = "vpc-cni"
    aws-ebs-csi-driver = "ebs-csi"
  }
}

data "aws_eks_addon_version" "this" {
  for_each = toset(local.own_cluster ? concat(["eks-pod-identity-agent"], keys(local.node_addons), keys(local.system_addons)) : [])

  addon_name         = each.key
  kubernetes_version = var.cluster.kubernetes_version
}

# First: the others get their rights through it.
resource "aws_eks_addon" "pod_identity" {
  count = local.own_cluster ? 1 : 0

  cluster_name                = local.eks.name
  addon_name                  = "eks-pod-identity-agent"
  addon_version               = data.aws_eks_addon_version.this["eks-pod-identity-agent"].version
  resolve_conflicts_on_create = "OVERWRITE"
  resolve_conflicts_on_update = "OVERWRITE"
}

resource "aws_eks_addon" "node" {
  for_each = local.node_addons

  cluster_name                = local.eks.name
  addon_name                  = each.key
  addon_version               = data.aws_eks_addon_version.this[each.key].version
  configuration_values        = length(each.value) > 0 ? jsonencode(each.value) : null
  resolve_conflicts_on_create = "OVERWRITE"
  resolve_conflicts_on_update = "OVERWRITE"

  dynamic "pod_identity_association" {
    for_each = [for addon, role in local.addon_identities : local.pod_roles[role] if addon == each.key]
    content {
      role_arn        = aws_iam_role.pod[pod_identity_association.value.role].arn
      service_account = pod_identity_association.value.service_account
    }
  }

  depends_on = [aws_eks_addon.pod_identity, aws_iam_role_policy_attachment.pod]
}

resource "aws_eks_addon" "system" {
  for_each = local.system_addons

  cluster_name                = local.eks.name
  addon_name                  = each.key
  addon_version               = data.aws_eks_addon_version.this[each.key].version
  configuration_values        = jsonencode(each.value)
  resolve_conflicts_on_create = "OVERWRITE"
  resolve_conflicts_on_update = "OVERWRITE"

  dynamic "pod_identity_association" {
    for_each = [for addon, role in local.addon_identities : local.pod_roles[role] if addon == each.key]
    content {
      role_arn        = aws_iam_role.pod[pod_identity_association.value.role].arn
      service_account = pod_identity_association.value.service_account
    }
  }

  depends_on = [aws_eks_node_group.this, aws_iam_role_policy_attachment.pod, aws_iam_role_policy.pod]
}
