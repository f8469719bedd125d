# Warnings: a platform without a caller may be meant, for a day; a document may spell a table otherwise.

locals {
  # Pools that KEDA asks for and no document plans, as far as can be read here: the routes.toml that is made has all of them.
  scaled_pools = var.keda.enabled ? concat(["logic"], [for name in keys(local.model_groups) : "inference-${name}"]) : []
  unplanned_pools = [
    for pool in sort(local.scaled_pools) : pool
    if var.policies.store == null && contains(keys(var.policies.documents), "routes.toml") && !anytrue([for text in values(var.policies.documents) : strcontains(text, "[pools.${pool}.scaling]")])
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
}

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
