# What everything else here is named and located by, and the Google APIs it needs.

data "google_client_config" "current" {
  lifecycle {
    postcondition {
      condition     = try(length(self.project) > 0, false)
      error_message = "No project: set GOOGLE_PROJECT."
    }
  }
}

data "google_project" "this" {
  project_id = data.google_client_config.current.project
}

data "google_compute_zones" "available" {
  region = var.region
}

locals {
  project        = data.google_client_config.current.project
  project_number = data.google_project.this.number
  # Bucket names are one namespace for all of Google Cloud.
  suffix    = substr(sha256("${local.project}/${var.region}/${var.name}"), 0, 6)
  namespace = try(var.platform.namespace, "oriel")
  labels    = merge({ managed-by = "terraform", part-of = var.name }, var.tags)

  # No network may reach the API from the internet: it has no public address then.
  private = length(var.cluster.api_access_cidrs) == 0

  # The nodes of all pools, in two zones at least. Only zones with a letter of their own: Google also lists AI zones
  # (us-central1-ai1a), which GKE refuses beside the region's others and which have no CPU machines.
  usual_zones = sort([for zone in data.google_compute_zones.available.names : zone if can(regex("-[a-z]$", zone))])
  zones       = terraform_data.zones[var.region].input

  infrastructure = {
    cloud                  = "gcp"
    cluster_name           = local.gke.name
    cluster_endpoint       = "https://${try(local.gke.private_cluster_config[0].enable_private_endpoint, false) ? local.gke.private_cluster_config[0].private_endpoint : local.gke.endpoint}"
    cluster_ca_certificate = base64decode(local.gke.master_auth[0].cluster_ca_certificate)
    cluster_auth = {
      api_version = "client.authentication.k8s.io/v1beta1"
      command     = "gke-gcloud-auth-plugin"
      # The credentials Terraform itself uses; without it the plugin takes those of `gcloud auth login`.
      args = ["--use_application_default_credentials"]
      env  = {}
    }
    registry_url          = local.registry_url
    model_repository_url  = "gs://${google_storage_bucket.models.name}/models"
    redis_url             = var.redis.managed ? "rediss://${google_redis_instance.this[0].host}:${google_redis_instance.this[0].port}" : null
    redis_tls             = var.redis.managed
    redis_auth_secret_ref = var.redis.managed ? { name = "oriel-redis-auth", key = "password" } : null
    # Nothing: a pod is known to the bucket by its service account itself (identity.tf).
    workload_identity = { service_account_annotations = {}, pod_labels = {} }
    gpu_node_selector = var.gpu_pool.node_selector
    # Put on GPU nodes by GKE itself.
    gpu_taint     = { key = "nvidia.com/gpu", value = "present", effect = "NoSchedule" }
    storage_class = "oriel-encrypted"
  }
}

# As they were at the first apply in this region: nodes do not move because a zone is briefly away, or a new one sorts first.
resource "terraform_data" "zones" {
  for_each = toset([var.region])

  input = slice(local.usual_zones, 0, min(3, length(local.usual_zones)))
  lifecycle {
    ignore_changes = [input]
    postcondition {
      condition     = length(self.input) >= 2
      error_message = "${var.region} has fewer than two zones."
    }
  }
}

resource "google_project_service" "this" {
  for_each = toset(concat([
    "artifactregistry.googleapis.com",
    "cloudkms.googleapis.com",
    "compute.googleapis.com",
    "container.googleapis.com",
    "iam.googleapis.com",
    "storage.googleapis.com",
    ], var.redis.managed ? [
    "redis.googleapis.com",
    "servicenetworking.googleapis.com",
  ] : [], var.dns == null ? [] : ["dns.googleapis.com"]))

  service = each.value
  # Others in the project may use them.
  disable_on_destroy = false
}

# What nothing can be changed in place: another value would make nearly everything anew, and stop half way where Google
# protects the old. Kept as it was first applied.
locals {
  fixed = {
    cluster      = coalesce(var.cluster.existing, var.name)
    network      = try(var.cluster.network.id, "own")
    name         = var.name
    network_cidr = var.network_cidr
    project      = local.project
    region       = var.region
    zones        = join(", ", local.zones)
  }
}

# The first thing a destroy comes to: everything that nothing else waits for is named. GKE's own protection keeps the
# cluster only, after its node pools and what runs on them are gone.
resource "terraform_data" "deletion_protection" {
  input = var.cluster.deletion_protection
  provisioner "local-exec" {
    when    = destroy
    command = self.input ? "echo cluster.deletion_protection is true: apply with false before destroy && exit 1" : "exit 0"
  }
  depends_on = [
    module.platform,
    google_artifact_registry_repository_iam_member.nodes,
    google_compute_address.gateway,
    google_container_node_pool.scaled,
    google_dns_record_set.gateway,
    google_redis_instance.this,
    google_storage_bucket_iam_member.readers,
    terraform_data.fixed,
  ]
}
