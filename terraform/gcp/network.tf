# One network, one subnet: nodes, services and pods out of network_cidr. Nodes have no public address: they reach Google's
# APIs through Private Google Access, other registries through Cloud NAT.

locals {
  cidr = {
    nodes           = cidrsubnet(var.network_cidr, 4, 0)
    services        = cidrsubnet(var.network_cidr, 4, 1)
    google_services = cidrsubnet(var.network_cidr, 4, 2)
    pods            = cidrsubnet(var.network_cidr, 1, 1)
  }
  # GKE gives each node twice its pods in addresses, as a power of two: 128 of them for 64 pods.
  pods_per_node = 64
  max_nodes     = pow(2, 32 - tonumber(split("/", local.cidr.pods)[1])) / (2 * local.pods_per_node)
}

resource "google_compute_network" "this" {
  name                    = var.name
  auto_create_subnetworks = false
  depends_on              = [google_project_service.this]
}

resource "google_compute_subnetwork" "nodes" {
  name                     = "${var.name}-nodes"
  network                  = google_compute_network.this.id
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
  name    = var.name
  network = google_compute_network.this.id
  region  = var.region
}

resource "google_compute_router_nat" "this" {
  name                               = var.name
  router                             = google_compute_router.this.name
  region                             = var.region
  nat_ip_allocate_option             = "AUTO_ONLY"
  source_subnetwork_ip_ranges_to_nat = "LIST_OF_SUBNETWORKS"
  # A node that pulls images and calls several services runs out of the 64 ports it has by default.
  enable_dynamic_port_allocation      = true
  enable_endpoint_independent_mapping = false
  min_ports_per_vm                    = 64
  max_ports_per_vm                    = 4096
  subnetwork {
    name                    = google_compute_subnetwork.nodes.id
    source_ip_ranges_to_nat = ["ALL_IP_RANGES"]
  }
  log_config {
    enable = true
    filter = "ERRORS_ONLY"
  }
}

# Where Google puts the managed Redis: a range of ours, reached by peering.
resource "google_compute_global_address" "google_services" {
  count = var.redis.managed ? 1 : 0

  name          = "${var.name}-google-services"
  purpose       = "VPC_PEERING"
  address_type  = "INTERNAL"
  address       = split("/", local.cidr.google_services)[0]
  prefix_length = tonumber(split("/", local.cidr.google_services)[1])
  network       = google_compute_network.this.id
}

resource "google_service_networking_connection" "this" {
  count = var.redis.managed ? 1 : 0

  network                 = google_compute_network.this.id
  service                 = "servicenetworking.googleapis.com"
  reserved_peering_ranges = [google_compute_global_address.google_services[0].name]
}
