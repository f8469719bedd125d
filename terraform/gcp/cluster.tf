# GKE: regional, private nodes, Dataplane V2 (NetworkPolicies are enforced by it), workload identity, secrets encrypted in
# etcd with a key of ours. Its pools are in nodes.tf.

# A cluster that is there gets our pools, and keeps its own settings.
data "google_container_cluster" "existing" {
  count = local.own_cluster ? 0 : 1

  name     = var.cluster.existing
  location = var.region
  lifecycle {
    postcondition {
      condition     = endswith(try(self.network, ""), "/${var.cluster.network.id}")
      error_message = "cluster.existing: a regional cluster of ${var.region} in cluster.network.id."
    }
    postcondition {
      condition     = try(self.workload_identity_config[0].workload_pool, "") == "${local.project}.svc.id.goog"
      error_message = "cluster.existing: ${var.cluster.existing} needs workload identity: by it pods read the bucket."
    }
    postcondition {
      condition     = self.datapath_provider == "ADVANCED_DATAPATH" || try(self.network_policy[0].enabled, false)
      error_message = "cluster.existing: ${var.cluster.existing} enforces no network policies; it needs Dataplane V2 or Calico."
    }
    postcondition {
      condition     = try(tonumber(split(".", self.master_version)[1]) >= 30, false)
      error_message = "cluster.existing: ${var.cluster.existing} needs Kubernetes 1.30 or newer."
    }
  }
}

locals {
  own_cluster = var.cluster.existing == null
  gke         = try(google_container_cluster.this[0], data.google_container_cluster.existing[0])
}

resource "google_project_iam_member" "administrators" {
  for_each = toset(var.cluster.administrators)

  project = local.project
  role    = "roles/container.admin"
  member  = each.key
}

resource "google_container_cluster" "this" {
  count = local.own_cluster ? 1 : 0

  name                = var.name
  location            = var.region
  node_locations      = local.zones
  deletion_protection = var.cluster.deletion_protection
  min_master_version  = var.cluster.kubernetes_version
  resource_labels     = local.labels

  network                   = local.network_id
  subnetwork                = local.subnet.id
  networking_mode           = "VPC_NATIVE"
  datapath_provider         = "ADVANCED_DATAPATH"
  default_max_pods_per_node = local.pods_per_node
  enable_shielded_nodes     = true

  # GKE cannot make a cluster without nodes. These go at once; until then they run as our pools do.
  remove_default_node_pool = true
  initial_node_count       = 1
  node_config {
    machine_type      = "e2-medium"
    disk_size_gb      = 30
    service_account   = google_service_account.nodes.email
    oauth_scopes      = ["https://www.googleapis.com/auth/cloud-platform"]
    boot_disk_kms_key = google_kms_crypto_key.this["disks"].id
    shielded_instance_config {
      enable_secure_boot          = true
      enable_integrity_monitoring = true
    }
    workload_metadata_config {
      mode = "GKE_METADATA"
    }
  }

  ip_allocation_policy {
    cluster_secondary_range_name  = "pods"
    services_secondary_range_name = "services"
  }

  private_cluster_config {
    enable_private_nodes    = true
    enable_private_endpoint = local.private
  }

  # GKE wants this block for a private endpoint, and without it every address may ask at a public one. Hosts in our network
  # outside the nodes' subnet are not let in by themselves.
  master_authorized_networks_config {
    gcp_public_cidrs_access_enabled = false
    dynamic "cidr_blocks" {
      for_each = toset(concat([local.own_network ? var.network_cidr : local.subnet.ip_cidr_range], var.cluster.api_access_cidrs))
      content {
        cidr_block = cidr_blocks.value
      }
    }
  }

  # A certificate would be a key that cannot be taken back.
  master_auth {
    client_certificate_config {
      issue_client_certificate = false
    }
  }

  workload_identity_config {
    workload_pool = "${local.project}.svc.id.goog"
  }

  database_encryption {
    state    = "ENCRYPTED"
    key_name = google_kms_crypto_key.this["secrets"].id
  }

  release_channel {
    channel = var.cluster.extended_support ? "EXTENDED" : "REGULAR"
  }

  cluster_autoscaling {
    enabled = false # no pools of its own invention; the pools of nodes.tf scale all the same
    # Idle nodes leave earlier, and pods are packed: a GPU node that nobody needs is what costs most here.
    autoscaling_profile = "OPTIMIZE_UTILIZATION"
  }

  addons_config {
    gce_persistent_disk_csi_driver_config {
      enabled = true
    }
    http_load_balancing {
      disabled = false
    }
  }

  node_pool_defaults {
    node_config_defaults {
      insecure_kubelet_readonly_port_enabled = "FALSE"
    }
  }

  logging_config {
    enable_components = ["SYSTEM_COMPONENTS", "WORKLOADS"]
  }
  monitoring_config {
    enable_components = ["SYSTEM_COMPONENTS"]
    # Metrics are the platform's own (observability); this one is billed by sample.
    managed_prometheus {
      enabled = false
    }
  }

  maintenance_policy {
    recurring_window {
      start_time = "2026-01-03T02:00:00Z"
      end_time   = "2026-01-03T08:00:00Z"
      recurrence = "FREQ=WEEKLY;BYDAY=SA,SU"
    }
  }

  lifecycle {
    # Of the nodes that are gone.
    ignore_changes = [node_config, initial_node_count]
  }

  depends_on = [
    google_kms_crypto_key_iam_member.this,
    google_project_iam_member.nodes,
    # Without a way out the first nodes cannot pull what is not Google's.
    google_compute_router_nat.this,
  ]
}
