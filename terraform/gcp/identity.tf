# Who may do what. The nodes: write logs and metrics, pull our images. Pods: by their Kubernetes service account itself
# (principal://), without a Google service account or a key between; gateway and inference read the models, nobody writes.

resource "google_service_account" "nodes" {
  account_id   = "${var.name}-nodes"
  display_name = "Nodes of ${var.name}"
  depends_on   = [google_project_service.this]
}

resource "google_project_iam_member" "nodes" {
  project = local.project
  role    = "roles/container.defaultNodeServiceAccount"
  member  = google_service_account.nodes.member
}

resource "google_storage_bucket_iam_member" "readers" {
  for_each = toset(["gateway", "inference"])

  bucket = google_storage_bucket.models.name
  role   = "roles/storage.objectViewer"
  member = join("/", [
    "principal://iam.googleapis.com/projects/${local.project_number}/locations/global/workloadIdentityPools",
    "${local.project}.svc.id.goog/subject/ns/${local.namespace}/sa/${each.value}",
  ])
  # The pool is made with the first cluster of the project that has workload identity.
  depends_on = [google_container_cluster.this]
}
