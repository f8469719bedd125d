resource "aws_ecr_repository" "image" {
  for_each = toset(["oriel-gateway", "oriel-logic", "oriel-inference"])

  name = "${var.name}/${each.key}"
  # A rollback has to find under a tag what ran under it.
  image_tag_mutability = "IMMUTABLE"
  force_delete         = !var.cluster.deletion_protection

  image_scanning_configuration {
    scan_on_push = true
  }

  encryption_configuration {
    encryption_type = "KMS"
    kms_key         = aws_kms_key.this["cluster"].arn
  }
}

# What has a tag is kept: it may run, or be rolled back to.
resource "aws_ecr_lifecycle_policy" "untagged" {
  for_each = aws_ecr_repository.image

  repository = each.value.name
  policy = jsonencode({
    rules = [{
      rulePriority = 1
      description  = "Layers without a tag, after two weeks"
      selection    = { tagStatus = "untagged", countType = "sinceImagePushed", countUnit = "days", countNumber = 14 }
      action       = { type = "expire" }
    }]
  })
}
