# The project and the credentials come from the environment: GOOGLE_PROJECT, `gcloud auth application-default login`.
provider "google" {
  region         = var.region
  default_labels = local.labels
}
