output "namespace" {
  description = "Namespace of the platform. It exists when this output is known, so Secrets that pods name can be created in it before the pods."
  value       = var.namespace
  depends_on  = [helm_release.namespace]
}
