# The same outputs in aws/, gcp/, azure/ and local/: what modules/platform takes.

output "cloud" {
  description = "Which cloud this is: azure."
  value       = local.infrastructure.cloud

  # Any output would do: it stops a plan.
  precondition {
    condition     = length(local.platform_unknown) == 0
    error_message = "platform: no input of modules/platform is called ${join(", ", local.platform_unknown)}; its variables.tf has them all."
  }
}

output "cluster_name" {
  description = "Name of the cluster."
  value       = local.infrastructure.cluster_name
}

output "cluster_endpoint" {
  description = "Address of its API: private, unless cluster.api_access_cidrs names a network."
  value       = local.infrastructure.cluster_endpoint
}

output "cluster_ca_certificate" {
  description = "PEM of the certificate that signs for its API."
  value       = local.infrastructure.cluster_ca_certificate
}

output "cluster_auth" {
  description = "Command that prints a token for its API, as Kubernetes' exec plugins do: for helm, kubectl and terraform."
  value       = local.infrastructure.cluster_auth
}

output "registry_url" {
  description = "Registry that this makes: images are pushed to registry_url/oriel-gateway:TAG and so on."
  value       = local.infrastructure.registry_url
}

output "model_repository_url" {
  description = "Where models are uploaded to, one folder each; what the model servers read."
  value       = local.infrastructure.model_repository_url
}

output "redis_url" {
  description = "Managed Redis without its password; null: the platform runs a small one."
  value       = local.infrastructure.redis_url
}

output "redis_tls" {
  description = "Whether the managed Redis is reached by TLS."
  value       = local.infrastructure.redis_tls
}

output "redis_auth_secret_ref" {
  description = "Kubernetes Secret, in the platform's namespace, that holds Redis's password; null: it has none."
  value       = local.infrastructure.redis_auth_secret_ref
}

output "workload_identity" {
  description = "What the pods of a unit carry to act in this cloud without a key."
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
  description = "Storage class for disks of pods."
  value       = local.infrastructure.storage_class
}
