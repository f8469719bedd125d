output "objects" {
  description = "Every Kubernetes object, in the order it is handed over: namespace and priority classes, then the platform."
  value       = concat(local.base_objects, local.objects)
}

output "custom_objects" {
  description = "The objects whose kinds come with a chart: ScaledObject, ServiceMonitor."
  value       = local.custom_objects
}

output "namespace" {
  description = "Where it runs. It is there when this is known: what its pods name, such as a Secret, is put into it meanwhile."
  value       = local.namespace
  depends_on  = [helm_release.base]
}
