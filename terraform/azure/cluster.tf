# AKS: private unless api_access_cidrs, Entra ID for people (no local accounts), workload identity for pods, Cilium for
# NetworkPolicies. Its scaling pools are in nodes.tf. etcd and disks are encrypted by Azure with its own keys.

# A cluster that is there gets our pools, and keeps its own settings.
data "azurerm_kubernetes_cluster" "existing" {
  count = local.own_cluster ? 0 : 1

  resource_group_name = split("/", var.cluster.existing)[4]
  name                = split("/", var.cluster.existing)[8]
  lifecycle {
    postcondition {
      condition     = self.oidc_issuer_enabled
      error_message = "cluster.existing: ${self.name} needs an OIDC issuer and workload identity: by them pods read the models."
    }
    postcondition {
      condition     = try(length(self.network_profile[0].network_policy) > 0, false)
      error_message = "cluster.existing: ${self.name} enforces no network policies; it needs Cilium, Calico or Azure's."
    }
    postcondition {
      condition     = tonumber(split(".", self.kubernetes_version)[1]) >= 30
      error_message = "cluster.existing: ${self.name} has Kubernetes ${self.kubernetes_version}; 1.30 or newer is needed."
    }
    postcondition {
      condition     = var.dns == null || try(length(self.identity[0].principal_id) > 0, false)
      error_message = "dns: ${self.name} has no system-assigned identity that could be allowed to use the gateway's address."
    }
  }
}

locals {
  own_cluster       = var.cluster.existing == null
  aks               = try(azurerm_kubernetes_cluster.this[0], data.azurerm_kubernetes_cluster.existing[0])
  cluster_principal = try(azurerm_user_assigned_identity.cluster[0].principal_id, data.azurerm_kubernetes_cluster.existing[0].identity[0].principal_id)
}

resource "azurerm_kubernetes_cluster" "this" {
  count = local.own_cluster ? 1 : 0

  name                = var.name
  resource_group_name = azurerm_resource_group.this.name
  location            = azurerm_resource_group.this.location
  node_resource_group = "${var.name}-nodes"
  dns_prefix          = var.name
  kubernetes_version  = var.cluster.kubernetes_version
  # Free promises nothing for the API server; support of old versions comes with Premium only.
  sku_tier     = var.cluster.extended_support ? "Premium" : "Standard"
  support_plan = var.cluster.extended_support ? "AKSLongTermSupport" : null
  tags         = local.tags

  # From private to public and back makes a new cluster (README.md).
  private_cluster_enabled             = local.private
  private_dns_zone_id                 = local.private ? "System" : null
  private_cluster_public_fqdn_enabled = false
  run_command_enabled                 = false
  dynamic "api_server_access_profile" {
    for_each = local.private ? [] : [concat(var.cluster.api_access_cidrs, [for address in azurerm_public_ip.nat[*].ip_address : "${address}/32"])]
    content {
      # The nodes come by the NAT gateway, and AKS does not let them in by itself.
      authorized_ip_ranges = api_server_access_profile.value
    }
  }

  local_account_disabled            = true
  role_based_access_control_enabled = true
  azure_active_directory_role_based_access_control {
    azure_rbac_enabled = true
    tenant_id          = data.azurerm_client_config.current.tenant_id
  }
  oidc_issuer_enabled       = true
  workload_identity_enabled = true
  identity {
    type         = "UserAssigned"
    identity_ids = [azurerm_user_assigned_identity.cluster[0].id]
  }
  kubelet_identity {
    client_id                 = azurerm_user_assigned_identity.nodes[0].client_id
    object_id                 = azurerm_user_assigned_identity.nodes[0].principal_id
    user_assigned_identity_id = azurerm_user_assigned_identity.nodes[0].id
  }

  automatic_upgrade_channel = "patch"
  node_os_upgrade_channel   = "NodeImage"
  maintenance_window_auto_upgrade {
    frequency   = "Weekly"
    interval    = 1
    duration    = 6
    day_of_week = "Saturday"
    start_time  = "02:00"
    utc_offset  = "+00:00"
  }
  maintenance_window_node_os {
    frequency   = "Weekly"
    interval    = 1
    duration    = 6
    day_of_week = "Sunday"
    start_time  = "02:00"
    utc_offset  = "+00:00"
  }

  network_profile {
    network_plugin      = "azure"
    network_plugin_mode = "overlay"
    network_data_plane  = "cilium"
    network_policy      = "cilium"
    load_balancer_sku   = "standard"
    outbound_type       = try(length(data.azurerm_subnet.existing["0"].route_table_id) > 0, false) ? "userDefinedRouting" : "userAssignedNATGateway"
    pod_cidr            = local.cidr.pods
    service_cidr        = local.cidr.services
    dns_service_ip      = cidrhost(local.cidr.services, 10)
  }

  storage_profile {
    disk_driver_enabled         = true
    file_driver_enabled         = false
    blob_driver_enabled         = false
    snapshot_controller_enabled = false
  }

  auto_scaler_profile {
    expander                   = "least-waste"
    scale_down_unneeded        = "5m"
    scale_down_delay_after_add = "5m"
    # Pods have scratch directories, and cluster services move: neither may keep an empty node.
    skip_nodes_with_local_storage = false
    skip_nodes_with_system_pods   = false
  }

  # For what must always run. Without the taint of critical add-ons: the gateway runs here too.
  default_node_pool {
    name                        = "system"
    temporary_name_for_rotation = "systemtmp"
    vm_size                     = "Standard_D4s_v5"
    node_count                  = 2
    zones                       = length(local.zones) == 0 ? null : local.zones
    vnet_subnet_id              = local.nodes_subnet
    orchestrator_version        = var.cluster.kubernetes_version
    os_sku                      = "Ubuntu"
    os_disk_type                = "Managed"
    os_disk_size_gb             = 64
    node_labels                 = { "oriel.dev/pool" = "system" }
    tags                        = local.tags
    upgrade_settings {
      max_surge                = "1"
      drain_timeout_in_minutes = 30
    }
  }

  lifecycle {
    precondition {
      condition     = 2 + sum(concat([0], values(local.pools)[*].max)) < local.max_nodes
      error_message = "network_cidr has pod addresses for ${local.max_nodes} nodes: make the sizes of cpu_pool and gpu_pool smaller."
    }
  }

  depends_on = [
    azurerm_role_assignment.network,
    azurerm_role_assignment.subnet,
    azurerm_role_assignment.nodes,
    # Given long before the first release needs it: a role on the cluster itself would take minutes to count.
    azurerm_role_assignment.operator,
    azurerm_nat_gateway_public_ip_association.this,
    azurerm_subnet_nat_gateway_association.nodes,
  ]
}
