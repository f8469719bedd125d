# The platform in the cluster: modules/platform, which knows no cloud.

locals {
  # A network load balancer on the addresses of dns.tf, one per public subnet in the same order. `nlb` is the controller built
  # into EKS's control plane, which the AWS Load Balancer Controller replaces (README.md: how).
  gateway_annotations = merge({
    "service.beta.kubernetes.io/aws-load-balancer-type" = "nlb"
    # Nodes of the other pools come and go, and connections through one would end with it; kube-proxy passes calls on to
    # gateways wherever they are. Not by the node label for that (exclude-from-external-load-balancers): EKS refuses labels of
    # Kubernetes' own on node groups.
    "service.beta.kubernetes.io/aws-load-balancer-target-node-labels"                = "oriel.dev/pool=system"
    "service.beta.kubernetes.io/aws-load-balancer-cross-zone-load-balancing-enabled" = "true"
    "service.beta.kubernetes.io/aws-load-balancer-additional-resource-tags"          = join(",", [for key, value in local.tags : "${key}=${value}"])
    }, length(local.public_zones) > 0 ? {
    "service.beta.kubernetes.io/aws-load-balancer-eip-allocations" = join(",", [for zone in local.public_zones : aws_eip.gateway[zone].allocation_id])
    "service.beta.kubernetes.io/aws-load-balancer-subnets"         = join(",", [for zone in local.public_zones : local.public_subnets[zone]])
    } : {
    "service.beta.kubernetes.io/aws-load-balancer-internal" = "true"
    "service.beta.kubernetes.io/aws-load-balancer-subnets"  = join(",", values(local.private_subnets))
  })
}

module "platform" {
  count  = var.deploy_platform ? 1 : 0
  source = "../modules/platform"

  infrastructure = merge(local.infrastructure, {
    storage = {
      provisioner = "ebs.csi.aws.com"
      parameters  = { type = "gp3", encrypted = "true", kmsKeyId = aws_kms_key.this["cluster"].arn }
    }
    secrets = !var.redis.managed ? {} : { (local.infrastructure.redis_auth_secret_ref.name) = {
      (local.infrastructure.redis_auth_secret_ref.key) = aws_elasticache_replication_group.limiter[0].auth_token
    } }
  })
  images = merge(try(var.platform.images, {}), {
    registry = coalesce(var.image_registry, local.infrastructure.registry_url)
    tag      = var.image_tag
  })
  gpu_enabled    = var.gpu_enabled
  scale_to_zero  = var.scale_to_zero
  namespace      = local.namespace
  store_networks = try(var.platform.store_networks, null)

  gateway = merge(try(var.platform.gateway, {}), {
    service_annotations = merge(local.gateway_annotations, try(var.platform.gateway.service_annotations, {}))
    tls_secret          = try(var.platform.gateway.tls_secret, var.dns.tls_secret, null)
  })
  logic         = try(var.platform.logic, null)
  model_groups  = try(var.platform.model_groups, null)
  policies      = try(var.platform.policies, null)
  redis         = try(var.platform.redis, null)
  placement     = try(var.platform.placement, null)
  keda          = try(var.platform.keda, null)
  observability = try(var.platform.observability, null)
  # EKS brings no metrics-server, which HorizontalPodAutoscalers need; a cluster that is there has one.
  charts = merge(try(var.platform.charts, {}), {
    metrics_server = merge({ enabled = local.own_cluster }, try(var.platform.charts.metrics_server, {}))
  })

  # On destroy the other way round: the load balancer goes while Kubernetes, its addresses and the way out are there,
  # else its interfaces stay behind and hold the subnets.
  depends_on = [
    aws_eip.gateway,
    aws_eks_access_policy_association.deployer,
    aws_eks_addon.system,
    aws_eks_pod_identity_association.this,
    aws_elasticache_replication_group.limiter,
    aws_route.public,
    aws_route_table_association.public,
    aws_vpc_security_group_ingress_rule.redis,
    helm_release.autoscaler,
  ]
}
