# The same platform on a cluster that is there: kind, k3s, a rack, or a cloud of one's own. Makes nothing but what runs in
# it, and gives the same fourteen outputs as the clouds' roots.

locals {
  kubeconfig_path = pathexpand(var.kubeconfig_path)
  kubeconfig      = yamldecode(file(local.kubeconfig_path))
  context_name    = coalesce(var.kube_context, try(local.kubeconfig["current-context"], ""), "none is named")
  contexts        = { for each in local.kubeconfig.contexts : each.name => each.context }
  context         = try(local.contexts[local.context_name], { cluster = "", user = "" })
  cluster         = try({ for each in local.kubeconfig.clusters : each.name => each.cluster }[local.context.cluster], {})
  user            = try({ for each in local.kubeconfig.users : each.name => each.user }[local.context.user], {})

  # Beside the file, if it is relative.
  certificate_file = try(
    startswith(local.cluster["certificate-authority"], "/") ? local.cluster["certificate-authority"] :
    "${dirname(local.kubeconfig_path)}/${local.cluster["certificate-authority"]}", null
  )

  infrastructure = {
    cloud                  = "local"
    cluster_name           = local.context_name
    cluster_endpoint       = try(local.cluster.server, "")
    cluster_ca_certificate = try(base64decode(local.cluster["certificate-authority-data"]), file(local.certificate_file), "")
    # Only where the file names a command; a certificate or token stays in the file.
    cluster_auth = try({
      api_version = local.user.exec.apiVersion
      command     = local.user.exec.command
      args        = try([for each in local.user.exec.args : tostring(each)], [])
      env         = try({ for each in local.user.exec.env : each.name => each.value }, {})
    }, null)
    registry_url          = var.image_registry
    model_repository_url  = var.model_repository_url
    redis_url             = var.redis.url
    redis_tls             = startswith(coalesce(var.redis.url, "none"), "rediss://")
    redis_auth_secret_ref = var.redis.auth_secret_ref
    workload_identity     = var.workload_identity
    gpu_node_selector     = var.gpu_node_selector
    gpu_taint             = var.gpu_taint
    storage_class         = var.storage_class
  }
}

# Asked when planning, so that a wrong file, context or cluster shows before anything is changed.
data "kubernetes_server_version" "this" {
  lifecycle {
    precondition {
      condition     = contains(keys(local.contexts), local.context_name)
      error_message = "kube_context: ${local.context_name}; the file has ${join(", ", keys(local.contexts))}."
    }
    # preStop's own `sleep`, on by default from then on: the images have no shell to do it with.
    postcondition {
      condition     = try(tonumber(split(".", self.version)[0]) == 1 && tonumber(split(".", self.version)[1]) >= 30, false)
      error_message = "Kubernetes 1.30 or newer is needed; this cluster has ${self.version}."
    }
  }
}

# KEDA answers for the Kubernetes API of external metrics, which has one owner in a cluster.
data "kubernetes_resources" "external_metrics" {
  count          = try(var.platform.keda.enabled, false) ? 1 : 0
  api_version    = "apiregistration.k8s.io/v1"
  kind           = "APIService"
  field_selector = "metadata.name=v1beta1.external.metrics.k8s.io"

  lifecycle {
    postcondition {
      condition     = alltrue([for each in self.objects : startswith(each.spec.service.name, "keda-") && each.spec.service.namespace == try(var.platform.keda.namespace, "keda")])
      error_message = "platform.keda: the API of external metrics, which KEDA needs, belongs to ${join(", ", [for each in self.objects : "${each.spec.service.namespace}/${each.spec.service.name}"])}, and a cluster has one owner of it. If that is a KEDA, set keda = { enabled = true, install = false, namespace = its namespace }; another adapter of metrics has to give it up, or do without keda.enabled."
    }
    postcondition {
      condition     = length(self.objects) > 0 || try(var.platform.keda.install, true)
      error_message = "platform.keda: install is false, and this cluster has no KEDA: nothing answers for the API of external metrics."
    }
    postcondition {
      condition     = !try(var.platform.keda.install, true) || alltrue([for each in self.objects : try(each.metadata.annotations["meta.helm.sh/release-name"] == "keda", false)])
      error_message = "platform.keda: this cluster has a KEDA that was not installed from here: set keda = { enabled = true, install = false }."
    }
  }
}
