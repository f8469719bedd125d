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
  # has a model. Names are short on purpose: the first entry of a pod's DNS search list makes them whole.
  pool_discovery = merge(
    { inference = "inference" },
    { for name, group in local.model_groups : "inference-${name}" => "inference-${name}" if length(group.models) > 0 },
  )
  # Bodies that wait for permits and bodies that wait for a server are bounded per pool, each by this: together at most half
  # of the gateway's memory. Not below one largest body (64 MiB, three quarters of it): with many pools give it more memory.
  pool_bytes = max(96 * 1048576, floor(var.gateway.memory * 1073741824 / (4 * (1 + length(local.pool_discovery)))))
  pools_toml = join("\n", concat(
    ["[pools.logic]", "discover = \"dns:logic:${local.ports.logic.http}\"", "max_queue_bytes = ${local.pool_bytes}", ""],
    flatten([
      for pool in sort(keys(local.pool_discovery)) : [
        "[pools.${pool}]",
        "discover = \"dns:${local.pool_discovery[pool]}:${local.ports.inference.http}\"",
        "grpc_discover = \"dns:${local.pool_discovery[pool]}:${local.ports.inference.grpc}\"",
        "max_queue_bytes = ${local.pool_bytes}",
        "",
      ]
    ]),
  ))
  # JSON's strings are TOML's as well.
  routes_toml = join("\n", concat(
    [local.pools_toml],
    flatten([
      for group in sort(keys(local.model_groups)) : [
        for model in local.model_groups[group].models : [
          "[[routes]]", "model = ${jsonencode(model)}", "pool = \"inference-${group}\"", "",
        ]
      ]
    ]),
    ["[[routes]]", "model = \"*\"", "pool = \"inference\"", "", "[[routes]]", "service = \"*\"", "pool = \"logic\"", ""],
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

# Warnings: a platform without a caller may be meant, for a day.
check "tenants" {
  assert {
    condition     = var.policies.store != null || length(var.policies.tenants) > 0 || anytrue([for text in values(var.policies.documents) : can(regex("tenant", text))])
    error_message = "policies: no tenant, so every call will be answered 401: `oriel keys new` makes a key, policies.tenants names who has it."
  }
  assert {
    condition     = length(local.placeholder_hashes) == 0
    error_message = "policies: ${join(", ", [for hash in local.placeholder_hashes : "${substr(hash, 0, 8)}..."])} is no key's SHA-256 but a placeholder's: `oriel keys new` makes one."
  }
}
