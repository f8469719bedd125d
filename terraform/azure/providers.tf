# The subscription and the credentials come from the environment: ARM_SUBSCRIPTION_ID, `az login`.
provider "azurerm" {
  # The storage account takes no keys.
  storage_use_azuread             = true
  resource_provider_registrations = "none"
  resource_providers_to_register = [
    "Microsoft.Cache",
    "Microsoft.Compute",
    "Microsoft.ContainerRegistry",
    "Microsoft.ContainerService",
    "Microsoft.ManagedIdentity",
    "Microsoft.Network",
    "Microsoft.Storage",
  ]
  features {
    storage {
      # It cannot be reached from where this runs, only from inside the network; what is set here goes through Azure's own API.
      data_plane_available = false
    }
  }
}
