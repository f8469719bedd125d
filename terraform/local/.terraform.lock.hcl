# The versions with which the roots are tested. `terraform init` adds the checksums of your platform; commit them with
# your copy.

provider "registry.terraform.io/hashicorp/helm" {
  version     = "3.1.1"
  constraints = "~> 3.1"
}

provider "registry.terraform.io/hashicorp/kubernetes" {
  version     = "2.38.0"
  constraints = ">= 2.38.0, < 3.0.0"
}
