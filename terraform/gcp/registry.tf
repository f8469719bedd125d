resource "google_artifact_registry_repository" "images" {
  repository_id = var.name
  location      = var.region
  format        = "DOCKER"
  description   = "Images of ${var.name}"
  docker_config {
    # What a rollback names has to be what ran.
    immutable_tags = true
  }
  depends_on = [google_project_service.this]
}

locals {
  registry_url = "${var.region}-docker.pkg.dev/${local.project}/${google_artifact_registry_repository.images.repository_id}"
}

resource "google_artifact_registry_repository_iam_member" "nodes" {
  repository = google_artifact_registry_repository.images.name
  location   = var.region
  role       = "roles/artifactregistry.reader"
  member     = google_service_account.nodes.member
}
