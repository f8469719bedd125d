# models/ holds the model repositories, a folder per group; policies/ may hold the gateway's documents.

locals {
  # Bucket names are global.
  models_bucket     = "${var.name}-models-${local.account}-${var.region}"
  models_bucket_arn = "arn:${local.partition}:s3:::${local.models_bucket}"
}

resource "aws_s3_bucket" "models" {
  bucket        = local.models_bucket
  force_destroy = !var.cluster.deletion_protection
}

resource "aws_s3_bucket_versioning" "models" {
  bucket = aws_s3_bucket.models.bucket
  versioning_configuration {
    status = "Enabled"
  }
}

resource "aws_s3_bucket_server_side_encryption_configuration" "models" {
  bucket = aws_s3_bucket.models.bucket
  rule {
    # One call to KMS per bucket and hour, not one per object read.
    bucket_key_enabled = true
    apply_server_side_encryption_by_default {
      sse_algorithm     = "aws:kms"
      kms_master_key_id = aws_kms_key.this["models"].arn
    }
  }
}

resource "aws_s3_bucket_ownership_controls" "models" {
  bucket = aws_s3_bucket.models.bucket
  rule {
    object_ownership = "BucketOwnerEnforced"
  }
}

resource "aws_s3_bucket_public_access_block" "models" {
  bucket                  = aws_s3_bucket.models.bucket
  block_public_acls       = true
  block_public_policy     = true
  ignore_public_acls      = true
  restrict_public_buckets = true
}

resource "aws_s3_bucket_policy" "models" {
  bucket = aws_s3_bucket.models.bucket
  policy = jsonencode({
    Version = "2012-10-17"
    Statement = [{
      Sid       = "OnlyTLS"
      Effect    = "Deny"
      Principal = "*"
      Action    = "s3:*"
      Resource  = [local.models_bucket_arn, "${local.models_bucket_arn}/*"]
      Condition = { Bool = { "aws:SecureTransport" = "false" } }
    }]
  })
  # S3 refuses two changes of a bucket's access at the same time.
  depends_on = [aws_s3_bucket_public_access_block.models]
}

# A replaced model can be taken back for three months; half an upload is not kept.
resource "aws_s3_bucket_lifecycle_configuration" "models" {
  bucket = aws_s3_bucket.models.bucket
  rule {
    id     = "leftovers"
    status = "Enabled"
    filter {
      prefix = ""
    }
    abort_incomplete_multipart_upload {
      days_after_initiation = 7
    }
    noncurrent_version_expiration {
      noncurrent_days = 90
    }
  }
  depends_on = [aws_s3_bucket_versioning.models]
}
