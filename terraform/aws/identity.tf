# Roles, each with the actions its holder needs on its own resources. Pods take theirs through EKS Pod Identity: only the
# named service account, in the named namespace, of this cluster.

locals {
  pod_roles = {
    for role, account in {
      gateway    = { namespace = local.namespace, service_account = "gateway" }
      inference  = { namespace = local.namespace, service_account = "inference" }
      autoscaler = { namespace = "kube-system", service_account = "cluster-autoscaler" }
      ebs-csi    = { namespace = "kube-system", service_account = "ebs-csi-controller-sa" }
      vpc-cni    = { namespace = "kube-system", service_account = "aws-node" }
    } : role => merge(account, { role = role })
    if(local.own_cluster || !contains(["ebs-csi", "vpc-cni"], role)) && (local.autoscaled || role != "autoscaler")
  }
  # Logic servers get none: they call nothing of the cloud.
  associated_roles = setintersection(keys(local.pod_roles), ["gateway", "inference", "autoscaler"])

  # Read only, each its own folder of the bucket; nobody in the cluster writes it.
  bucket_readers = { gateway = "policies", inference = "models" }
  read_statements = { for role, folder in local.bucket_readers : role => [
    {
      Sid       = "List"
      Effect    = "Allow"
      Action    = "s3:ListBucket"
      Resource  = local.models_bucket_arn
      Condition = { StringLike = { "s3:prefix" = [folder, "${folder}/*"] } }
    },
    {
      Sid      = "Read"
      Effect   = "Allow"
      Action   = "s3:GetObject"
      Resource = "${local.models_bucket_arn}/${folder}/*"
    },
    {
      Sid       = "Decrypt"
      Effect    = "Allow"
      Action    = "kms:Decrypt"
      Resource  = aws_kms_key.this["models"].arn
      Condition = { StringEquals = { "kms:ViaService" = "s3.${var.region}.${data.aws_partition.current.dns_suffix}" } }
    },
  ] }

  # Volumes of the StorageClass are encrypted with our key; AWS's policy for the driver knows only AWS's own.
  volume_statements = [
    {
      Sid      = "Encrypt"
      Effect   = "Allow"
      Action   = ["kms:Decrypt", "kms:DescribeKey", "kms:Encrypt", "kms:GenerateDataKeyWithoutPlaintext", "kms:ReEncryptFrom", "kms:ReEncryptTo"]
      Resource = aws_kms_key.this["cluster"].arn
    },
    {
      Sid       = "Attach"
      Effect    = "Allow"
      Action    = "kms:CreateGrant"
      Resource  = aws_kms_key.this["cluster"].arn
      Condition = { Bool = { "kms:GrantIsForAWSResource" = "true" } }
    },
  ]

  pod_statements = { for role, statements in merge(local.read_statements, { autoscaler = local.autoscaler_statements, ebs-csi = local.volume_statements }) : role => statements if contains(keys(local.pod_roles), role) }
  managed_policies = {
    vpc-cni = "AmazonEKS_CNI_Policy"
    ebs-csi = "service-role/AmazonEBSCSIDriverPolicy"
  }
}

resource "aws_iam_role" "pod" {
  for_each = local.pod_roles

  # IAM is global: two regions may each hold an Oriel of one name.
  name = "${var.name}-${var.region}-${each.key}"
  assume_role_policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Effect    = "Allow"
      Principal = { Service = "pods.eks.amazonaws.com" }
      Action    = ["sts:AssumeRole", "sts:TagSession"]
      Condition = {
        StringEquals = {
          "aws:SourceAccount"                         = local.account
          "aws:RequestTag/eks-cluster-arn"            = local.cluster_arn
          "aws:RequestTag/kubernetes-namespace"       = each.value.namespace
          "aws:RequestTag/kubernetes-service-account" = each.value.service_account
        }
      }
    }]
  })
}

resource "aws_iam_role_policy" "pod" {
  for_each = local.pod_statements

  name   = each.key
  role   = aws_iam_role.pod[each.key].name
  policy = jsonencode({ Version = "2012-10-17", Statement = each.value })
}

resource "aws_iam_role_policy_attachment" "pod" {
  for_each = { for role, policy in local.managed_policies : role => policy if local.own_cluster }

  role       = aws_iam_role.pod[each.key].name
  policy_arn = "arn:${local.partition}:iam::aws:policy/${each.value}"
}

resource "aws_eks_pod_identity_association" "this" {
  for_each = local.associated_roles

  cluster_name    = local.eks.name
  namespace       = local.pod_roles[each.key].namespace
  service_account = local.pod_roles[each.key].service_account
  role_arn        = aws_iam_role.pod[each.key].arn
  depends_on      = [aws_iam_role_policy.pod]
}

resource "aws_iam_role" "cluster" {
  count = local.own_cluster ? 1 : 0

  name = "${var.name}-${var.region}-cluster"
  assume_role_policy = jsonencode({
    Version   = "2012-10-17"
    Statement = [{ Effect = "Allow", Principal = { Service = "eks.amazonaws.com" }, Action = "sts:AssumeRole" }]
  })
}

resource "aws_iam_role_policy_attachment" "cluster" {
  count = local.own_cluster ? 1 : 0

  role       = aws_iam_role.cluster[0].name
  policy_arn = "arn:${local.partition}:iam::aws:policy/AmazonEKSClusterPolicy"
}

resource "aws_iam_role_policy" "cluster" {
  count = local.own_cluster ? 1 : 0

  name = "own"
  role = aws_iam_role.cluster[0].name
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [
      {
        Sid      = "Secrets"
        Effect   = "Allow"
        Action   = ["kms:Decrypt", "kms:DescribeKey", "kms:Encrypt", "kms:ListGrants"]
        Resource = aws_kms_key.this["cluster"].arn
      },
      {
        # For a load balancer on addresses of our own; descriptions can't be limited to a resource.
        Sid      = "LoadBalancerAddresses"
        Effect   = "Allow"
        Action   = ["ec2:DescribeAccountAttributes", "ec2:DescribeAddresses", "ec2:DescribeInternetGateways"]
        Resource = "*"
      },
    ]
  })
}

resource "aws_iam_role" "node" {
  name = "${var.name}-${var.region}-node"
  assume_role_policy = jsonencode({
    Version   = "2012-10-17"
    Statement = [{ Effect = "Allow", Principal = { Service = "ec2.${data.aws_partition.current.dns_suffix}" }, Action = "sts:AssumeRole" }]
  })
}

# Join the cluster and pull images: no more, since what the node may, whoever breaks out of a pod may.
resource "aws_iam_role_policy_attachment" "node" {
  for_each = toset(["AmazonEKSWorkerNodePolicy", "AmazonEC2ContainerRegistryPullOnly"])

  role       = aws_iam_role.node.name
  policy_arn = "arn:${local.partition}:iam::aws:policy/${each.key}"
}
