# The gateway's address and its name, in a zone that is there already.

data "google_dns_managed_zones" "all" {
  count = var.dns == null ? 0 : 1
}

locals {
  zones_found = var.dns == null ? [] : [
    for zone in data.google_dns_managed_zones.all[0].managed_zones : zone.name
    if zone.dns_name == "${var.dns.zone}." && zone.visibility == "public"
  ]
}

resource "google_compute_address" "gateway" {
  count = var.dns == null ? 0 : 1

  name         = "${var.name}-gateway"
  region       = var.region
  address_type = "EXTERNAL"
  network_tier = "PREMIUM"
  depends_on   = [google_project_service.this]
}

resource "google_dns_record_set" "gateway" {
  count = var.dns == null ? 0 : 1

  managed_zone = one(local.zones_found)
  name         = "${var.dns.host}."
  type         = "A"
  ttl          = 60
  rrdatas      = [google_compute_address.gateway[0].address]

  lifecycle {
    precondition {
      condition     = length(local.zones_found) == 1
      error_message = "This project has ${length(local.zones_found)} public zones ${try(var.dns.zone, "")}., and not one."
    }
  }
}
