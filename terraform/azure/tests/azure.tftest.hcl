# `terraform test`: plans against mocks, never a cloud. tests/terraform/test_azure.py looks closer.

mock_provider "azurerm" {
  mock_data "azurerm_client_config" {
    defaults = {
      subscription_id = "11111111-2222-3333-4444-555555555555"
      tenant_id       = "66666666-7777-8888-9999-000000000000"
      object_id       = "aaaaaaaa-bbbb-cccc-dddd-eeeeeeeeeeee"
    }
  }
  mock_data "azurerm_location" {
    defaults = { zone_mappings = [
      { logical_zone = "1", physical_zone = "westeurope-az1" },
      { logical_zone = "2", physical_zone = "westeurope-az2" },
    ] }
  }
}

mock_provider "helm" {}

variables {
  platform = { gateway = { plain_http = true }, policies = { tenants = { acme = { tier = "gold", keys_sha256 = ["23d85bc42d794be5ac9699f40b1f977f6e88b5c9dd7f6b78cccdd7f031099e08"] } } } }
  region   = "westeurope"
}

run "pools_grow_from_zero" {
  command = plan
  assert {
    condition     = alltrue([for pool in ["cpu", "gpu"] : azurerm_kubernetes_cluster_node_pool.scaled[pool].min_count == 0])
    error_message = "cpu and gpu have to shrink to no node."
  }
  assert {
    condition     = one(azurerm_kubernetes_cluster_node_pool.scaled["gpu"].node_taints) == "nvidia.com/gpu=present:NoSchedule"
    error_message = "Pods without a GPU have to stay away from empty GPU nodes."
  }
}

run "one_of_each_is_kept" {
  command = plan
  variables {
    scale_to_zero = false
  }
  assert {
    condition     = alltrue([for pool in ["cpu", "gpu"] : azurerm_kubernetes_cluster_node_pool.scaled[pool].min_count == 1])
    error_message = "scale_to_zero = false has to keep a node of each pool."
  }
}

run "without_gpus" {
  command = plan
  variables {
    gpu_enabled = false
  }
  assert {
    condition     = sort(keys(azurerm_kubernetes_cluster_node_pool.scaled)) == tolist(["cpu"])
    error_message = "gpu_enabled = false makes no GPU pool."
  }
}

run "api_is_private" {
  command = plan
  assert {
    condition     = azurerm_kubernetes_cluster.this[0].private_cluster_enabled && !azurerm_container_registry.images.public_network_access_enabled
    error_message = "Without api_access_cidrs neither API nor registry has a public address."
  }
}

run "the_whole_internet_is_refused" {
  command = plan
  variables {
    cluster = { api_access_cidrs = ["0.0.0.0/0"] }
  }
  expect_failures = [var.cluster]
}
