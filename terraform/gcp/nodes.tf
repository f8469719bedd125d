# system: two nodes in two zones, for what must always run. cpu and gpu, and as spot machines cpu-spot and gpu-spot: from no
# node to max_size in the whole region. GKE taints GPU nodes by itself (nvidia.com/gpu=present:NoSchedule), installs their driver and its device plugin.

locals {
  # n2: AVX-512, which ONNX Runtime's CPU kernels use; e2 may be any processor.
  cpu_type = coalesce(var.cpu_pool.instance_type, "n2-standard-4")
  gpu_type = coalesce(var.gpu_pool.instance_type, "g2-standard-8")
  gpus = {
    g2-standard- = "nvidia-l4"
    g4-standard- = "nvidia-rtx-pro-6000"
    a2-highgpu-  = "nvidia-tesla-a100"
    a2-ultragpu- = "nvidia-a100-80gb"
    a3-highgpu-  = "nvidia-h100-80gb"
    n1-standard- = "nvidia-tesla-t4"
  }
  gpu_model = one([for prefix, model in local.gpus : model if startswith(local.gpu_type, prefix)])
  # As Google says it of the type; it says nothing of n1, which takes as many as it is given.
  gpu_counts = distinct(flatten([
    for found in values(data.google_compute_machine_types.gpu) : [for type in found.machine_types : type.accelerators[*].guest_accelerator_count]
  ]))

  scaled_pools = merge({
    cpu = { type = local.cpu_type, given = var.cpu_pool, zones = local.zones, gpu = null, where = "BALANCED" }
    }, var.gpu_enabled ? {
    # Wherever there is one: GPUs run out zone by zone.
    gpu = { type = local.gpu_type, given = var.gpu_pool, zones = local.gpu_zones, gpu = local.gpu_model, where = "ANY" }
  } : {})
  pools = merge(
    { for name, pool in local.scaled_pools : name => merge(pool, { of = name, spot = false, least = var.scale_to_zero ? 0 : 1, max = pool.given.max_size }) if pool.given.max_size > 0 },
    # Only what tolerates to lose its node runs there: floors stay on demand.
    { for name, pool in local.scaled_pools : "${name}-spot" => merge(pool, { of = name, spot = true, least = 0, max = pool.given.spot_max_size, where = "ANY" }) if pool.given.spot_max_size > 0 },
  )
  # A cluster that is there may have pools of these names.
  pool_prefix = local.own_cluster ? "" : "${var.name}-"

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
  name           = "${local.pool_prefix}system"
  cluster        = local.gke.id
  node_locations = slice(local.zones, 0, min(2, length(local.zones)))
  node_count     = 1 # per zone

  node_config {
    machine_type      = "e2-standard-4"
    disk_type         = "pd-balanced"
    disk_size_gb      = 50
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
  for_each = local.pools

  name           = "${local.pool_prefix}${each.key}"
  cluster        = local.gke.id
  node_locations = each.value.zones
  # Per zone: the autoscaler takes away what is over the minimum, but does not come up to it by itself.
  initial_node_count = each.value.least

  autoscaling {
    total_min_node_count = each.value.least
    total_max_node_count = each.value.max
    location_policy      = each.value.where
  }

  node_config {
    machine_type      = each.value.type
    disk_type         = can(regex("^(c4|n4|g4)", each.value.type)) ? "hyperdisk-balanced" : "pd-balanced"
    disk_size_gb      = each.value.given.disk_gb
    boot_disk_kms_key = google_kms_crypto_key.this["disks"].id
    image_type        = "COS_CONTAINERD"
    service_account   = google_service_account.nodes.email
    oauth_scopes      = ["https://www.googleapis.com/auth/cloud-platform"]
    # These nodes come and go, and a load balancer's connections through one would end with it: it sends to the system pool
    # alone, whose kube-proxy passes calls on to gateways wherever they are.
    labels = merge(each.value.spot ? { "oriel.dev/spot" = "true" } : {}, {
      "oriel.dev/pool"                                          = each.value.of
      "node.kubernetes.io/exclude-from-external-load-balancers" = "true"
    })
    spot = each.value.spot ? true : null
    dynamic "taint" {
      for_each = each.value.spot ? ["NO_SCHEDULE"] : []
      content {
        key    = "oriel.dev/spot"
        value  = "true"
        effect = taint.value
      }
    }
    resource_labels = local.labels
    metadata        = { disable-legacy-endpoints = "true" }
    dynamic "guest_accelerator" {
      for_each = each.value.gpu == null ? [] : [each.value.gpu]
      content {
        type  = guest_accelerator.value
        count = var.gpu_pool.gpus
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
      condition     = each.value.of != "gpu" || local.gpu_model != null
      error_message = "gpu_pool.instance_type: one of ${join("*, ", keys(local.gpus))}*; ${local.gpu_type} is none."
    }
    precondition {
      condition     = each.value.of != "gpu" || alltrue([for count in local.gpu_counts : count == var.gpu_pool.gpus])
      error_message = "gpu_pool.gpus: ${local.gpu_type} has ${join(", ", local.gpu_counts)} GPUs."
    }
    precondition {
      condition     = !can(regex("^(c4a|n4a|t2a)-", each.value.type))
      error_message = "cpu_pool.instance_type: GKE taints ARM nodes, and no pod of the platform tolerates that taint yet."
    }
    precondition {
      condition     = length(each.value.zones) > 0
      error_message = "No zone of ${join(", ", local.zones)} has ${each.value.type}: choose another region or gpu_pool.instance_type."
    }
    precondition {
      condition     = !local.own_cluster || 2 + sum(values(local.pools)[*].max) < local.max_nodes
      error_message = "The network has pod addresses for ${local.max_nodes} nodes: make the sizes of cpu_pool and gpu_pool smaller."
    }
  }

  # GKE taints a GPU pool by itself only where there are other nodes already.
  depends_on = [google_container_node_pool.system]
}
