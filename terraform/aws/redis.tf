# The shared ledger of limits and quotas: Valkey with a replica in another zone. Its data are counters and leases, so no
# snapshots: the gateway refills them.

locals {
  redis_port = 6379
}

# The password. uuid() is random (twice 122 bits) and new in each run, hence ignored once made; triggers_replace holds it
# because a copy in `output` would be printed by destroy. `apply -replace` of this one rotates it.
resource "terraform_data" "redis_password" {
  count = var.redis.managed ? 1 : 0

  triggers_replace = sensitive(sha256("${uuid()}${uuid()}"))
  lifecycle {
    ignore_changes = [triggers_replace]
  }
}

resource "aws_elasticache_subnet_group" "limiter" {
  count = var.redis.managed ? 1 : 0

  name       = var.name
  subnet_ids = values(local.private_subnets)
}

# The default throws out keys that end by themselves when memory runs out: all of ours do, and none may go early.
resource "aws_elasticache_parameter_group" "limiter" {
  count = var.redis.managed ? 1 : 0

  name        = "${var.name}-valkey8"
  family      = "valkey8"
  description = "Limits and quotas of ${var.name}"
  parameter {
    name  = "maxmemory-policy"
    value = "noeviction"
  }
}

resource "aws_security_group" "redis" {
  count = var.redis.managed ? 1 : 0

  name        = "${var.name}-redis"
  description = "Redis: from nodes and pods of the cluster"
  vpc_id      = local.vpc_id
  tags        = { Name = "${var.name}-redis" }
}

resource "aws_vpc_security_group_ingress_rule" "redis" {
  count = var.redis.managed ? 1 : 0

  security_group_id            = aws_security_group.redis[0].id
  description                  = "Redis from nodes and pods of the cluster"
  referenced_security_group_id = local.eks.vpc_config[0].cluster_security_group_id
  ip_protocol                  = "tcp"
  from_port                    = local.redis_port
  to_port                      = local.redis_port
}

resource "aws_elasticache_replication_group" "limiter" {
  count = var.redis.managed ? 1 : 0

  replication_group_id       = var.name
  description                = "Limits and quotas of ${var.name}"
  engine                     = "valkey"
  engine_version             = "8.0"
  node_type                  = coalesce(var.redis.size, "cache.t4g.micro")
  port                       = local.redis_port
  num_cache_clusters         = 2
  automatic_failover_enabled = true
  multi_az_enabled           = true
  parameter_group_name       = aws_elasticache_parameter_group.limiter[0].name
  subnet_group_name          = aws_elasticache_subnet_group.limiter[0].name
  security_group_ids         = [aws_security_group.redis[0].id]
  at_rest_encryption_enabled = "true"
  kms_key_id                 = aws_kms_key.this["cluster"].arn
  transit_encryption_enabled = true
  auth_token                 = sensitive(terraform_data.redis_password[0].triggers_replace)
  # The old password is good until the next rotation: pods that still have it keep their limits.
  auth_token_update_strategy = "ROTATE"
  apply_immediately          = true
}
