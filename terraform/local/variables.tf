variable "kubeconfig_path" {
  description = "The kubeconfig file of the cluster."
  type        = string
  default     = "~/.kube/config"
  validation {
    condition     = fileexists(pathexpand(var.kubeconfig_path))
    error_message = "kubeconfig_path: there is no such file."
  }
}

variable "kube_context" {
  description = "Context in the kubeconfig file. null: the one that is current when this is applied."
  type        = string
  default     = null
  validation {
    condition     = var.kube_context == null ? true : length(var.kube_context) > 0
    error_message = "kube_context: a name of a context, or null for the current one."
  }
}

variable "model_repository_url" {
  description = "Object store with a folder per model group: s3://BUCKET/PREFIX, s3://https://HOST:PORT/BUCKET/PREFIX, gs://... or az://..."
  type        = string
  validation {
    condition     = can(regex("^(s3|gs|az|as)://[^/]", var.model_repository_url)) && !endswith(var.model_repository_url, "/")
    error_message = "model_repository_url: an s3://, gs:// or az:// URL, without a slash at the end."
  }
}

variable "image_registry" {
  description = "Where the images are pulled from, such as registry.example.com/oriel."
  type        = string
  validation {
    condition     = can(regex("^[a-z0-9][a-zA-Z0-9.-]*(:[0-9]{1,5})?(/[a-zA-Z0-9][a-zA-Z0-9._-]*)*$", var.image_registry))
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

variable "gpu_enabled" {
  description = "Whether the cluster has GPU nodes."
  type        = bool
  default     = false
  nullable    = false
}

variable "scale_to_zero" {
  description = "Whether a model group without calls is scaled to no pod (needs platform.keda.enabled)."
  type        = bool
  default     = false
  nullable    = false
}

variable "gpu_node_selector" {
  description = "Labels that only GPU nodes have: set by `kubectl label node NODE oriel.dev/pool=gpu`, or by NVIDIA's operator."
  type        = map(string)
  default     = { "oriel.dev/pool" = "gpu" }
  validation {
    condition     = length(var.gpu_node_selector) >= 1
    error_message = "gpu_node_selector: at least one label: without it GPU nodes could not be distinguished from others."
  }
}

variable "gpu_taint" {
  description = "Taint of the GPU nodes, as Kubernetes spells it. GPU pods also run on nodes without it, but other pods may then take their place."
  type        = object({ key = string, value = string, effect = string })
  default     = { key = "nvidia.com/gpu", value = "present", effect = "NoSchedule" }
  validation {
    condition     = contains(["NoSchedule", "PreferNoSchedule", "NoExecute"], var.gpu_taint.effect)
    error_message = "gpu_taint.effect: NoSchedule, PreferNoSchedule or NoExecute."
  }
}

variable "storage_class" {
  description = "StorageClass for volumes (`kubectl get storageclass`)."
  type        = string
  default     = "standard"
  validation {
    condition     = can(regex("^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$", var.storage_class))
    error_message = "storage_class: the name of a StorageClass."
  }
}

variable "redis" {
  description = "An existing Redis. url: redis://HOST:PORT or rediss://HOST:PORT; null for a small Redis in the cluster. auth_secret_ref: the Secret with its password, in the platform's namespace."
  type = object({
    url             = optional(string)
    auth_secret_ref = optional(object({ name = string, key = string }))
  })
  default = {}
  validation {
    condition     = var.redis.url == null ? var.redis.auth_secret_ref == null : can(regex("^rediss?://[^@/]+:[0-9]+$", var.redis.url))
    error_message = "redis.url: redis://HOST:PORT or rediss://HOST:PORT, without a password: that goes into a Secret, named by auth_secret_ref."
  }
}

variable "workload_identity" {
  description = "Access of pods to the object store without a key, if the cluster supports it: annotations of the service accounts gateway, logic and inference, and labels of their pods."
  type = object({
    service_account_annotations = optional(map(map(string)), {})
    pod_labels                  = optional(map(string), {})
  })
  default = {}
  validation {
    condition     = length(setsubtract(keys(var.workload_identity.service_account_annotations), ["gateway", "logic", "inference"])) == 0
    error_message = "workload_identity.service_account_annotations: only for gateway, logic and inference."
  }
}
