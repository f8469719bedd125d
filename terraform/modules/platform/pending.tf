# To be replaced: network.tf, scaling.tf and observability.tf define these. This file goes when they are there.
locals {
  otel_environment             = []
  network_objects              = []
  scaling_objects              = []
  scaling_custom_objects       = []
  observability_objects        = []
  observability_custom_objects = []
}
