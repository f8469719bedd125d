variable "infrastructure" {
  description = "All outputs of terraform/aws, gcp, azure or local, unchanged. The module knows nothing else about the cloud."
  type = object({
    cloud                  = string
    cluster_name           = string
    cluster_endpoint       = string
    cluster_ca_certificate = string
    # How helm gets a token: a command that prints one.
    cluster_auth = object({
      api_version = string
      command     = string
      args        = list(string)
      env         = optional(map(string), {})
    })
    registry_url         = string
    model_repository_url = string
    # redis://HOST:PORT or rediss://HOST:PORT, without a password. null: a small Redis runs in the cluster.
    redis_url = optional(string)
    redis_tls = bool
    # The Kubernetes Secret, in the platform's namespace, that holds Redis's password. null: Redis needs no password.
    redis_auth_secret_ref = optional(object({ name = string, key = string }))
    # What lets the pods of a unit (gateway, logic, inference) act in the cloud without a key.
    workload_identity = object({
      service_account_annotations = optional(map(map(string)), {})
      pod_labels                  = optional(map(string), {})
    })
    # Private networks with object stores of this cloud.
    store_networks    = optional(list(string), [])
    gpu_node_selector = map(string)
    # The effect as Kubernetes spells it: NoSchedule, PreferNoSchedule, NoExecute.
    gpu_taint     = object({ key = string, value = string, effect = string })
    storage_class = string
    # How the platform is to make that StorageClass. null: it is there.
    storage = optional(object({ provisioner = string, parameters = optional(map(string), {}) }))
    # Secrets that the platform is to make, such as that of Redis: name -> key -> text.
    secrets = optional(map(map(string)), {})
  })
  validation {
    condition     = contains(["NoSchedule", "PreferNoSchedule", "NoExecute"], var.infrastructure.gpu_taint.effect)
    error_message = "infrastructure.gpu_taint.effect: NoSchedule, PreferNoSchedule or NoExecute, as Kubernetes spells it."
  }
  validation {
    condition     = var.infrastructure.redis_url == null ? true : can(regex("^rediss?://[^/@]+$", var.infrastructure.redis_url)) && !can(regex(local.no_port, var.infrastructure.redis_url))
    error_message = "infrastructure.redis_url: redis://HOST:PORT or rediss://HOST:PORT; a password never stands in it."
  }
  validation {
    condition     = !can(regex(local.no_port, var.infrastructure.model_repository_url))
    error_message = "infrastructure.model_repository_url: its port is from 1 to 65535."
  }
  validation {
    condition     = alltrue([for name in keys(var.infrastructure.workload_identity.pod_labels) : !can(regex(local.own_labels, name))])
    error_message = "infrastructure.workload_identity.pod_labels: a label that the platform sets itself."
  }
  # Redis takes a password from its arguments or from a file in its own format, neither of which a Secret's key is.
  validation {
    condition     = var.infrastructure.redis_url != null || var.infrastructure.redis_auth_secret_ref == null
    error_message = "infrastructure.redis_auth_secret_ref belongs to the Redis at redis_url; the Redis in the cluster has a password that is made."
  }
}

variable "namespace" {
  description = "Kubernetes namespace for everything but KEDA, the device plugin and metrics. It is created with the pod security level restricted; an existing one is taken over. Use it for nothing else."
  type        = string
  default     = "oriel"
  nullable    = false
  validation {
    condition     = can(regex("^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$", var.namespace)) && !startswith(var.namespace, "kube-") && var.namespace != "default"
    error_message = "namespace: 1 to 40 small letters, digits and dashes, beginning with a letter, not with kube-, and not default: it is taken over."
  }
}

variable "store_networks" {
  description = "Private networks in which object stores, issuers of tokens and collectors lie that pods may reach, such as 10.1.2.0/24; public ones are reached anyway. null: none in a cloud, all private ones elsewhere."
  type        = list(string)
  default     = null
  validation {
    condition     = alltrue([for cidr in coalesce(var.store_networks, []) : can(cidrhost(cidr, 0))])
    error_message = "store_networks: networks such as 10.1.2.0/24."
  }
}

variable "images" {
  description = "The images. registry: holds oriel-gateway, oriel-logic and oriel-inference. tag: of all of them. digests: of gateway, logic, inference-cpu and so on, as sha256:..., which then decide in place of the tag. pull_policy: when nodes pull. pull_secret: name of the Secret with the registry's password, if nodes need one."
  type = object({
    registry    = string
    tag         = string
    digests     = optional(map(string), {})
    pull_policy = optional(string, "IfNotPresent")
    pull_secret = optional(string)
  })
  validation {
    condition     = can(regex("^[a-z0-9][a-zA-Z0-9.-]*(:[0-9]{1,5})?(/[a-zA-Z0-9][a-zA-Z0-9._-]*)*$", var.images.registry)) && !can(regex(local.no_port, var.images.registry))
    error_message = "images.registry: host[:port][/path], without https:// and without a slash at the end."
  }
  validation {
    condition     = can(regex("^[A-Za-z0-9_][A-Za-z0-9_.-]{0,100}$", var.images.tag)) && var.images.tag != "latest"
    error_message = "images.tag: a tag, and not latest: a rollback could not name what ran before."
  }
  validation {
    condition     = alltrue([for unit, digest in var.images.digests : can(regex("^(gateway|logic|inference-(cpu|openvino|gpu|tensorrt))=sha256:[0-9a-f]{64}$", "${unit}=${digest}"))])
    error_message = "images.digests: gateway, logic, inference-cpu, inference-openvino, inference-gpu or inference-tensorrt = sha256:... of 64 digits."
  }
  validation {
    condition     = contains(["Always", "IfNotPresent", "Never"], var.images.pull_policy)
    error_message = "images.pull_policy: Always, IfNotPresent or Never."
  }
  validation {
    condition     = var.images.pull_secret == null || can(regex("^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$", var.images.pull_secret))
    error_message = "images.pull_secret: the name of a Kubernetes Secret."
  }
}

variable "gateway" {
  description = "The gateway. service_type, service_annotations, load_balancer_ip, load_balancer_class, source_ranges: settings of its Service, the only public one. tls_secret: name of the Secret with tls.crt and tls.key. plain_http: API keys may come over plain HTTP from everywhere, which a plan warns of otherwise. admin_token_secret_ref: Secret with the token of the admin pages; null for one that is made, in the Secret oriel-keys. ticket_keys_secret_ref: Secret with the keys for the tickets of model calls (docs/scaling.md), to replace them step by step; null for one that is made. credentials: name of the Secret whose environment variables open policies.store, if workload identity does not. cpu in cores, memory in GiB. args: further flags of `oriel gateway`."
  type = object({
    replicas               = optional(object({ min = optional(number, 2), max = optional(number, 10) }), {})
    cpu                    = optional(number, 0.5)
    memory                 = optional(number, 1)
    service_type           = optional(string, "LoadBalancer")
    service_annotations    = optional(map(string), {})
    load_balancer_ip       = optional(string)
    load_balancer_class    = optional(string)
    source_ranges          = optional(list(string), [])
    tls_secret             = optional(string)
    plain_http             = optional(bool, false)
    admin_token_secret_ref = optional(object({ name = string, key = string }))
    ticket_keys_secret_ref = optional(object({ name = string, key = string }))
    credentials            = optional(string)
    args                   = optional(list(string), [])
  })
  default  = {}
  nullable = false
  validation {
    condition     = var.gateway.replicas.min >= 1 && var.gateway.replicas.max >= var.gateway.replicas.min && var.gateway.replicas.max <= 200 && alltrue([for count in values(var.gateway.replicas) : floor(count) == count])
    error_message = "gateway.replicas: whole numbers, 1 <= min <= max <= 200."
  }
  validation {
    condition     = var.gateway.cpu > 0 && var.gateway.memory > 0
    error_message = "gateway: cpu and memory are more than nothing."
  }
  validation {
    condition     = alltrue([for name in compact([var.gateway.tls_secret, var.gateway.credentials, try(var.gateway.admin_token_secret_ref.name, null), try(var.gateway.ticket_keys_secret_ref.name, null)]) : can(regex("^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$", name))])
    error_message = "gateway: tls_secret, credentials, admin_token_secret_ref and ticket_keys_secret_ref are names of Kubernetes Secrets."
  }
  validation {
    condition     = var.gateway.load_balancer_ip == null || can(cidrhost("${var.gateway.load_balancer_ip}/32", 0))
    error_message = "gateway.load_balancer_ip: an IPv4 or IPv6 address."
  }
  validation {
    condition     = contains(["LoadBalancer", "NodePort", "ClusterIP"], var.gateway.service_type)
    error_message = "gateway.service_type: LoadBalancer, NodePort or ClusterIP."
  }
  validation {
    condition     = alltrue([for cidr in var.gateway.source_ranges : can(cidrhost(cidr, 0))])
    error_message = "gateway.source_ranges: networks such as 203.0.113.0/24."
  }
}

variable "logic" {
  description = "The logic servers. replicas.min: 0 only with keda.enabled; null for 2, with keda.enabled and scale_to_zero for 0. replicas.spare, for keda.enabled: pods beyond those that the most urgent tier needs, while there are calls. image: null for oriel-logic of the registry. services: handler files, name.py -> text; together with the policies at most 400 kB compressed. folders: folders of services in the image. workers: processes for CPU work. through_gateway: model calls go through the gateway, which models of services need that may be scaled to zero; null for keda.enabled. args: further flags of `oriel logic`."
  type = object({
    replicas        = optional(object({ min = optional(number), max = optional(number, 10), spare = optional(number, 0) }), {})
    image           = optional(string)
    services        = optional(map(string), {})
    folders         = optional(list(string), [])
    workers         = optional(number, 2)
    cpu             = optional(number, 1)
    memory          = optional(number, 2)
    through_gateway = optional(bool)
    args            = optional(list(string), [])
  })
  default  = {}
  nullable = false
  validation {
    condition     = coalesce(var.logic.replicas.min, 2) >= 0 && var.logic.replicas.max >= max(1, coalesce(var.logic.replicas.min, 2)) && var.logic.replicas.max <= 200 && alltrue([for count in [coalesce(var.logic.replicas.min, 2), var.logic.replicas.max] : floor(count) == count])
    error_message = "logic.replicas: whole numbers, 0 <= min <= max <= 200, max not 0."
  }
  validation {
    condition     = var.logic.cpu > 0 && var.logic.memory > 0
    error_message = "logic: cpu and memory are more than nothing."
  }
  validation {
    condition     = alltrue([for name in keys(var.logic.services) : can(regex("^[A-Za-z0-9_][A-Za-z0-9_.-]*$", name))]) && length(join("", values(var.logic.services))) <= 900000
    error_message = "logic.services: file names without a slash, at most 900 kB of text: what a ConfigMap takes. More goes into an image."
  }
  validation {
    condition     = alltrue([for folder in var.logic.folders : startswith(folder, "/")]) && var.logic.workers >= 1 && var.logic.workers <= 256 && floor(var.logic.workers) == var.logic.workers
    error_message = "logic: folders are absolute paths in the image; workers a whole number from 1 to 256."
  }
}

variable "model_groups" {
  description = "The model servers by group, with one Deployment per group. null: one group cpu and, with GPUs, one group gpu. accelerator: cpu, openvino, gpu or tensorrt; it also selects the image. repository: URL of the models; null for model_repository_url/GROUP. credentials: name of the Secret whose environment variables open the repository (such as AWS_ACCESS_KEY_ID), if workload identity does not. models: names and patterns of models that only this group serves; with keda.enabled one group at most has none, and gets calls for all other models. cache: local disk for fetched models. load_grace_s: the longest time that models may take to load at the start. replicas.min: 0 only with keda.enabled; null for 1, with keda.enabled and scale_to_zero for 0. replicas.spare: as for logic. start_s, for keda.enabled: in how many seconds 95 of 100 new pods serve, with the start of a node; null for 300 on GPUs, else 120. place_models: the servers load models at their first call, and the gateway decides which of them has which; needs a pool for this group alone (models, keda.enabled, or no other group). engine, for keda.enabled: the group's pods run an engine of others (docs/engines.md). Of these: kind: as in a pool's document; image and command start it, and it listens on port 8000; services: the paths that it serves, such as chat.completions; health: path that says whether it is ready. It gets cache.gb of disk at /var/lib/oriel/models. gpus: of one node, for each pod. spot, for keda.enabled: up to replicas more pods on spot nodes, from none on, to which calls of tenants of tiers go first; replicas.min stay on demand."
  type = map(object({
    accelerator  = string
    repository   = optional(string)
    credentials  = optional(string)
    models       = optional(list(string), [])
    replicas     = optional(object({ min = optional(number), max = optional(number, 4), spare = optional(number, 0) }), {})
    cpu          = optional(number)
    memory       = optional(number)
    cache        = optional(object({ gb = optional(number, 20), claim = optional(bool, false) }), {})
    load_grace_s = optional(number, 900)
    start_s      = optional(number)
    place_models = optional(bool, false)
    gpus         = optional(number, 1)
    spot         = optional(object({ replicas = number, tiers = optional(list(string), ["bronze"]) }))
    args         = optional(list(string), [])
    engine = optional(object({
      kind     = string
      image    = string
      command  = list(string)
      services = optional(list(string), ["chat.completions", "completions"])
      health   = optional(string, "/health")
    }))
  }))
  default = null
  validation {
    condition     = alltrue([for group in values(coalesce(var.model_groups, {})) : group.engine == null ? true : contains(["vllm", "sglang", "trtllm", "openai"], group.engine.kind) && length(group.engine.command) > 0 && length(group.engine.services) > 0 && length(group.models) == 0 && !group.place_models && can(regex("^/[!-~]*$", group.engine.health))])
    error_message = "model_groups: an engine is vllm, sglang, trtllm or openai, with a command, services and a path for health; its group has no models and no place_models."
  }
  validation {
    condition     = alltrue([for group in values(coalesce(var.model_groups, {})) : contains(range(1, 17), group.gpus) && (group.spot == null ? true : contains(range(1, 201), group.spot.replicas) && length(group.spot.tiers) > 0)])
    error_message = "model_groups: gpus from 1 to 16; spot.replicas from 1 to 200, with tiers; whole numbers."
  }
  validation {
    condition     = alltrue([for name in keys(coalesce(var.model_groups, {})) : can(regex("^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$", name))])
    error_message = "model_groups: names of 1 to 40 small letters, digits and dashes, beginning with a letter."
  }
  validation {
    condition     = alltrue([for group in values(coalesce(var.model_groups, {})) : contains(["cpu", "openvino", "gpu", "tensorrt"], group.accelerator)])
    error_message = "model_groups: accelerator is cpu, openvino, gpu or tensorrt."
  }
  validation {
    condition     = alltrue(flatten([for group in values(coalesce(var.model_groups, {})) : [for model in group.models : can(regex("^[A-Za-z0-9._*-]{1,128}$", model))]]))
    error_message = "model_groups: models are names, or patterns with *."
  }
  validation {
    condition     = var.gpu_enabled || alltrue([for group in values(coalesce(var.model_groups, {})) : contains(["cpu", "openvino"], group.accelerator)])
    error_message = "model_groups: a group on gpu or tensorrt needs gpu_enabled = true: its pods would wait for ever."
  }
  validation {
    condition     = alltrue([for group in values(coalesce(var.model_groups, {})) : coalesce(group.replicas.min, 1) >= 0 && group.replicas.max >= max(1, coalesce(group.replicas.min, 1)) && group.replicas.max <= 200 && group.load_grace_s >= 30 && group.load_grace_s <= 86400 && coalesce(group.start_s, 1) >= 1 && coalesce(group.start_s, 1) <= 86400 && group.cache.gb >= 1 && alltrue([for count in [coalesce(group.replicas.min, 1), group.replicas.max, group.load_grace_s, coalesce(group.start_s, 1), group.cache.gb] : floor(count) == count])])
    error_message = "model_groups: 0 <= replicas.min <= replicas.max <= 200, max not 0, load_grace_s from 30 to 86400, start_s from 1 to 86400, cache.gb at least 1, all of them whole numbers."
  }
  validation {
    condition     = length(flatten([for group in values(coalesce(var.model_groups, {})) : group.models])) == length(distinct(flatten([for group in values(coalesce(var.model_groups, {})) : group.models])))
    error_message = "model_groups: a name or pattern stands in models twice: calls go to one group only."
  }
  validation {
    condition     = alltrue(flatten([for group in values(coalesce(var.model_groups, {})) : [for size in [group.cpu, group.memory] : size == null ? true : size > 0]]))
    error_message = "model_groups: cpu and memory are more than nothing."
  }
  validation {
    condition     = alltrue([for group in values(coalesce(var.model_groups, {})) : group.repository == null ? true : can(regex("^(s3|gs|az|as)://[^/]+", group.repository)) && !can(regex(local.no_port, group.repository))])
    error_message = "model_groups: repository is an s3://, gs:// or az:// URL; a pod has no folder of models."
  }
  validation {
    condition     = alltrue([for group in values(coalesce(var.model_groups, {})) : group.credentials == null ? true : can(regex("^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$", group.credentials))])
    error_message = "model_groups: credentials is the name of a Kubernetes Secret."
  }
  # How much memory a node's GPU has is known to nobody here. Without a budget no model would ever leave it.
  validation {
    condition     = alltrue([for group in values(coalesce(var.model_groups, {})) : !group.place_models || contains(["cpu", "openvino"], group.accelerator) || anytrue([for arg in group.args : can(regex("^--gpu-model-memory-budget(=|$)", arg))])])
    error_message = "model_groups: place_models on gpu or tensorrt needs the bytes of a GPU that models may take: args = [\"--gpu-model-memory-budget=20000000000\"]."
  }
}

variable "policies" {
  description = "The policies of the gateway. tenants: the short form, with keys as SHA-256 (`oriel keys new` prints it). pools: servers that run elsewhere, such as a maker's own on another accelerator, by the name of their pool. Of these: address: DNS name of the servers; port, grpc_port: those of their pods, for HTTP and gRPC; models: names and patterns, for servers of the v2 protocol; services: paths such as chat.completions, for servers of the OpenAI API; pod_labels: of their pods, if address is SERVICE.NAMESPACE.svc; networks: where they are otherwise; engine: vllm, sglang, trtllm, openai, triton or v2 (docs/engines.md); probe (with services /health), max_inflight, idle_timeout_ms: null for the gateway's own defaults. documents: file name -> text of further documents; one named tiers.toml, routes.toml or tenants.toml replaces that file. store: s3://, gs:// or az:// URL of a folder of documents that is read instead of all these."
  type = object({
    tenants = optional(map(object({
      tier        = string
      keys_sha256 = list(string)
      models      = optional(list(string), ["*"])
      services    = optional(list(string), ["*"])
    })), {})
    pools = optional(map(object({
      address         = string
      port            = number
      grpc_port       = optional(number)
      models          = optional(list(string), [])
      services        = optional(list(string), [])
      networks        = optional(list(string), [])
      pod_labels      = optional(map(string), {})
      probe           = optional(string)
      engine          = optional(string)
      max_inflight    = optional(number)
      idle_timeout_ms = optional(number)
    })), {})
    documents = optional(map(string), {})
    store     = optional(string)
  })
  default  = {}
  nullable = false
  validation {
    condition     = alltrue(flatten([for tenant in values(var.policies.tenants) : [for key in tenant.keys_sha256 : can(regex("^[0-9a-f]{64}$", key))]]))
    error_message = "policies.tenants: keys_sha256 are SHA-256 in 64 small hexadecimal digits, never the keys themselves."
  }
  validation {
    condition     = alltrue([for name, tenant in var.policies.tenants : can(regex("^[A-Za-z0-9][A-Za-z0-9._-]{0,127}$", name)) && can(regex("^[A-Za-z0-9][A-Za-z0-9._-]*$", tenant.tier)) && alltrue([for pattern in concat(tenant.models, tenant.services) : can(regex("^[A-Za-z0-9._*-]{1,128}$", pattern))])])
    error_message = "policies.tenants: names of letters, digits, dots, dashes and underscores; models and services are names, or patterns with *."
  }
  validation {
    condition     = alltrue([for name in keys(var.policies.documents) : can(regex("^[A-Za-z0-9_][A-Za-z0-9_.-]*\\.(toml|ndjson|json)$", name))]) && length(join("", values(var.policies.documents))) + length(jsonencode(var.policies.tenants)) <= 900000
    error_message = "policies.documents: *.toml, *.ndjson and *.json, with the tenants at most 900 kB of text: what a ConfigMap takes. More goes into a store."
  }
  validation {
    condition     = alltrue([for name in keys(var.policies.pools) : can(regex("^[a-z]([a-z0-9-]{0,38}[a-z0-9])?$", name)) && name != "logic" && !startswith(name, "inference")])
    error_message = "policies.pools: names of 1 to 40 small letters, digits and dashes, beginning with a letter, not logic and not inference...: pools of the platform's own servers."
  }
  validation {
    condition     = alltrue([for pool in values(var.policies.pools) : length(pool.networks) == 0 ? can(regex(local.of_a_service, pool.address)) : can(regex("^[A-Za-z0-9.-]+$", pool.address)) && length(pool.pod_labels) == 0 && alltrue([for cidr in pool.networks : can(cidrhost(cidr, 0))])])
    error_message = "policies.pools: address is SERVICE.NAMESPACE.svc of this cluster; or another name, without https:// and port, with networks such as 10.1.2.0/24 that the gateway may reach there, and without pod_labels."
  }
  validation {
    condition     = alltrue([for pool in values(var.policies.pools) : max(pool.port, coalesce(pool.grpc_port, 1)) < 65536 && can(regex("^(/[!-~]*)?$", coalesce(pool.probe, "/"))) && alltrue([for number in [pool.port, coalesce(pool.grpc_port, 1), coalesce(pool.max_inflight, 1), coalesce(pool.idle_timeout_ms, 1)] : floor(number) == number && number >= 1])])
    error_message = "policies.pools: port and grpc_port are whole numbers from 1 to 65535, max_inflight and idle_timeout_ms whole numbers from 1 on, probe is a path such as /health."
  }
  validation {
    condition     = alltrue([for pool in values(var.policies.pools) : length(concat(pool.models, pool.services)) > 0 && alltrue([for each in concat(pool.models, pool.services) : can(regex("^[A-Za-z0-9._*-]{1,128}$", each))])])
    error_message = "policies.pools: models (of v2 servers) or services (of OpenAI servers, such as chat.completions) name the calls that a pool gets, as names, or patterns with *."
  }
  # A gateway that runs keeps what it had; one that starts later would end at once: the next scale-up, the next lost node.
  validation {
    condition = var.policies.store != null || alltrue([
      for tenant in values(var.policies.tenants) :
      (contains(["gold", "silver", "bronze"], tenant.tier) && !contains(keys(var.policies.documents), "tiers.toml"))
      || anytrue([for text in values(var.policies.documents) : can(regex("(^|[^A-Za-z0-9_-])${replace(tenant.tier, ".", "\\.")}($|[^A-Za-z0-9_-])", text))])
    ])
    error_message = "policies.tenants: tier is gold, silver or bronze, or one that policies.documents have; with a tiers.toml of one's own, one of those."
  }
  validation {
    condition = alltrue(flatten([
      for name, text in var.policies.documents : [
        for part in endswith(name, ".json") ? [text] : endswith(name, ".ndjson") ? compact(split("\n", text)) : [] : can(jsondecode(part))
      ]
    ]))
    error_message = "policies.documents: a *.json is not JSON, or a line of an *.ndjson is not. `oriel policies check FOLDER` says where, and checks *.toml as well."
  }
  # Helm keeps what it installs, as it was given and as it was rendered, in one Secret of at most 1 MiB, compressed.
  validation {
    condition     = length(base64gzip(jsonencode([var.logic.services, var.policies]))) <= 400000
    error_message = "logic.services and policies: more than 400 kB together, compressed: Helm could not keep the release. Put documents into a store (policies.store), services into an image (logic.folders)."
  }
  validation {
    condition     = var.policies.store == null || can(regex("^(s3|gs|az|as)://[^/]+", var.policies.store)) && !can(regex(local.no_port, var.policies.store))
    error_message = "policies.store: an s3://, gs:// or az:// URL."
  }
}

variable "redis" {
  description = "The small Redis in the cluster, used only if infrastructure.redis_url is null. memory: of its data, in MiB. The data are counters and leases, so nothing is kept on disk."
  type = object({
    image  = optional(string, "docker.io/library/redis:7.4.6-alpine")
    memory = optional(number, 128)
  })
  default  = {}
  nullable = false
  validation {
    condition     = can(regex("[:@]", var.redis.image)) && !endswith(var.redis.image, ":latest") && var.redis.memory >= 16 && var.redis.memory <= 16384 && floor(var.redis.memory) == var.redis.memory
    error_message = "redis: image with a tag or digest, and not latest; memory a whole number from 16 to 16384 MiB."
  }
}

variable "gpu_enabled" {
  description = "Whether the cluster has GPU nodes or can add them."
  type        = bool
  default     = true
  nullable    = false
}

variable "scale_to_zero" {
  description = "Whether model groups and logic servers without calls are scaled to no pod (needs keda.enabled) where they name no replicas.min, so that their nodes can go too."
  type        = bool
  default     = true
  nullable    = false
}

variable "placement" {
  description = "Where pods run. share_gpu_nodes: logic servers and CPU inference use the spare CPUs of GPU nodes that are needed for a GPU pod anyway (deploy/chart/templates/_placement.tpl). pause_image: image of the pods that mark the other nodes and do nothing."
  type = object({
    share_gpu_nodes = optional(bool, true)
    pause_image     = optional(string, "registry.k8s.io/pause:3.10.1")
  })
  default  = {}
  nullable = false
  validation {
    condition     = can(regex("[:@]", var.placement.pause_image))
    error_message = "placement.pause_image: with a tag or digest."
  }
}

variable "keda" {
  description = "Scaling by the gateway's queue, also to no replica, instead of HorizontalPodAutoscalers. All model groups but one name their models then, so that a call for a model tells which group it needs. install: false where the cluster has KEDA already, 2.18 or later. namespace: that of KEDA's operator."
  type = object({
    enabled            = optional(bool, false)
    install            = optional(bool, true)
    namespace          = optional(string, "keda")
    chart_version      = optional(string, "2.18.1")
    polling_interval_s = optional(number, 5)
    cooldown_s         = optional(number, 30)
  })
  default  = {}
  nullable = false
  validation {
    condition     = can(regex("^(2\\.(1[89]|[2-9][0-9])|[3-9]\\.[0-9]+)\\.[0-9]+$", var.keda.chart_version))
    error_message = "keda.chart_version: an exact version, such as 2.18.1, from 2.18 on: older ones scale a pool to zero when the gateway says false."
  }
  validation {
    condition     = can(regex("^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$", var.keda.namespace))
    error_message = "keda.namespace: the name of a Kubernetes namespace."
  }
  # Its pods are not of the pod security level of that namespace, and all their traffic would be denied.
  validation {
    condition     = var.keda.namespace != var.namespace
    error_message = "keda.namespace: not the platform's own."
  }
  validation {
    condition     = var.keda.polling_interval_s >= 1 && var.keda.polling_interval_s <= 300 && var.keda.cooldown_s >= 0 && var.keda.cooldown_s <= 3600 && floor(var.keda.polling_interval_s) == var.keda.polling_interval_s && floor(var.keda.cooldown_s) == var.keda.cooldown_s
    error_message = "keda: polling_interval_s from 1 to 300, cooldown_s from 0 to 3600, whole seconds."
  }
}

variable "charts" {
  description = "Charts of other projects, each with an exact version. Disable those that the cluster already has (metrics-server on GKE and AKS, the device plugin on GKE)."
  type = object({
    nvidia_device_plugin     = optional(object({ enabled = optional(bool, true), version = optional(string, "0.18.2") }), {})
    metrics_server           = optional(object({ enabled = optional(bool, false), version = optional(string, "3.13.0") }), {})
    kube_prometheus_stack    = optional(object({ enabled = optional(bool, false), version = optional(string, "79.5.0") }), {})
    prometheus_operator_crds = optional(object({ enabled = optional(bool, false), version = optional(string, "24.0.2") }), {})
  })
  default  = {}
  nullable = false
  validation {
    condition     = alltrue([for chart in values(var.charts) : can(regex("^[0-9]+\\.[0-9]+\\.[0-9]+$", chart.version))])
    error_message = "charts: exact versions, such as 0.18.2."
  }
}

variable "observability" {
  description = "Metrics, dashboards and traces. service_monitors: create ServiceMonitors and rules; needs the custom resources of the Prometheus operator, from a chart (charts) or in the cluster already. dashboards: create ConfigMaps for Grafana. otlp: where spans are sent; null for no collector."
  type = object({
    # The only namespace whose pods may read metrics.
    namespace        = optional(string, "monitoring")
    service_monitors = optional(bool, false)
    # The labels by which your Prometheus selects ServiceMonitors and rules, such as { release = "kube-prometheus-stack" }.
    monitor_labels = optional(map(string), {})
    # The URL at which your people read docs/runbooks.md: the annotation runbook_url of each alert begins with it.
    runbooks_url = optional(string, "docs/runbooks.md")
    dashboards   = optional(bool, true)
    otlp = optional(object({
      endpoint = string
      # A Secret in the platform's namespace whose value is sent as the header authorization.
      authorization_secret_ref = optional(object({ name = string, key = string }))
      # Who chooses the traces that are kept: "gateway", at the end of a request; "collector", which gets all spans.
      trace_tail = optional(string, "gateway")
      # For "collector": at least 2 s more than the longest give_up_ms of the tiers, 30 s in those of `policies`.
      decision_wait_s = optional(number, 32)
      sample_ratio    = optional(number, 0.01)
      # null: OpenTelemetry's own, of its distribution contrib for "collector".
      image = optional(string)
    }))
  })
  default  = {}
  nullable = false
  validation {
    condition     = can(regex("^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$", var.observability.namespace))
    error_message = "observability.namespace: the name of a Kubernetes namespace."
  }
  # Its exporters need the hosts' network and files, which `restricted` refuses, and its pods would be cut off.
  validation {
    condition     = alltrue([for name in keys(var.observability.monitor_labels) : !can(regex(local.own_labels, name))])
    error_message = "observability.monitor_labels: a label that the platform sets itself."
  }
  validation {
    condition     = var.observability.namespace != var.namespace || !var.charts.kube_prometheus_stack.enabled
    error_message = "observability.namespace: not the platform's own: what kube_prometheus_stack installs may not run there."
  }
  validation {
    condition     = var.observability.otlp == null || can(regex("^https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?(/[^ ]*)?$", var.observability.otlp.endpoint)) && !can(regex(local.no_port, var.observability.otlp.endpoint))
    error_message = "observability.otlp.endpoint: http(s)://HOST[:PORT][/PATH] of an OTLP/HTTP receiver."
  }
  validation {
    condition     = var.observability.otlp == null || try(var.observability.otlp.sample_ratio >= 0 && var.observability.otlp.sample_ratio <= 1, false)
    error_message = "observability.otlp.sample_ratio: from 0 to 1."
  }
  validation {
    condition     = var.observability.otlp == null || !can(regex(":latest$", var.observability.otlp.image))
    error_message = "observability.otlp.image: not latest."
  }
  validation {
    condition     = var.observability.otlp == null || try(contains(["gateway", "collector"], var.observability.otlp.trace_tail), false)
    error_message = "observability.otlp.trace_tail: gateway or collector."
  }
  validation {
    condition     = var.observability.otlp == null || try(var.observability.otlp.decision_wait_s >= 2 && var.observability.otlp.decision_wait_s <= 3600, false)
    error_message = "observability.otlp.decision_wait_s: from 2 to 3600."
  }
}
