# cpu and gpu: from no node to max_size. AKS installs the GPU's driver, but neither taints GPU nodes nor runs the device
# plugin: the taint is here, the plugin in modules/platform.

locals {
  # The smallest with 8 CPUs and a whole GPU. It has 56 GiB.
  gpu_type = coalesce(var.gpu_pool.instance_type, "Standard_NC8as_T4_v3")
  pools = merge({
    cpu = {
      type   = coalesce(var.cpu_pool.instance_type, "Standard_D4s_v5")
      pool   = var.cpu_pool
      taints = []
      zones  = local.zones
    }
    }, var.gpu_enabled ? {
    gpu = {
      type   = local.gpu_type
      pool   = var.gpu_pool
      taints = ["nvidia.com/gpu=present:NoSchedule"]
      # Few zones have GPUs, and which is different in each subscription: Azure chooses.
      zones = []
    }
  } : {})
  least = var.scale_to_zero ? 0 : 1
}

resource "azurerm_kubernetes_cluster_node_pool" "scaled" {
  for_each = local.pools

  name                        = each.key
  temporary_name_for_rotation = "${each.key}tmp"
  kubernetes_cluster_id       = azurerm_kubernetes_cluster.this.id
  mode                        = "User"
  vm_size                     = each.value.type
  gpu_driver                  = each.key == "gpu" ? "Install" : null
  orchestrator_version        = var.cluster.kubernetes_version
  vnet_subnet_id              = azurerm_subnet.nodes.id
  zones                       = length(each.value.zones) == 0 ? null : each.value.zones
  os_sku                      = "Ubuntu"
  # Not on the machine's own disk, which Azure does not encrypt unless the subscription has asked for it.
  os_disk_type         = "Managed"
  os_disk_size_gb      = each.value.pool.disk_gb
  auto_scaling_enabled = true
  min_count            = local.least
  max_count            = each.value.pool.max_size
  node_count           = local.least
  # These nodes come and go, and a load balancer's connections through one would end with it: it sends to the system pool
  # alone, whose kube-proxy passes calls on to gateways wherever they are. Nodes go out by the NAT gateway, not by it.
  node_labels = {
    "oriel.dev/pool"                                          = each.key
    "node.kubernetes.io/exclude-from-external-load-balancers" = "true"
  }
  node_taints = each.value.taints
  tags        = local.tags

  upgrade_settings {
    # One more GPU node than max_size is what a quota most often refuses: GPU nodes are replaced one by one instead. The
    # provider takes one of the two, and asks for a surge of "0" itself where max_unavailable is given.
    max_surge                = each.key == "gpu" ? null : "1"
    max_unavailable          = each.key == "gpu" ? "1" : null
    drain_timeout_in_minutes = 30
  }

  lifecycle {
    # The autoscaler's.
    ignore_changes = [node_count]
  }
}
