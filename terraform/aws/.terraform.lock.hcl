# The versions with which the roots are tested. `terraform init` adds the checksums of your platform; commit them with
# your copy.

provider "registry.terraform.io/hashicorp/aws" {
  version     = "6.25.0"
  constraints = ">= 6.9.0, < 7.0.0"
}

provider "registry.terraform.io/hashicorp/helm" {
  version     = "3.1.1"
  constraints = "~> 3.1"
}
