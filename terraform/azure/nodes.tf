# cpu and gpu, and cpuspot and gpuspot of machines that Azure may take back: from no node to max_size. AKS installs the GPU's driver, but neither taints GPU nodes nor runs the device
# plugin: the taint is here, the plugin in modules/platform.

locals {
  # The smallest with 8 CPUs and a whole GPU. It has 56 GiB.
  gpu_type = coalesce(var.gpu_pool.instance_type, "Standard_NC8as_T4_v3")
  scaled_pools = merge({
    cpu = { type = coalesce(var.cpu_pool.instance_type, "Standard_D4s_v5"), given = var.cpu_pool, taints = [], zones = local.zones }
    }, var.gpu_enabled ? {
    # Few zones have GPUs, and which is different in each subscription: Azure chooses.
    gpu = { type = local.gpu_type, given = var.gpu_pool, taints = ["nvidia.com/gpu=present:NoSchedule"], zones = [] }
  } : {})
  pools = merge(
    { for name, pool in local.scaled_pools : name => merge(pool, { of = name, spot = false, least = var.scale_to_zero ? 0 : 1, max = pool.given.max_size, labels = {} }) if pool.given.max_size > 0 },
    # Only what tolerates to lose its node runs there: floors stay on demand. AKS adds its own label and taint, which the
    # provider wants written out.
    { for name, pool in local.scaled_pools : "${name}spot" => merge(pool, {
      of     = name
      spot   = true
      least  = 0
      max    = pool.given.spot_max_size
      taints = concat(pool.taints, ["oriel.dev/spot=true:NoSchedule", "kubernetes.azure.com/scalesetpriority=spot:NoSchedule"])
      labels = { "oriel.dev/spot" = "true", "kubernetes.azure.com/scalesetpriority" = "spot" }
    }) if pool.given.spot_max_size > 0 },
  )
}

resource "azurerm_kubernetes_cluster_node_pool" "scaled" {
  for_each = local.pools

  name                        = each.key
  temporary_name_for_rotation = "${each.key}tmp"
  kubernetes_cluster_id       = local.aks.id
  mode                        = "User"
  vm_size                     = each.value.type
  gpu_driver                  = each.value.of == "gpu" ? "Install" : null
  orchestrator_version        = local.own_cluster ? var.cluster.kubernetes_version : local.aks.kubernetes_version
  vnet_subnet_id              = local.nodes_subnet
  zones                       = length(each.value.zones) == 0 ? null : each.value.zones
  os_sku                      = "Ubuntu"
  # Not on the machine's own disk, which Azure does not encrypt unless the subscription has asked for it.
  os_disk_type         = "Managed"
  os_disk_size_gb      = each.value.given.disk_gb
  auto_scaling_enabled = true
  min_count            = each.value.least
  max_count            = each.value.max
  node_count           = each.value.least
  # These nodes come and go, and a load balancer's connections through one would end with it: it sends to the system pool
  # alone, whose kube-proxy passes calls on to gateways wherever they are. Nodes go out by the NAT gateway, not by it.
  node_labels = merge(each.value.labels, {
    "oriel.dev/pool"                                          = each.value.of
    "node.kubernetes.io/exclude-from-external-load-balancers" = "true"
  })
  node_taints = each.value.taints
  tags        = local.tags

  priority        = each.value.spot ? "Spot" : null
  eviction_policy = each.value.spot ? "Delete" : null

  # Spot nodes have none: AKS upgrades them without a surge.
  dynamic "upgrade_settings" {
    for_each = each.value.spot ? [] : [each.value.of]
    content {
      # One more GPU node than max_size is what a quota most often refuses: GPU nodes are replaced one by one instead. The
      # provider takes one of the two, and asks for a surge of "0" itself where max_unavailable is given.
      max_surge                = upgrade_settings.value == "gpu" ? null : "1"
      max_unavailable          = upgrade_settings.value == "gpu" ? "1" : null
      drain_timeout_in_minutes = 30
    }
  }

  lifecycle {
    # The autoscaler's.
    ignore_changes = [node_count]
  }
}
