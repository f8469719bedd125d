# What modules/platform is told of this cloud: the fourteen outputs of every root (terraform/README.md).

data "aws_caller_identity" "current" {}

data "aws_partition" "current" {}

locals {
  account   = data.aws_caller_identity.current.account_id
  partition = data.aws_partition.current.partition
  tags      = merge(var.tags, { "oriel-cluster" = var.name })
  namespace = try(var.platform.namespace, "oriel")
  # Written out, so that roles and the cluster don't wait for one another.
  cluster_arn = "arn:${local.partition}:eks:${var.region}:${local.account}:cluster/${local.cluster_name}"
  gpu_taint   = { key = "nvidia.com/gpu", value = "present", effect = "NoSchedule" }

  infrastructure = {
    cloud                  = "aws"
    cluster_name           = local.eks.name
    cluster_endpoint       = local.eks.endpoint
    cluster_ca_certificate = base64decode(local.eks.certificate_authority[0].data)
    cluster_auth = {
      api_version = "client.authentication.k8s.io/v1beta1"
      command     = "aws"
      args        = ["eks", "get-token", "--cluster-name", local.eks.name, "--region", var.region, "--output", "json"]
      env         = {}
    }
    registry_url         = "${local.account}.dkr.ecr.${var.region}.${data.aws_partition.current.dns_suffix}/${var.name}"
    model_repository_url = "s3://${aws_s3_bucket.models.bucket}/models"
    redis_url = try(
      "rediss://${aws_elasticache_replication_group.limiter[0].primary_endpoint_address}:${local.redis_port}", null
    )
    redis_tls             = var.redis.managed
    redis_auth_secret_ref = var.redis.managed ? { name = "oriel-redis-auth", key = "password" } : null
    # Pod identity is an association on the cluster's side (identity.tf): nothing on the pods.
    workload_identity = { service_account_annotations = {}, pod_labels = {} }
    gpu_node_selector = var.gpu_pool.node_selector
    gpu_taint         = local.gpu_taint
    storage_class     = "oriel-gp3"
  }
}

# What nothing can be changed in place: another value would make nearly everything anew, and stop half way where AWS
# protects the old. Kept as it was first applied.
locals {
  fixed = {
    account      = local.account
    cluster      = local.cluster_name
    network      = try(var.cluster.network.id, "own")
    name         = var.name
    network_cidr = var.network_cidr
    region       = var.region
    zones        = join(", ", local.zones)
  }
}

# prevent_destroy takes no variable, and EKS's own protection keeps the cluster only. This is destroyed before anything
# else, since it depends on all that nothing else depends on; if it fails, nothing is destroyed.
resource "terraform_data" "deletion_protection" {
  input = var.cluster.deletion_protection

  provisioner "local-exec" {
    when    = destroy
    command = self.input ? "echo cluster.deletion_protection is true: apply it as false first. && exit 1" : "echo not protected"
  }

  depends_on = [
    aws_autoscaling_group_tag.local_storage,
    aws_default_security_group.none,
    aws_ecr_lifecycle_policy.untagged,
    aws_eks_addon.system,
    aws_eks_pod_identity_association.this,
    aws_kms_alias.this,
    aws_route53_record.gateway,
    aws_s3_bucket_lifecycle_configuration.models,
    aws_s3_bucket_ownership_controls.models,
    aws_s3_bucket_policy.models,
    aws_s3_bucket_server_side_encryption_configuration.models,
    aws_vpc_endpoint.s3,
    aws_vpc_security_group_ingress_rule.redis,
    helm_release.autoscaler,
    module.platform,
    terraform_data.fixed,
  ]
}
