# `terraform test`: against mocks, never a cluster.

mock_provider "kubernetes" {
  mock_data "kubernetes_server_version" {
    defaults = { version = "1.33.4" }
  }
}

mock_provider "helm" {}

variables {
  platform             = { gateway = { plain_http = true }, policies = { tenants = { acme = { tier = "gold", keys_sha256 = ["23d85bc42d794be5ac9699f40b1f977f6e88b5c9dd7f6b78cccdd7f031099e08"] } } } }
  kubeconfig_path      = "tests/kubeconfig.yaml"
  model_repository_url = "s3://https://store.example.com:9000/models/oriel"
  image_registry       = "registry.example.com/oriel"
}

run "current_context" {
  command = plan
  assert {
    condition     = output.cluster_endpoint == "https://10.0.0.1:6443" && startswith(output.cluster_ca_certificate, "-----BEGIN CERTIFICATE-----")
    error_message = "Endpoint and certificate authority are the file's."
  }
  assert {
    condition     = output.cluster_auth == null
    error_message = "This user has no command."
  }
}

run "context_with_a_command" {
  command = plan
  variables {
    kube_context = "far"
  }
  assert {
    condition     = output.cluster_auth == { api_version = "client.authentication.k8s.io/v1", command = "kubelogin", args = ["get-token", "--login"], env = { PROFILE = "work" } }
    error_message = "The command is the file's."
  }
}

run "gpu_nodes_of_another_kind" {
  command = plan
  variables {
    gpu_enabled       = true
    gpu_node_selector = { "nvidia.com/gpu.present" = "true" }
    gpu_taint         = { key = "gpu", value = "yes", effect = "PreferNoSchedule" }
  }
  assert {
    condition     = output.gpu_taint.key == "gpu" && output.gpu_node_selector == tomap({ "nvidia.com/gpu.present" = "true" })
    error_message = "Selector and taint are what is said."
  }
}

run "refuses_another_context" {
  command = plan
  variables {
    kube_context = "moon"
  }
  expect_failures = [data.kubernetes_server_version.this]
}

run "refuses_an_old_cluster" {
  command = plan
  override_data {
    target = data.kubernetes_server_version.this
    values = { version = "1.29.9" }
  }
  expect_failures = [data.kubernetes_server_version.this]
}

run "refuses_a_password_in_the_url" {
  command = plan
  variables {
    redis = { url = "rediss://:password@redis.example.com:6379" }
  }
  expect_failures = [var.redis]
}
