# One file, to which all roots have links: what modules/platform takes as `infrastructure`.

output "cloud" {
  description = "Name of the cloud: aws, gcp, azure or local."
  value       = local.infrastructure.cloud

  # Any output would do: it stops a plan.
  precondition {
    condition     = length(local.platform_unknown) == 0
    error_message = "platform: no input of modules/platform is called ${join(", ", local.platform_unknown)}; its variables.tf has them all."
  }
}

output "cluster_name" {
  description = "Name of the cluster; local: of the context in the kubeconfig file."
  value       = local.infrastructure.cluster_name
}

output "cluster_endpoint" {
  description = "URL of the Kubernetes API: in the clouds private, unless cluster.api_access_cidrs names a network."
  value       = local.infrastructure.cluster_endpoint
}

output "cluster_ca_certificate" {
  description = "Certificate authority of the Kubernetes API, PEM."
  value       = local.infrastructure.cluster_ca_certificate
}

output "cluster_auth" {
  description = "Command that prints a token for the Kubernetes API, as kubeconfig's exec needs it; null: the kubeconfig file has none."
  value       = local.infrastructure.cluster_auth
}

output "registry_url" {
  description = "Registry of the images: REGISTRY_URL/oriel-gateway:TAG, oriel-logic, oriel-inference."
  value       = local.infrastructure.registry_url
}

output "model_repository_url" {
  description = "Object store that models are uploaded to, with a folder per model group."
  value       = local.infrastructure.model_repository_url
}

output "redis_url" {
  description = "Address of Redis, without its password; null: a small Redis runs in the cluster."
  value       = local.infrastructure.redis_url
}

output "redis_tls" {
  description = "Whether connections to Redis use TLS."
  value       = local.infrastructure.redis_tls
}

output "redis_auth_secret_ref" {
  description = "Kubernetes Secret, in the platform's namespace, with Redis's password; null: Redis needs none."
  value       = local.infrastructure.redis_auth_secret_ref
}

output "workload_identity" {
  description = "Annotations of service accounts and labels of pods that let pods read the object store without a key; none where the cloud knows pods by their service account."
  value       = local.infrastructure.workload_identity
}

output "gpu_node_selector" {
  description = "Labels of the GPU nodes."
  value       = local.infrastructure.gpu_node_selector
}

output "gpu_taint" {
  description = "Taint of the GPU nodes, as Kubernetes spells it."
  value       = local.infrastructure.gpu_taint
}

output "storage_class" {
  description = "StorageClass for volumes of pods."
  value       = local.infrastructure.storage_class
}
