# `terraform test`: plans against mocks, never a cloud. tests/terraform/test_gcp.py looks closer.

mock_provider "google" {
  mock_data "google_client_config" {
    defaults = { project = "example-project" }
  }
  mock_data "google_project" {
    defaults = { number = "123456789012" }
  }
  mock_data "google_storage_project_service_account" {
    defaults = { member = "serviceAccount:service-123456789012@gs-project-accounts.iam.gserviceaccount.com" }
  }
  mock_data "google_compute_zones" {
    defaults = { names = ["europe-west4-a", "europe-west4-b", "europe-west4-c"] }
  }
  mock_data "google_compute_machine_types" {
    defaults = { machine_types = [{
      accelerators                     = []
      deprecated                       = []
      description                      = ""
      guest_cpus                       = 8
      is_shared_cpus                   = false
      maximum_persistent_disks         = 128
      maximum_persistent_disks_size_gb = 263168
      memory_mb                        = 32768
      name                             = "g2-standard-8"
      self_link                        = ""
    }] }
  }
}

mock_provider "helm" {}

variables {
  platform = { gateway = { plain_http = true }, policies = { tenants = { acme = { tier = "gold", keys_sha256 = ["23d85bc42d794be5ac9699f40b1f977f6e88b5c9dd7f6b78cccdd7f031099e08"] } } } }
  region   = "europe-west4"
}

run "pools_grow_from_zero" {
  command = plan
  assert {
    condition     = alltrue([for pool in ["cpu", "gpu"] : google_container_node_pool.scaled[pool].autoscaling[0].total_min_node_count == 0])
    error_message = "cpu and gpu have to shrink to no node."
  }
  assert {
    condition     = length(google_container_node_pool.scaled["gpu"].node_config[0].taint) == 0
    error_message = "GKE taints GPU nodes by itself."
  }
}

run "one_of_each_is_kept" {
  command = plan
  variables {
    scale_to_zero = false
  }
  assert {
    condition     = alltrue([for pool in ["cpu", "gpu"] : google_container_node_pool.scaled[pool].autoscaling[0].total_min_node_count == 1])
    error_message = "scale_to_zero = false has to keep a node of each pool."
  }
}

run "without_gpus" {
  command = plan
  variables {
    gpu_enabled = false
  }
  assert {
    condition     = sort(keys(google_container_node_pool.scaled)) == tolist(["cpu"])
    error_message = "gpu_enabled = false makes no GPU pool."
  }
}

run "api_is_private" {
  command = plan
  assert {
    condition     = google_container_cluster.this[0].private_cluster_config[0].enable_private_endpoint
    error_message = "Without api_access_cidrs the API has no public address."
  }
}

run "the_whole_internet_is_refused" {
  command = plan
  variables {
    cluster = { api_access_cidrs = ["0.0.0.0/0"] }
  }
  expect_failures = [var.cluster]
}
