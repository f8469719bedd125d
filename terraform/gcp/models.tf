# The model repository. Never public; older versions of an object are kept for 30 days.

resource "google_storage_bucket" "models" {
  name                        = "${var.name}-models-${local.suffix}"
  location                    = var.region
  storage_class               = "STANDARD"
  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"
  # Where destroy is allowed, it is allowed to take the models with it.
  force_destroy = !var.cluster.deletion_protection
  encryption {
    default_kms_key_name = google_kms_crypto_key.this["models"].id
  }
  versioning {
    enabled = true
  }
  lifecycle_rule {
    action {
      type = "Delete"
    }
    condition {
      days_since_noncurrent_time = 30
      with_state                 = "ARCHIVED"
    }
  }
  lifecycle_rule {
    action {
      type = "AbortIncompleteMultipartUpload"
    }
    condition {
      age = 7
    }
  }
  depends_on = [google_kms_crypto_key_iam_member.this]
}
