# The project and the credentials come from the environment: GOOGLE_PROJECT, `gcloud auth application-default login`.
provider "google" {
  region         = var.region
  default_labels = local.labels
}

provider "helm" {
  kubernetes = {
    host                   = local.infrastructure.cluster_endpoint
    cluster_ca_certificate = local.infrastructure.cluster_ca_certificate
    exec                   = local.infrastructure.cluster_auth
  }
}
