# Two keys, so that who reads models can't read the cluster's secrets.

locals {
  keys = {
    cluster = "Secrets of Kubernetes, disks of nodes and volumes, images, Redis and logs of ${var.name}"
    models  = "Model repository of ${var.name}"
  }
  # The account's own policies decide who administers and uses a key.
  account_uses_key = {
    Sid       = "AccountPolicies"
    Effect    = "Allow"
    Principal = { AWS = "arn:${local.partition}:iam::${local.account}:root" }
    Action    = "kms:*"
    Resource  = "*"
  }
  # Auto Scaling starts the nodes, so it needs the key of their disks. Named by a condition: as a principal it would have
  # to exist, and a new account has it only after its first group.
  autoscaling_role = "arn:${local.partition}:iam::${local.account}:role/aws-service-role/autoscaling.amazonaws.com/AWSServiceRoleForAutoScaling"
  nodes_use_key = [
    {
      Sid       = "NodeDisks"
      Effect    = "Allow"
      Principal = { AWS = "*" }
      Action    = ["kms:Decrypt", "kms:DescribeKey", "kms:Encrypt", "kms:GenerateDataKey", "kms:GenerateDataKeyWithoutPlaintext", "kms:ReEncryptFrom", "kms:ReEncryptTo"]
      Resource  = "*"
      Condition = { StringEquals = { "aws:PrincipalArn" = local.autoscaling_role } }
    },
    {
      Sid       = "NodeDisksAttached"
      Effect    = "Allow"
      Principal = { AWS = "*" }
      Action    = "kms:CreateGrant"
      Resource  = "*"
      Condition = {
        StringEquals = { "aws:PrincipalArn" = local.autoscaling_role }
        Bool         = { "kms:GrantIsForAWSResource" = "true" }
      }
    },
  ]
  logs_use_key = {
    Sid       = "ClusterLogs"
    Effect    = "Allow"
    Principal = { Service = "logs.${var.region}.${data.aws_partition.current.dns_suffix}" }
    Action    = ["kms:Decrypt", "kms:DescribeKey", "kms:Encrypt", "kms:GenerateDataKey", "kms:ReEncryptFrom", "kms:ReEncryptTo"]
    Resource  = "*"
    Condition = {
      ArnEquals = { "kms:EncryptionContext:aws:logs:arn" = "arn:${local.partition}:logs:${var.region}:${local.account}:log-group:${local.cluster_log_group}" }
    }
  }
  key_statements = {
    cluster = concat([local.account_uses_key], local.nodes_use_key, [local.logs_use_key])
    models  = [local.account_uses_key]
  }
}

resource "aws_kms_key" "this" {
  for_each = local.keys

  description             = each.value
  enable_key_rotation     = true
  deletion_window_in_days = var.cluster.deletion_protection ? 30 : 7
  policy                  = jsonencode({ Version = "2012-10-17", Statement = local.key_statements[each.key] })
}

resource "aws_kms_alias" "this" {
  for_each = aws_kms_key.this

  name          = "alias/${var.name}-${each.key}"
  target_key_id = each.value.key_id
}
