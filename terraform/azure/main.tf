# What everything else here is named and located by.

data "azurerm_client_config" "current" {}

# How many zones a region has; some have none.
data "azurerm_location" "this" {
  location = var.region
}

locals {
  # Storage accounts and registries are one namespace for all of Azure: small letters and digits, 24 at most.
  suffix      = substr(sha256("${data.azurerm_client_config.current.subscription_id}/${var.region}/${var.name}"), 0, 6)
  unique_name = "${substr(replace(var.name, "-", ""), 0, 18)}${local.suffix}"
  namespace   = try(var.platform.namespace, "oriel")
  zones       = terraform_data.zones[var.region].input
  tags        = merge({ managed-by = "terraform", part-of = var.name }, var.tags)
  # Networks from which people and pipelines come; none: everything is reached from inside the network only.
  private = length(var.cluster.api_access_cidrs) == 0

  infrastructure = {
    cloud        = "azure"
    cluster_name = local.aks.name
    # Of the kubeconfig only these two are taken: it holds no secret where local accounts are off.
    cluster_endpoint       = nonsensitive(local.aks.kube_config[0].host)
    cluster_ca_certificate = base64decode(nonsensitive(local.aks.kube_config[0].cluster_ca_certificate))
    cluster_auth = {
      api_version = "client.authentication.k8s.io/v1beta1"
      command     = "kubelogin"
      # The server is the same for every AKS cluster. AAD_LOGIN_METHOD names another way than the Azure CLI's.
      args = ["get-token", "--server-id", "6dae42f8-4368-4678-94ff-3960e28e3630", "--login", "azurecli", "--tenant-id", data.azurerm_client_config.current.tenant_id]
      env  = {}
    }
    registry_url          = azurerm_container_registry.images.login_server
    model_repository_url  = "az://${azurerm_storage_account.models.name}/${azurerm_storage_container.models.name}/models"
    redis_url             = var.redis.managed ? "rediss://${azurerm_managed_redis.this[0].hostname}:${azurerm_managed_redis.this[0].default_database[0].port}" : null
    redis_tls             = var.redis.managed
    store_networks        = [local.cidr.endpoints]
    redis_auth_secret_ref = var.redis.managed ? { name = "oriel-redis-auth", key = "password" } : null
    workload_identity = {
      service_account_annotations = {
        for unit, identity in azurerm_user_assigned_identity.units : unit => { "azure.workload.identity/client-id" = identity.client_id }
      }
      # Azure's webhook gives tokens to pods with this label only.
      pod_labels = { "azure.workload.identity/use" = "true" }
    }
    gpu_node_selector = var.gpu_pool.node_selector
    # Ours (nodes.tf): AKS puts none on GPU nodes.
    gpu_taint     = { key = "nvidia.com/gpu", value = "present", effect = "NoSchedule" }
    storage_class = "managed-csi"
  }
}

# As they were at the first apply in this region: the gateway's address, registry and node pools are made for their zones, and
# another list would make them anew.
resource "terraform_data" "zones" {
  for_each = toset([var.region])

  input = sort([for zone in data.azurerm_location.this.zone_mappings : zone.logical_zone])
  lifecycle {
    ignore_changes = [input]
  }
}

# What nothing can be changed in place: another value would make nearly everything anew. Kept as it was first applied.
locals {
  fixed = {
    cluster      = coalesce(var.cluster.existing, var.name)
    network      = try(var.cluster.network.id, "own")
    api          = local.private ? "private" : "public"
    name         = var.name
    network_cidr = var.network_cidr
    region       = var.region
    subscription = data.azurerm_client_config.current.subscription_id
    zones        = join(", ", local.zones)
  }
}

resource "azurerm_resource_group" "this" {
  name     = var.name
  location = var.region
  tags     = local.tags
}

# Azure has nothing that refuses `terraform destroy`: a lock made here would be the first thing it takes away. This is
# destroyed before anything it depends on, and fails while cluster.deletion_protection holds.
resource "terraform_data" "deletion_protection" {
  input = var.cluster.deletion_protection
  provisioner "local-exec" {
    when    = destroy
    command = self.input ? "echo cluster.deletion_protection is true: apply with false before destroy && exit 1" : "exit 0"
  }
  depends_on = [
    module.platform,
    azurerm_kubernetes_cluster_node_pool.scaled,
    azurerm_storage_container.models,
    azurerm_storage_container.policies,
    azurerm_storage_management_policy.models,
    azurerm_container_registry.images,
    azurerm_managed_redis.this,
    azurerm_private_endpoint.this,
    azurerm_dns_a_record.gateway,
    azurerm_federated_identity_credential.units,
    azurerm_role_assignment.models,
    azurerm_role_assignment.registry,
    azurerm_role_assignment.address,
    terraform_data.fixed,
  ]
}
