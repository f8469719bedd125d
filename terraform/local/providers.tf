# As kubectl does it: the file's own user, be it a certificate, a token or a command.
provider "helm" {
  kubernetes = {
    config_path    = local.kubeconfig_path
    config_context = local.context_name
  }
}

provider "kubernetes" {
  config_path    = local.kubeconfig_path
  config_context = local.context_name
}
