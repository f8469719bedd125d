# One network, one subnet: nodes, services and pods out of network_cidr. Nodes have no public address: they reach Google's
# APIs through Private Google Access, other registries through Cloud NAT.

locals {
  cidr = {
    nodes           = cidrsubnet(var.network_cidr, 4, 0)
    services        = cidrsubnet(var.network_cidr, 4, 1)
    google_services = cidrsubnet(var.network_cidr, 4, 2)
    # A range that is there may have another size.
    pods = one([
      for range in try(data.google_compute_subnetwork.existing[0].secondary_ip_range, [{ range_name = "pods", ip_cidr_range = cidrsubnet(var.network_cidr, 1, 1) }]) :
      range.ip_cidr_range if range.range_name == "pods"
    ])
  }
  # GKE gives each node twice its pods in addresses, as a power of two: 128 of them for 64 pods.
  pods_per_node = 64
  max_nodes     = pow(2, 32 - tonumber(split("/", local.cidr.pods)[1])) / (2 * local.pods_per_node)

  own_network = var.cluster.network == null
  network_id  = try(google_compute_network.this[0].id, "projects/${local.project}/global/networks/${var.cluster.network.id}")
  subnet      = try(google_compute_subnetwork.nodes[0], data.google_compute_subnetwork.existing[0])
}

# A network that is there stays as it is: its owner has given it a way out (Cloud NAT).
data "google_compute_subnetwork" "existing" {
  count = local.own_network ? 0 : 1

  name   = var.cluster.network.subnets[0]
  region = var.region
  lifecycle {
    postcondition {
      condition     = length(var.cluster.network.subnets) == 1 && endswith(self.network, "/${var.cluster.network.id}")
      error_message = "cluster.network: one subnet, which is in the network ${var.cluster.network.id}."
    }
    postcondition {
      condition     = self.private_ip_google_access
      error_message = "cluster.network.subnets: ${self.name} needs Private Google Access: nodes have no public address."
    }
    postcondition {
      condition     = !local.own_cluster || length(setintersection(self.secondary_ip_range[*].range_name, ["pods", "services"])) == 2
      error_message = "cluster.network.subnets: ${self.name} needs secondary ranges called pods and services."
    }
  }
}

resource "google_compute_network" "this" {
  count = local.own_network ? 1 : 0

  name                    = var.name
  auto_create_subnetworks = false
  depends_on              = [google_project_service.this]
}

resource "google_compute_subnetwork" "nodes" {
  count = local.own_network ? 1 : 0

  name                     = "${var.name}-nodes"
  network                  = local.network_id
  region                   = var.region
  ip_cidr_range            = local.cidr.nodes
  private_ip_google_access = true
  stack_type               = "IPV4_ONLY"
  secondary_ip_range {
    range_name    = "pods"
    ip_cidr_range = local.cidr.pods
  }
  secondary_ip_range {
    range_name    = "services"
    ip_cidr_range = local.cidr.services
  }
  log_config {
    aggregation_interval = "INTERVAL_10_MIN"
    flow_sampling        = 0.1
    metadata             = "INCLUDE_ALL_METADATA"
  }
}

resource "google_compute_router" "this" {
  count = local.own_network ? 1 : 0

  name    = var.name
  network = local.network_id
  region  = var.region
}

resource "google_compute_router_nat" "this" {
  count = local.own_network ? 1 : 0

  name                               = var.name
  router                             = google_compute_router.this[0].name
  region                             = var.region
  nat_ip_allocate_option             = "AUTO_ONLY"
  source_subnetwork_ip_ranges_to_nat = "LIST_OF_SUBNETWORKS"
  # A node that pulls images and calls several services runs out of the 64 ports it has by default.
  enable_dynamic_port_allocation      = true
  enable_endpoint_independent_mapping = false
  min_ports_per_vm                    = 64
  max_ports_per_vm                    = 4096
  subnetwork {
    name                    = google_compute_subnetwork.nodes[0].id
    source_ip_ranges_to_nat = ["ALL_IP_RANGES"]
  }
  log_config {
    enable = true
    filter = "ERRORS_ONLY"
  }
}

# The Kubernetes API asks KEDA for metrics (6443) and about new ScaledObjects (9443). GKE lets it reach nodes on 443 and 10250
# only, from its own range or, in newer clusters, from its endpoint in ours.
resource "google_compute_firewall" "keda" {
  count = try(var.platform.keda.enabled, false) ? 1 : 0

  name    = "${var.name}-keda"
  network = local.network_id
  source_ranges = compact([
    try(local.gke.private_cluster_config[0].master_ipv4_cidr_block, ""),
    "${local.gke.private_cluster_config[0].private_endpoint}/32",
  ])
  target_service_accounts = local.own_cluster ? [google_service_account.nodes.email] : null
  allow {
    protocol = "tcp"
    ports    = ["6443", "9443"]
  }
}

# Where Google puts the managed Redis: a range of ours, reached by peering.
resource "google_compute_global_address" "google_services" {
  count = var.redis.managed && local.own_network ? 1 : 0

  name          = "${var.name}-google-services"
  purpose       = "VPC_PEERING"
  address_type  = "INTERNAL"
  address       = split("/", local.cidr.google_services)[0]
  prefix_length = tonumber(split("/", local.cidr.google_services)[1])
  network       = local.network_id
}

resource "google_service_networking_connection" "this" {
  count = var.redis.managed && local.own_network ? 1 : 0

  network                 = local.network_id
  service                 = "servicenetworking.googleapis.com"
  reserved_peering_ranges = [google_compute_global_address.google_services[0].name]
}
