# `terraform test`: plans and applies against mocks, never a cloud. tests/terraform/test_aws.py looks closer.

mock_provider "aws" {
  mock_data "aws_availability_zones" {
    defaults = { names = ["eu-central-1a", "eu-central-1b", "eu-central-1c", "eu-central-1d"] }
  }
  mock_data "aws_caller_identity" {
    defaults = { account_id = "123456789012", arn = "arn:aws:sts::123456789012:assumed-role/deployer/me" }
  }
  mock_data "aws_ec2_instance_type" {
    defaults = { supported_architectures = ["x86_64"], gpus = [{ count = 1, manufacturer = "NVIDIA", memory_size = 24576, name = "L4" }] }
  }
  mock_data "aws_ec2_instance_type_offerings" {
    defaults = { locations = ["eu-central-1a", "eu-central-1b", "eu-central-1c"] }
  }
  mock_data "aws_iam_session_context" {
    defaults = { issuer_arn = "arn:aws:iam::123456789012:role/deployer" }
  }
  mock_data "aws_vpc_endpoint_service" {
    defaults = { availability_zones = ["eu-central-1a", "eu-central-1b", "eu-central-1c"] }
  }
  mock_data "aws_partition" {
    defaults = { partition = "aws", dns_suffix = "amazonaws.com" }
  }
}

mock_provider "helm" {}

variables {
  platform = { gateway = { plain_http = true }, policies = { tenants = { acme = { tier = "gold", keys_sha256 = ["23d85bc42d794be5ac9699f40b1f977f6e88b5c9dd7f6b78cccdd7f031099e08"] } } } }
  region   = "eu-central-1"
}

run "pools_grow_from_zero" {
  command = plan
  assert {
    condition     = alltrue([for pool in ["cpu", "gpu"] : aws_eks_node_group.this[pool].scaling_config[0].min_size == 0])
    error_message = "cpu and gpu have to shrink to no node."
  }
  assert {
    condition     = one(aws_eks_node_group.this["gpu"].taint).effect == "NO_SCHEDULE"
    error_message = "Pods without a GPU have to stay away from empty GPU nodes."
  }
}

run "one_of_each_is_kept" {
  command = plan
  variables {
    scale_to_zero = false
  }
  assert {
    condition     = alltrue([for pool in ["cpu", "gpu"] : aws_eks_node_group.this[pool].scaling_config[0].min_size == 1])
    error_message = "scale_to_zero = false has to keep a node of each pool."
  }
}

run "without_gpus" {
  command = plan
  variables {
    gpu_enabled = false
  }
  assert {
    condition     = sort(keys(aws_eks_node_group.this)) == tolist(["cpu", "system"])
    error_message = "gpu_enabled = false makes no GPU pool."
  }
}

run "api_is_private" {
  command = plan
  assert {
    condition     = !aws_eks_cluster.this[0].vpc_config[0].endpoint_public_access && aws_eks_cluster.this[0].vpc_config[0].endpoint_private_access
    error_message = "The API has to be reachable from inside the network only."
  }
}

run "api_for_a_network" {
  command = plan
  variables {
    cluster = { api_access_cidrs = ["203.0.113.0/24"] }
  }
  assert {
    condition     = aws_eks_cluster.this[0].vpc_config[0].public_access_cidrs == toset(["203.0.113.0/24"])
    error_message = "The API has to be reachable from this network, and from no other."
  }
}

run "infrastructure_only" {
  command = plan
  variables {
    deploy_platform = false
  }
  assert {
    condition     = length(module.platform) + length(helm_release.autoscaler) == 0
    error_message = "deploy_platform = false must not need the cluster's API."
  }
}

run "redis_in_the_cluster" {
  command = plan
  variables {
    redis = { managed = false }
  }
  assert {
    condition     = length(aws_elasticache_replication_group.limiter) == 0 && !output.redis_tls
    error_message = "redis.managed = false makes no ElastiCache."
  }
}

run "name_in_dns" {
  command = plan
  variables {
    dns = { zone = "example.com", host = "api.example.com", tls_secret = "api-tls" }
  }
  assert {
    condition     = aws_route53_record.gateway[0].name == "api.example.com"
    error_message = "dns has to make a record."
  }
}

run "refuses_two_zones" {
  command = plan
  override_data {
    target = data.aws_availability_zones.available
    values = { names = ["us-west-1a", "us-west-1c"] }
  }
  expect_failures = [terraform_data.zones]
}

run "refuses_a_name_that_aws_refuses" {
  command = plan
  variables {
    name = "a--b"
  }
  expect_failures = [var.name]
}

run "refuses_the_whole_internet" {
  command = plan
  variables {
    cluster = { api_access_cidrs = ["0.0.0.0/0"] }
  }
  expect_failures = [var.cluster]
}
