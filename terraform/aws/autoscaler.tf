# Adds and removes nodes of the cpu and gpu pools. Where a pod fits on either, the GPU pool comes last.

locals {
  # A cluster that is there has an autoscaler of its own, or Karpenter.
  autoscaled       = try(var.platform.charts.cluster_autoscaler.enabled, local.own_cluster)
  autoscaler_chart = try(var.platform.charts.cluster_autoscaler.version, "9.59.0")

  autoscaler_statements = [
    {
      # Descriptions can't be limited to a resource in IAM.
      Sid    = "Describe"
      Effect = "Allow"
      Action = [
        "autoscaling:DescribeAutoScalingGroups",
        "autoscaling:DescribeAutoScalingInstances",
        "autoscaling:DescribeLaunchConfigurations",
        "autoscaling:DescribeScalingActivities",
        "autoscaling:DescribeTags",
        "ec2:DescribeImages",
        "ec2:DescribeInstanceTypes",
        "ec2:DescribeLaunchTemplateVersions",
        "ec2:GetInstanceTypesFromInstanceRequirements",
      ]
      Resource = "*"
    },
    {
      Sid      = "DescribePools"
      Effect   = "Allow"
      Action   = "eks:DescribeNodegroup"
      Resource = "arn:${local.partition}:eks:${var.region}:${local.account}:nodegroup/${local.cluster_name}/*/*"
    },
    {
      # EKS puts this tag on the groups of its node groups.
      Sid       = "Scale"
      Effect    = "Allow"
      Action    = ["autoscaling:SetDesiredCapacity", "autoscaling:TerminateInstanceInAutoScalingGroup"]
      Resource  = "arn:${local.partition}:autoscaling:${var.region}:${local.account}:autoScalingGroup:*:autoScalingGroupName/eks-${var.name}-*"
      Condition = { StringEquals = { "aws:ResourceTag/k8s.io/cluster-autoscaler/${local.cluster_name}" = "owned" } }
    },
  ]
}

resource "helm_release" "autoscaler" {
  count = var.deploy_platform && local.autoscaled ? 1 : 0

  name       = "cluster-autoscaler"
  namespace  = "kube-system"
  repository = "https://kubernetes.github.io/autoscaler"
  chart      = "cluster-autoscaler"
  version    = local.autoscaler_chart
  values = [jsonencode({
    fullnameOverride = "cluster-autoscaler"
    cloudProvider    = "aws"
    awsRegion        = var.region
    autoDiscovery    = { clusterName = local.eks.name }
    rbac             = { serviceAccount = { name = local.pod_roles.autoscaler.service_account } }
    nodeSelector     = { "oriel.dev/pool" = "system" }
    extraArgs = {
      expander = "priority"
      # A warm pool that lost its node gets it back.
      enforce-node-group-min-size = true
      # Model caches are on emptyDir and CoreDNS may move: neither keeps an idle node.
      skip-nodes-with-local-storage = false
      skip-nodes-with-system-pods   = false
    }
    # As text: the keys have to arrive as numbers.
    expanderPriorities = <<-YAML
      20:
        - ^eks-${var.name}-cpu-.*
      10:
        - ^eks-${var.name}-gpu-.*
    YAML
    securityContext    = { runAsNonRoot = true, runAsUser = 65534, runAsGroup = 65534, seccompProfile = { type = "RuntimeDefault" } }
    containerSecurityContext = {
      allowPrivilegeEscalation = false
      readOnlyRootFilesystem   = true
      capabilities             = { drop = ["ALL"] }
    }
    resources = { requests = { cpu = "100m", memory = "300Mi" }, limits = { memory = "600Mi" } }
  })]
  atomic          = true
  cleanup_on_fail = true
  wait            = true
  max_history     = 10
  timeout         = 600

  depends_on = [
    aws_autoscaling_group_tag.local_storage,
    aws_eks_access_policy_association.deployer,
    aws_eks_addon.system,
    aws_eks_pod_identity_association.this,
  ]
}
