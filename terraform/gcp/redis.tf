# Memorystore for Redis: with a replica in another zone, TLS and a password, reachable from this network only.

resource "google_redis_instance" "this" {
  count = var.redis.managed ? 1 : 0

  name                    = var.name
  region                  = var.region
  tier                    = "STANDARD_HA"
  memory_size_gb          = tonumber(coalesce(var.redis.size, "1"))
  redis_version           = "REDIS_7_2"
  auth_enabled            = true
  transit_encryption_mode = "SERVER_AUTHENTICATION"
  # In a network that is there Google peers for this instance alone: a network has one connection for all services.
  connect_mode       = local.own_network ? "PRIVATE_SERVICE_ACCESS" : "DIRECT_PEERING"
  authorized_network = local.network_id
  # Its records are counters and leases: none of them may be thrown out early.
  redis_configs = { maxmemory-policy = "noeviction" }

  lifecycle {
    precondition {
      condition     = can(regex("^[1-9][0-9]{0,2}$", coalesce(var.redis.size, "1"))) && try(tonumber(var.redis.size) <= 300, true)
      error_message = "redis.size: on Google Cloud its memory in GB, 1 to 300."
    }
  }
  depends_on = [google_service_networking_connection.this, google_project_service.this]
}
