# Keys of our own, one for each use: Kubernetes secrets in etcd, the nodes' disks, the models. Each may be used by one of
# Google's service agents and by nobody else.

# Google never deletes a key ring, not even on destroy: the next apply needs another name.
resource "terraform_data" "keys_made" {
  input = formatdate("YYYYMMDDhhmmss", plantimestamp())
  lifecycle {
    ignore_changes = [input]
  }
}

# Reading it is what makes this service agent exist. Without depends_on: it would be read again, and its key given anew,
# whenever an API is added.
data "google_storage_project_service_account" "this" {}

locals {
  keys = { for use, agent in {
    secrets = "serviceAccount:service-${local.project_number}@container-engine-robot.iam.gserviceaccount.com"
    disks   = "serviceAccount:service-${local.project_number}@compute-system.iam.gserviceaccount.com"
    models  = data.google_storage_project_service_account.this.member
  } : use => agent if use != "secrets" || local.own_cluster }
}

resource "google_kms_key_ring" "this" {
  name       = "${var.name}-${terraform_data.keys_made.output}"
  location   = var.region
  depends_on = [google_project_service.this]
}

resource "google_kms_crypto_key" "this" {
  for_each = local.keys

  name            = each.key
  key_ring        = google_kms_key_ring.this.id
  rotation_period = "7776000s"
}

resource "google_kms_crypto_key_iam_member" "this" {
  for_each = local.keys

  crypto_key_id = google_kms_crypto_key.this[each.key].id
  role          = "roles/cloudkms.cryptoKeyEncrypterDecrypter"
  member        = each.value
  # GKE's and Compute Engine's agents are made when their APIs are enabled.
  depends_on = [google_project_service.this]
}
