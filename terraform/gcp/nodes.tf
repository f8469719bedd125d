# Three pools. system: two nodes in two zones, for what must always run. cpu and gpu: from no node to max_size in the whole
# region. GKE taints GPU nodes by itself (nvidia.com/gpu=present:NoSchedule), installs their driver and its device plugin.

locals {
  # n2: AVX-512, which ONNX Runtime's CPU kernels use; e2 may be any processor.
  cpu_type = coalesce(var.cpu_pool.instance_type, "n2-standard-4")
  gpu_type = coalesce(var.gpu_pool.instance_type, "g2-standard-8")
  gpus = {
    g2-standard-  = "nvidia-l4"
    g4-standard-  = "nvidia-rtx-pro-6000"
    a2-highgpu-   = "nvidia-tesla-a100"
    a2-ultragpu-  = "nvidia-a100-80gb"
    a3-highgpu-1g = "nvidia-h100-80gb"
    n1-standard-  = "nvidia-tesla-t4"
  }
  gpu_model = one([for prefix, model in local.gpus : model if startswith(local.gpu_type, prefix)])
  # Machines of these families with more than one GPU; the API refuses them with a count of one. n1 takes what it is given.
  several_gpus = can(regex("^(g2-standard-(24|48|96)|g4-standard-(96|192|384)|a2-(highgpu|ultragpu)-([2-9]|1[0-9])g)", local.gpu_type))
  least        = var.scale_to_zero ? 0 : 1

  pools = merge({
    system = { type = "e2-standard-4", disk_gb = 50, zones = slice(local.zones, 0, min(2, length(local.zones))), gpu = null }
    cpu    = { type = local.cpu_type, disk_gb = var.cpu_pool.disk_gb, zones = local.zones, gpu = null }
    }, var.gpu_enabled ? {
    gpu = { type = local.gpu_type, disk_gb = var.gpu_pool.disk_gb, zones = local.gpu_zones, gpu = local.gpu_model }
  } : {})
  scaling = {
    cpu = { max = var.cpu_pool.max_size, where = "BALANCED" }
    # Wherever there is one: GPUs run out zone by zone.
    gpu = { max = var.gpu_pool.max_size, where = "ANY" }
  }

  # Not every zone has every GPU, and GKE refuses a pool with a zone that lacks it.
  gpu_zones = flatten([for each in values(terraform_data.gpu_zones) : each.input])
}

# As they were when the pool was first planned.
resource "terraform_data" "gpu_zones" {
  for_each = toset([for type in [local.gpu_type] : "${type} in ${join(", ", local.zones)}" if var.gpu_enabled])

  input = [for zone in local.zones : zone if length(data.google_compute_machine_types.gpu[zone].machine_types) > 0]
  lifecycle {
    ignore_changes = [input]
  }
}

data "google_compute_machine_types" "gpu" {
  for_each = var.gpu_enabled ? toset(local.zones) : []

  zone   = each.value
  filter = "name = \"${local.gpu_type}\""
}

resource "google_container_node_pool" "system" {
  name           = "system"
  cluster        = google_container_cluster.this.id
  node_locations = local.pools.system.zones
  node_count     = 1 # per zone

  node_config {
    machine_type      = local.pools.system.type
    disk_type         = "pd-balanced"
    disk_size_gb      = local.pools.system.disk_gb
    boot_disk_kms_key = google_kms_crypto_key.this["disks"].id
    image_type        = "COS_CONTAINERD"
    service_account   = google_service_account.nodes.email
    # What the nodes may do is said by their service account's roles, not by scopes.
    oauth_scopes    = ["https://www.googleapis.com/auth/cloud-platform"]
    labels          = { "oriel.dev/pool" = "system" }
    resource_labels = local.labels
    metadata        = { disable-legacy-endpoints = "true" }
    shielded_instance_config {
      enable_secure_boot          = true
      enable_integrity_monitoring = true
    }
    workload_metadata_config {
      mode = "GKE_METADATA"
    }
  }
  management {
    auto_repair  = true
    auto_upgrade = true
  }
  upgrade_settings {
    max_surge       = 1
    max_unavailable = 0
  }
}

resource "google_container_node_pool" "scaled" {
  for_each = { for name, pool in local.pools : name => pool if name != "system" }

  name           = each.key
  cluster        = google_container_cluster.this.id
  node_locations = each.value.zones
  # Per zone: the autoscaler takes away what is over the minimum, but does not come up to it by itself.
  initial_node_count = local.least

  autoscaling {
    total_min_node_count = local.least
    total_max_node_count = local.scaling[each.key].max
    location_policy      = local.scaling[each.key].where
  }

  node_config {
    machine_type      = each.value.type
    disk_type         = can(regex("^(c4|n4|g4)", each.value.type)) ? "hyperdisk-balanced" : "pd-balanced"
    disk_size_gb      = each.value.disk_gb
    boot_disk_kms_key = google_kms_crypto_key.this["disks"].id
    image_type        = "COS_CONTAINERD"
    service_account   = google_service_account.nodes.email
    oauth_scopes      = ["https://www.googleapis.com/auth/cloud-platform"]
    # These nodes come and go, and a load balancer's connections through one would end with it: it sends to the system pool
    # alone, whose kube-proxy passes calls on to gateways wherever they are.
    labels = {
      "oriel.dev/pool"                                          = each.key
      "node.kubernetes.io/exclude-from-external-load-balancers" = "true"
    }
    resource_labels = local.labels
    metadata        = { disable-legacy-endpoints = "true" }
    dynamic "guest_accelerator" {
      for_each = each.value.gpu == null ? [] : [each.value.gpu]
      content {
        type  = guest_accelerator.value
        count = 1
        gpu_driver_installation_config {
          # CUDA 13, which the GPU images carry, needs driver 580; GKE's default is often older.
          gpu_driver_version = "LATEST"
        }
      }
    }
    shielded_instance_config {
      # The GPU's driver is a kernel module that is put in after boot.
      enable_secure_boot          = each.value.gpu == null
      enable_integrity_monitoring = true
    }
    workload_metadata_config {
      mode = "GKE_METADATA"
    }
  }
  management {
    auto_repair  = true
    auto_upgrade = true
  }
  upgrade_settings {
    # One more GPU node than max_size is what a quota most often refuses: GPU nodes are replaced one by one instead.
    max_surge       = each.value.gpu == null ? 1 : 0
    max_unavailable = each.value.gpu == null ? 0 : 1
  }

  lifecycle {
    # Counts at creation only; a change of it would make a new pool.
    ignore_changes = [initial_node_count]
    precondition {
      condition     = each.key != "gpu" || local.gpu_model != null
      error_message = "gpu_pool.instance_type: one of ${join("*, ", keys(local.gpus))}*; ${local.gpu_type} is none."
    }
    precondition {
      condition     = each.key != "gpu" || !local.several_gpus
      error_message = "gpu_pool.instance_type: a machine with one GPU; ${local.gpu_type} has more, and a model server asks for one."
    }
    precondition {
      condition     = length(each.value.zones) > 0
      error_message = "No zone of ${join(", ", local.zones)} has ${each.value.type}: choose another region or gpu_pool.instance_type."
    }
    precondition {
      condition     = 2 + var.cpu_pool.max_size + (var.gpu_enabled ? var.gpu_pool.max_size : 0) < local.max_nodes
      error_message = "network_cidr has pod addresses for ${local.max_nodes} nodes: make cpu_pool.max_size and gpu_pool.max_size smaller."
    }
  }

  # GKE taints a GPU pool by itself only where there are other nodes already.
  depends_on = [google_container_node_pool.system]
}
