output "objects" {
  description = "All Kubernetes objects, in the order of their installation: namespace and priority classes, then the platform."
  value       = concat(local.base_objects, local.objects)
}

output "custom_objects" {
  description = "The objects whose kinds are defined by a chart: ScaledObject, ServiceMonitor, PrometheusRule."
  value       = local.custom_objects
}

output "namespace" {
  description = "Namespace of the platform. It exists when this output is known, so Secrets that pods name can be created in it before the pods."
  value       = local.namespace
  depends_on  = [helm_release.base]
}
