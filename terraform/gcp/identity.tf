# Who may do what. The nodes: write logs and metrics, pull our images. Pods: by their Kubernetes service account itself
# (principal://), without a Google service account or a key between; the gateway reads policies/ of the bucket and inference
# models/, nobody writes.

locals {
  bucket_readers = { gateway = "policies", inference = "models" }
}

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
  for_each = local.bucket_readers

  bucket = google_storage_bucket.models.name
  role   = "roles/storage.objectViewer"
  member = join("/", [
    "principal://iam.googleapis.com/projects/${local.project_number}/locations/global/workloadIdentityPools",
    "${local.project}.svc.id.goog/subject/ns/${local.namespace}/sa/${each.key}",
  ])
  # A list is asked of the bucket, not of an object: what it may name is said by its prefix.
  condition {
    title = "${each.value}-only"
    expression = join(" || ", [
      "resource.name.startsWith('projects/_/buckets/${google_storage_bucket.models.name}/objects/${each.value}/')",
      "api.getAttribute('storage.googleapis.com/objectListPrefix', '').startsWith('${each.value}/')",
    ])
  }
  # The pool is made with the first cluster of the project that has workload identity.
  depends_on = [google_container_cluster.this]
}
