# What the gateway promises whom. The documents lie in a ConfigMap that is mounted as a folder: the kubelet swaps the whole
# folder when it changes (within a minute or so), the gateway sees that within a second. No pod is replaced. A mistake
# changes nothing but what it revokes, and stands in the log and in oriel_gateway_policy_mistakes.

locals {
  tiers_toml = <<-TOML
    # band 0 is served first; target_ms orders the queue; give_up_ms is the deadline of a call that names none.
    [tiers.gold]
    band = 0
    target_ms = 500
    give_up_ms = 5000

    [tiers.silver]
    band = 1
    target_ms = 2000
    give_up_ms = 8000

    [tiers.bronze]
    band = 2
    target_ms = 10000
    give_up_ms = 30000
  TOML

  # One pool per group for the models that are named, one of all groups for the rest: its servers are asked which of them
  # has a model. With KEDA a group may have no server that could be asked, so each group has a pool, and one group gets the
  # rest (variables.tf). The gateway watches the EndpointSlices of these Services (gateway.tf), so that a pod is known
  # without the delay of DNS.
  pool_discovery = merge(
    { for each in ["inference"] : each => each if !var.keda.enabled },
    { for name, group in local.model_groups : "inference-${name}" => "inference-${name}" if var.keda.enabled || length(group.models) > 0 },
  )
  # Where the gateway decides which server has which model. releases.tf refuses it in a pool of several groups, whose servers
  # have different models.
  placed_pools = [
    for name, group in local.model_groups : contains(keys(local.pool_discovery), "inference-${name}") ? "inference-${name}" : "inference" if group.place_models
  ]
  engines = { for name, group in local.model_groups : "inference-${name}" => group.engine if group.engine != null }
  # [] if every group names its models: calls for others are answered 404 and wake nobody.
  pool_of_the_rest = var.keda.enabled ? [for name, group in local.model_groups : "inference-${name}" if length(group.models) == 0 && group.engine == null] : ["inference"]
  # Calls with a pool of their own: for the models of one group, or for servers that run elsewhere.
  named = concat(
    flatten([for name, group in local.model_groups : [for model in group.models : { kind = "model", pattern = model, pool = "inference-${name}" }]]),
    flatten([for name, group in local.model_groups : [for service in group.engine.services : { kind = "service", pattern = service, pool = "inference-${name}" }] if group.engine != null]),
    flatten([for name, pool in var.policies.pools : [for model in pool.models : { kind = "model", pattern = model, pool = name }]]),
    flatten([for name, pool in var.policies.pools : [for service in pool.services : { kind = "service", pattern = service, pool = name }]]),
  )
  # The first route that fits counts: names before patterns, longer patterns before shorter ones.
  named_routes = merge([
    for each in local.named : { (format("%s %03d %s %s", strcontains(each.pattern, "*") ? "pattern" : "name", 128 - length(each.pattern), each.pattern, each.kind)) = each }
  ]...)
  # Bodies that wait for permits and bodies that wait for a server are bounded per pool, each by this: together at most half
  # of the gateway's memory. Not below one largest body (64 MiB, three quarters of it): with many pools give it more memory.
  pool_bytes = max(96 * 1048576, floor(var.gateway.memory * 1073741824 / (4 * (1 + length(local.pool_discovery) + length(var.policies.pools)))))
  # By which the gateway plans the replicas that KEDA asks for (scaling.tf).
  scaling_toml = { for pool, target in local.scaled : pool => concat(
    [
      "[pools.${pool}.scaling]",
      "minimum = ${target.replicas.min}",
      "maximum = ${target.replicas.max}",
      "start_ms = ${target.start_s * 1000}",
      "capacity = ${target.capacity}",
    ],
    # No tier's give_up_ms is as long as a start, and some starts take longer than 95 of 100.
    target.replicas.min == 0 ? ["hold_ms = ${target.start_s * 1500}", ""] : [""],
  ) if var.keda.enabled }
  pools_toml = join("\n", concat(
    ["[pools.logic]", "discover = \"kubernetes:logic:${local.ports.logic.http}\"", "max_queue_bytes = ${local.pool_bytes}"],
    # A request that waits for a model keeps its permit: there have to be enough for the requests that do not.
    !local.through_gateway ? [""] : ["max_inflight = 1024", "learn_concurrency = false", ""],
    lookup(local.scaling_toml, "logic", []),
    flatten([
      for pool in sort(keys(local.pool_discovery)) : [
        "[pools.${pool}]",
        "discover = \"kubernetes:${local.pool_discovery[pool]}:${local.ports.inference.http}\"",
        try("engine = \"${local.engines[pool].kind}\"\nprobe = \"${local.engines[pool].health}\"", "grpc_discover = \"kubernetes:${local.pool_discovery[pool]}:${local.ports.inference.grpc}\""),
        "max_queue_bytes = ${local.pool_bytes}",
        contains(local.placed_pools, pool) ? "place_models = true\n" : "",
      ]
    ]),
    flatten([for pool in sort(keys(local.pool_discovery)) : lookup(local.scaling_toml, pool, [])]),
    flatten([for name, pool in var.policies.pools : ["[pools.${name}]", "max_queue_bytes = ${local.pool_bytes}", [
      for key, value in {
        discover        = "dns:${pool.address}:${pool.port}"
        grpc_discover   = pool.grpc_port == null ? null : "dns:${pool.address}:${pool.grpc_port}"
        probe           = pool.probe == null && length(pool.services) > 0 ? "/health" : pool.probe
        engine          = pool.engine
        max_inflight    = pool.max_inflight
        idle_timeout_ms = pool.idle_timeout_ms
      } : "${key} = ${jsonencode(value)}" if value != null
    ], ""]]),
  ))
  # JSON's strings are TOML's as well.
  routes_toml = join("\n", concat(
    [local.pools_toml],
    flatten([for each in values(local.named_routes) : ["[[routes]]", "${each.kind} = ${jsonencode(each.pattern)}", "pool = \"${each.pool}\"", ""]]),
    flatten([for pool in local.pool_of_the_rest : ["[[routes]]", "model = \"*\"", "pool = \"${pool}\"", ""]]),
    ["[[routes]]", "service = \"*\"", "pool = \"logic\"", ""],
  ))
  tenants_toml = join("\n", concat(
    ["# From var.policies.tenants. Keys are known by their SHA-256 only: `oriel keys new` makes one.", ""],
    flatten([
      for name in sort(keys(var.policies.tenants)) : [
        "[tenants.${jsonencode(name)}]",
        "tier = ${jsonencode(var.policies.tenants[name].tier)}",
        "keys = [${join(", ", [for key in var.policies.tenants[name].keys_sha256 : "{ sha256 = \"${key}\" }"])}]",
        "models = ${jsonencode(var.policies.tenants[name].models)}",
        "services = ${jsonencode(var.policies.tenants[name].services)}",
        "",
      ]
    ]),
  ))
  policy_documents = merge(
    { "tiers.toml" = local.tiers_toml, "routes.toml" = local.routes_toml, "tenants.toml" = local.tenants_toml },
    var.policies.documents,
  )

  # Pools that KEDA asks for and no document plans, as far as can be read here.
  unplanned_pools = [
    for pool in sort(keys(local.scaling_toml)) : pool
    if var.policies.store == null && !anytrue([for text in values(local.policy_documents) : strcontains(text, "[pools.${pool}.scaling]")])
  ]

  # Every SHA-256 that a plan sees, but for those in a store.
  key_hashes = distinct(concat(
    flatten([for tenant in values(var.policies.tenants) : tenant.keys_sha256]),
    flatten([for text in values(var.policies.documents) : regexall("\\b[0-9a-f]{64}\\b", text)]),
  ))
  # Of words that everybody tries, or one piece over and over, as examples have it.
  placeholder_hashes = [
    for hash in local.key_hashes : hash if contains([for word in ["", "changeme", "key", "password", "secret", "test"] : sha256(word)], hash)
    || anytrue([for size in [1, 2, 4, 8, 16, 32] : hash == join("", [for i in range(64 / size) : substr(hash, 0, size)])])
  ]

  policies_objects = [
    for each in [
      {
        apiVersion = "v1"
        kind       = "ConfigMap"
        metadata   = { name = "policies", namespace = local.namespace, labels = local.labels.gateway }
        data       = local.policy_documents
      }
    ] : each if var.policies.store == null
  ]
}

# Warnings: a platform without a caller may be meant, for a day; a document may spell a table otherwise.
# Keys in clear on the internet, which nobody may have meant.
check "public" {
  assert {
    condition = anytrue([
      var.gateway.service_type != "LoadBalancer", var.gateway.tls_secret != null, length(var.gateway.source_ranges) > 0, var.gateway.plain_http,
      anytrue([for name in keys(var.gateway.service_annotations) : can(regex("(?i)(ssl|tls|cert)", name))]),
      # By name: the values of others may not be known when planning.
      anytrue([
        for name in ["service.beta.kubernetes.io/aws-load-balancer-scheme", "service.beta.kubernetes.io/azure-load-balancer-internal", "networking.gke.io/load-balancer-type"] :
        contains(["internal", "Internal", "true"], lookup(var.gateway.service_annotations, name, ""))
      ]),
    ])
    error_message = "gateway: the load balancer would take API keys over plain HTTP from everywhere. Set gateway.tls_secret (in the clouds dns.tls_secret), an annotation by which the load balancer ends TLS or is internal, or gateway.source_ranges; gateway.plain_http = true if it is meant."
  }
}

check "policies" {
  assert {
    condition     = var.policies.store != null || length(var.policies.tenants) > 0 || anytrue([for text in values(var.policies.documents) : can(regex("tenant", text))])
    error_message = "policies: no tenant, so every call will be answered 401: `oriel keys new` makes a key, policies.tenants names who has it."
  }
  assert {
    condition     = length(local.unplanned_pools) == 0
    error_message = "policies.documents: routes.toml replaces the one with the pools that KEDA asks for, and no document has ${join(", ", [for pool in local.unplanned_pools : "[pools.${pool}.scaling]"])}: nothing would be scaled up."
  }
  assert {
    condition     = length(local.placeholder_hashes) == 0
    error_message = "policies: ${join(", ", [for hash in local.placeholder_hashes : "${substr(hash, 0, 8)}..."])} is no key's SHA-256 but a placeholder's: `oriel keys new` makes one."
  }
}
