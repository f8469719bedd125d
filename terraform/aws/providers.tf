provider "aws" {
  region = var.region
  default_tags {
    tags = local.tags
  }
}

# A token from a command, for each call: one read at plan time would be stale before the nodes are there.
provider "helm" {
  kubernetes = {
    host                   = local.infrastructure.cluster_endpoint
    cluster_ca_certificate = local.infrastructure.cluster_ca_certificate
    exec                   = local.infrastructure.cluster_auth
  }
}
