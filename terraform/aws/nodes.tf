# system runs what must always run; cpu and gpu grow from zero (autoscaler.tf) unless one is kept warm; cpu-spot and
# gpu-spot, if there are any, hold only what tolerates to lose its node: floors stay on demand.

locals {
  pool_floor = var.scale_to_zero ? 0 : 1
  scaled_pools = merge(
    {
      cpu = {
        instance_type = local.cpu_type
        ami_type      = contains(data.aws_ec2_instance_type.cpu.supported_architectures, "arm64") ? "AL2023_ARM_64_STANDARD" : "AL2023_x86_64_STANDARD"
        given         = var.cpu_pool
        throughput    = null
        labels        = {}
        taints        = []
        zones         = local.zones
      }
    },
    {
      for pool in ["gpu"] : pool => {
        instance_type = local.gpu_type
        # Brings NVIDIA's driver and container toolkit.
        ami_type = "AL2023_x86_64_NVIDIA"
        given    = var.gpu_pool
        # MiB/s, four times gp3's own: a node that starts from zero writes images of several GB before its first call. The 3,000
        # IOPS that gp3 has allow up to 750.
        throughput = 500
        # Tells the autoscaler that a node without a GPU yet is still starting, and to weigh the node by its GPU.
        labels = { "k8s.amazonaws.com/accelerator" = "nvidia" }
        taints = [merge(local.gpu_taint, { effect = local.eks_taint_effects[local.gpu_taint.effect] })]
        zones  = local.gpu_zones
      } if var.gpu_enabled
    },
  )
  pools = merge(
    { system = { instance_type = "m6i.large", ami_type = "AL2023_x86_64_STANDARD", min = 2, max = 2, disk_gb = 50, throughput = null, labels = { "oriel.dev/pool" = "system" }, taints = [], zones = local.zones, capacity = "ON_DEMAND" } },
    {
      for name, pool in local.scaled_pools : name => merge(pool, {
        min      = local.pool_floor
        max      = pool.given.max_size
        disk_gb  = pool.given.disk_gb
        labels   = merge(pool.labels, { "oriel.dev/pool" = name })
        capacity = "ON_DEMAND"
      }) if pool.given.max_size > 0
    },
    {
      for name, pool in local.scaled_pools : "${name}-spot" => merge(pool, {
        min      = 0
        max      = pool.given.spot_max_size
        disk_gb  = pool.given.disk_gb
        labels   = merge(pool.labels, { "oriel.dev/pool" = name, "oriel.dev/spot" = "true" })
        taints   = concat(pool.taints, [{ key = "oriel.dev/spot", value = "true", effect = "NO_SCHEDULE" }])
        capacity = "SPOT"
      }) if pool.given.spot_max_size > 0
    },
  )
  cpu_type = coalesce(var.cpu_pool.instance_type, "m6i.xlarge")
  gpu_type = coalesce(var.gpu_pool.instance_type, "g6.2xlarge")
  # A group with a zone that lacks its type is CREATE_FAILED, or tries there in vain.
  gpu_zones = flatten([for each in values(terraform_data.gpu_zones) : each.input])
  # EKS's own spelling.
  eks_taint_effects = { NoSchedule = "NO_SCHEDULE", PreferNoSchedule = "PREFER_NO_SCHEDULE", NoExecute = "NO_EXECUTE" }
}

data "aws_ec2_instance_type" "cpu" {
  instance_type = local.cpu_type
}

data "aws_ec2_instance_type" "gpu" {
  count = var.gpu_enabled ? 1 : 0

  instance_type = local.gpu_type
  lifecycle {
    postcondition {
      condition     = sum(concat([0], self.gpus[*].count)) == var.gpu_pool.gpus
      error_message = "gpu_pool.gpus: ${self.instance_type} has ${sum(concat([0], self.gpus[*].count))} GPUs."
    }
  }
}

data "aws_ec2_instance_type_offerings" "gpu" {
  count = var.gpu_enabled ? 1 : 0

  location_type = "availability-zone"
  filter {
    name   = "instance-type"
    values = [local.gpu_type]
  }
  filter {
    name   = "location"
    values = local.zones
  }
}

# As they were when the pool was first planned: the pool's name is made of them.
resource "terraform_data" "gpu_zones" {
  for_each = toset([for type in [local.gpu_type] : "${type} in ${join(", ", local.zones)}" if var.gpu_enabled])

  input = [for zone in local.zones : zone if contains(data.aws_ec2_instance_type_offerings.gpu[0].locations, zone)]
  lifecycle {
    ignore_changes = [input]
    postcondition {
      condition     = length(self.input) > 0
      error_message = "gpu_pool.instance_type: no zone of ${join(", ", local.zones)} has ${local.gpu_type}: choose another type or region."
    }
  }
}

resource "aws_launch_template" "node" {
  for_each = local.pools

  name                   = "${var.name}-${each.key}"
  update_default_version = true

  block_device_mappings {
    device_name = "/dev/xvda"
    ebs {
      volume_type           = "gp3"
      volume_size           = each.value.disk_gb
      throughput            = each.value.throughput
      encrypted             = "true"
      kms_key_id            = aws_kms_key.this["cluster"].arn
      delete_on_termination = "true"
    }
  }

  # One hop ends at the node: pods can't take its role; they have their own (identity.tf).
  metadata_options {
    http_endpoint               = "enabled"
    http_tokens                 = "required"
    http_put_response_hop_limit = 1
    instance_metadata_tags      = "disabled"
  }

  # default_tags end at the template.
  dynamic "tag_specifications" {
    for_each = toset(["instance", "volume", "network-interface"])
    content {
      resource_type = tag_specifications.key
      tags          = merge(local.tags, { Name = "${var.name}-${each.key}" })
    }
  }
}

resource "aws_eks_node_group" "this" {
  for_each = local.pools

  cluster_name = local.eks.name
  # A pool of another kind is another pool, there before the old one is drained. The floor counts, because EKS refuses
  # one above the present size, which only the autoscaler knows.
  node_group_name = "${var.name}-${each.key}-${substr(sha256(jsonencode([each.value.instance_type, each.value.ami_type, each.value.min, each.value.zones])), 0, 6)}"
  node_role_arn   = aws_iam_role.node.arn
  subnet_ids      = [for zone in each.value.zones : local.private_subnets[zone]]
  version         = local.kubernetes_version
  ami_type        = each.value.ami_type
  capacity_type   = each.value.capacity
  instance_types  = [each.value.instance_type]
  labels          = each.value.labels

  dynamic "taint" {
    for_each = each.value.taints
    content {
      key    = taint.value.key
      value  = taint.value.value
      effect = taint.value.effect
    }
  }

  scaling_config {
    min_size     = each.value.min
    max_size     = each.value.max
    desired_size = each.value.min
  }

  update_config {
    max_unavailable = 1
  }

  launch_template {
    id      = aws_launch_template.node[each.key].id
    version = aws_launch_template.node[each.key].latest_version
  }

  # A way out before the first node, the network plug-in before it is ready. On destroy the plug-in outlives the nodes,
  # else their interfaces stay behind and hold the subnets; so do the gateway's addresses, which are free only some
  # minutes after its load balancer is deleted.
  depends_on = [
    aws_eip.gateway,
    aws_eks_addon.node,
    aws_iam_role_policy_attachment.node,
    aws_route.private,
    aws_route_table_association.private,
    aws_vpc_endpoint.interface,
    aws_vpc_endpoint.s3,
    aws_vpc_security_group_ingress_rule.endpoints,
  ]

  lifecycle {
    create_before_destroy = true
    ignore_changes        = [scaling_config[0].desired_size]
  }
}

# From zero the autoscaler learns labels and taints from EKS, but not the disk's size from a launch template: pods that
# ask for local storage would never get a node.
resource "aws_autoscaling_group_tag" "local_storage" {
  for_each = aws_eks_node_group.this

  autoscaling_group_name = each.value.resources[0].autoscaling_groups[0].name
  tag {
    key                 = "k8s.io/cluster-autoscaler/node-template/resources/ephemeral-storage"
    value               = "${local.pools[each.key].disk_gb}Gi"
    propagate_at_launch = false
  }
}
