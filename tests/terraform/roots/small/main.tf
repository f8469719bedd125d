# The smallest root that shows the harness: a network, a bucket, and a release of objects once they are there.
terraform {
  required_providers {
    aws  = { source = "hashicorp/aws" }
    helm = { source = "hashicorp/helm" }
  }
}

variable "region" {
  type    = string
  default = "eu-central-1"
}

variable "deploy_platform" {
  type    = bool
  default = true
}

variable "replicas" {
  type    = number
  default = 1
}

provider "aws" {
  region = var.region
}

provider "helm" {
  kubernetes = { host = "https://cluster.invalid" }
}

resource "aws_vpc" "main" {
  cidr_block = "10.42.0.0/16"
}

resource "aws_subnet" "private" {
  count      = 2
  vpc_id     = aws_vpc.main.id
  cidr_block = cidrsubnet(aws_vpc.main.cidr_block, 8, count.index)
}

resource "aws_s3_bucket" "models" {
  bucket = "models"
}

resource "helm_release" "platform" {
  count = var.deploy_platform ? 1 : 0
  name  = "platform"
  chart = "${path.module}/carrier"
  values = [jsonencode({ objects = [{
    apiVersion = "v1"
    kind       = "ConfigMap"
    metadata   = { name = "settings" }
    data       = { bucket = aws_s3_bucket.models.arn, replicas = tostring(var.replicas) }
  }] })]
}

output "vpc" {
  value = aws_vpc.main.id
}
