# One file, to which aws/, gcp/ and azure/ have links.

variable "name" {
  description = "Name of the cluster, and prefix of the names of all other resources."
  type        = string
  default     = "oriel"
  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{1,18}[a-z0-9]$", var.name)) && !strcontains(var.name, "--")
    error_message = "name: 3 to 20 small letters, digits and single dashes, beginning with a letter, not ending with a dash."
  }
}

variable "region" {
  description = "Region of all resources, as this cloud spells it: eu-central-1, europe-west4, westeurope."
  type        = string
  validation {
    condition     = can(regex("^[a-z][a-z0-9-]{2,30}$", var.region))
    error_message = "region: a region as the cloud spells it, such as eu-central-1, europe-west4 or westeurope."
  }
}

variable "network_cidr" {
  description = "IPv4 addresses of the network; nodes, pods and private endpoints get parts of this range."
  type        = string
  default     = "10.42.0.0/16"
  validation {
    condition     = can(cidrhost(var.network_cidr, 1)) && try(tonumber(split("/", var.network_cidr)[1]), 0) == 16
    error_message = "network_cidr: an IPv4 network of /16, such as 10.42.0.0/16."
  }
}

variable "cluster" {
  description = "The cluster. kubernetes_version: a minor version. api_access_cidrs: networks that may reach the Kubernetes API from the internet; with none it can only be reached from inside the network. deletion_protection: refuse to destroy it. extended_support: keep the version when its standard support ends, at the cloud's price. administrators: who administers it besides whoever applies first: ARNs of roles and users on AWS, user:NAME and group:NAME on Google Cloud, object IDs of users and groups on Azure. network: a network that is there (terraform/README.md, Into what is there). existing: a cluster in that network, by its name (Azure: resource ID), that gets Oriel's pools; kubernetes_version, extended_support and api_access_cidrs then do nothing to it."
  type = object({
    kubernetes_version  = optional(string, "1.35")
    api_access_cidrs    = optional(list(string), [])
    deletion_protection = optional(bool, true)
    extended_support    = optional(bool, false)
    administrators      = optional(list(string), [])
    network             = optional(object({ id = string, subnets = list(string), public_subnets = optional(list(string), []) }))
    existing            = optional(string)
  })
  default = {}
  validation {
    condition     = can(regex("^1\\.[0-9]{2}$", var.cluster.kubernetes_version))
    error_message = "cluster.kubernetes_version: a minor version, such as 1.35."
  }
  validation {
    condition     = alltrue([for cidr in var.cluster.api_access_cidrs : can(cidrhost(cidr, 0)) && cidr != "0.0.0.0/0"])
    error_message = "cluster.api_access_cidrs: IPv4 networks such as 203.0.113.7/32; never 0.0.0.0/0."
  }
  validation {
    condition     = var.cluster.existing == null || var.cluster.network != null
    error_message = "cluster.existing: name the network and the subnets of its nodes in cluster.network."
  }
}

variable "gpu_enabled" {
  description = "Whether there is a pool of GPU nodes."
  type        = bool
  default     = true
  nullable    = false
}

variable "scale_to_zero" {
  description = "Whether the CPU and GPU pools shrink to no node when nothing needs them. false: each pool always keeps one node."
  type        = bool
  default     = true
  nullable    = false
}

variable "cpu_pool" {
  description = "Nodes for logic servers and CPU inference. instance_type: null for a type with 4 CPUs and 16 GiB (terraform/README.md). One of ARM processors needs images for them. max_size: the largest number of nodes; 0 leaves them to Karpenter or auto-provisioning. spot_max_size: of a second pool of nodes that the cloud may take back. disk_gb: of each node."
  type = object({
    instance_type = optional(string)
    max_size      = optional(number, 10)
    spot_max_size = optional(number, 0)
    disk_gb       = optional(number, 100)
  })
  default = {}
  validation {
    condition     = alltrue([for size in [var.cpu_pool.max_size, var.cpu_pool.spot_max_size] : size >= 0 && size <= 1000]) && var.cpu_pool.disk_gb >= 30
    error_message = "cpu_pool: max_size and spot_max_size from 0 to 1000, disk_gb at least 30."
  }
}

variable "gpu_pool" {
  description = "Nodes with GPUs. instance_type: null for a type with 8 CPUs, one GPU and at least 32 GiB (terraform/README.md). gpus: of each node. max_size, spot_max_size, disk_gb: as in cpu_pool. node_selector: labels of GPU nodes that others make."
  type = object({
    instance_type = optional(string)
    gpus          = optional(number, 1)
    max_size      = optional(number, 4)
    spot_max_size = optional(number, 0)
    disk_gb       = optional(number, 200)
    node_selector = optional(map(string), { "oriel.dev/pool" = "gpu" })
  })
  default = {}
  validation {
    condition     = alltrue([for size in [var.gpu_pool.max_size, var.gpu_pool.spot_max_size] : size >= 0 && size <= 1000]) && var.gpu_pool.disk_gb >= 50 && contains([1, 2, 4, 8, 16], var.gpu_pool.gpus)
    error_message = "gpu_pool: max_size and spot_max_size from 0 to 1000, disk_gb at least 50, gpus 1, 2, 4, 8 or 16."
  }
  validation {
    condition     = alltrue([for group in values(try(var.platform.model_groups, {})) : try(group.gpus, 1) <= var.gpu_pool.gpus])
    error_message = "gpu_pool.gpus: a model group asks for more GPUs than a node has."
  }
  # Karpenter and auto-provisioning cannot imagine a node with the pods of a DaemonSet, which CPU pods then wait for.
  validation {
    condition     = min(var.cpu_pool.max_size, var.gpu_enabled ? var.gpu_pool.max_size : 1) > 0 || !try(var.platform.placement.share_gpu_nodes, true)
    error_message = "max_size = 0 leaves nodes to Karpenter or auto-provisioning, which needs platform.placement.share_gpu_nodes = false."
  }
  validation {
    condition     = var.gpu_pool.max_size == 0 || var.gpu_pool.node_selector == tomap({ "oriel.dev/pool" = "gpu" })
    error_message = "gpu_pool.node_selector: only for nodes that others make, with max_size = 0."
  }
}

variable "redis" {
  description = "The Redis through which gateways share limits. managed: use the cloud's Redis, encrypted and private; false for a small one in the cluster. size: of the cloud's Redis; null for the smallest one with a replica."
  type = object({
    managed = optional(bool, true)
    size    = optional(string)
  })
  default = {}
  validation {
    condition     = var.redis.managed || var.redis.size == null
    error_message = "redis.size counts for the managed Redis only."
  }
}

variable "dns" {
  description = "Public name of the gateway. zone: a DNS zone that already exists in this cloud. host: the full name in that zone. tls_secret: name of the Kubernetes Secret with the certificate (tls.crt, tls.key). null: the gateway has an address without a name."
  type = object({
    zone       = string
    host       = string
    tls_secret = optional(string)
  })
  default = null
  validation {
    condition     = var.dns == null || try(endswith(var.dns.host, ".${var.dns.zone}"), false)
    error_message = "dns.host has to end in .zone: host api.example.com in zone example.com."
  }
}

variable "deploy_platform" {
  description = "Whether to install Oriel. false: create only the infrastructure, so that images can be pushed to its registry first."
  type        = bool
  default     = true
  nullable    = false
}

variable "image_registry" {
  description = "Registry that the images are pulled from, such as registry.example.com/oriel. null: the registry that this root creates."
  type        = string
  default     = null
  validation {
    condition     = var.image_registry == null || can(regex("^[a-z0-9][a-zA-Z0-9.-]*(:[0-9]{1,5})?(/[a-zA-Z0-9][a-zA-Z0-9._-]*)*$", var.image_registry))
    error_message = "image_registry: host[:port][/path], without https:// and without a slash at the end."
  }
}

variable "image_tag" {
  description = "Tag of the images; the inference images add -cpu, -openvino, -gpu or -tensorrt."
  type        = string
  default     = "0.1.0"
  validation {
    condition     = can(regex("^[A-Za-z0-9_][A-Za-z0-9_.-]{0,100}$", var.image_tag)) && var.image_tag != "latest"
    error_message = "image_tag: a tag, and not latest: a rollback could not name what ran before."
  }
}

variable "tags" {
  description = "Tags of all resources that can have tags (labels on Google Cloud: lower-case letters, digits, - and _)."
  type        = map(string)
  default     = {}
  validation {
    condition     = alltrue([for key, value in var.tags : can(regex("^[a-z][a-z0-9_-]{0,62}$", key)) && can(regex("^[a-z0-9_-]{0,63}$", value))])
    error_message = "tags: small letters, digits, - and _, keys beginning with a letter: what all three clouds take."
  }
}
