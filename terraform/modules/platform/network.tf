# Nothing in the namespace is reached or reaches out but for what stands here. Only the gateway is public.
# Policies add up: a logic service that calls others needs one more NetworkPolicy of its owner's, no change here.

locals {
  keda_namespace = "keda"

  # Where pods with an identity get their tokens; Azure's is public, port 443. On AWS not the metadata address, from which a
  # pod could take its node's rights; on GKE that very address is answered by its metadata server, for the pod.
  identity_endpoints = try({
    aws = [{ cidr = "169.254.170.23/32", port = 80 }]
    gcp = [{ cidr = "169.254.169.254/32", port = 80 }]
  }[var.infrastructure.cloud], [])

  to_anywhere = [{ ipBlock = { cidr = "0.0.0.0/0", except = ["169.254.0.0/16"] } }]

  # Object stores, collectors and issuers of tokens have names, and addresses that change: any public one, on their port, and private
  # ones in the networks that are named. Not pods, services, nodes and the Kubernetes API: the code of models would have a way to them.
  private_networks = [for network in local.cluster_networks : network if !strcontains(network, ":")]
  store_networks = concat(
    var.infrastructure.store_networks,
    coalesce(var.store_networks, var.infrastructure.cloud == "local" ? local.private_networks : []),
  )
  to_https = concat(
    [{ ipBlock = { cidr = "0.0.0.0/0", except = concat(["169.254.0.0/16"], local.private_networks) } }],
    [for network in local.store_networks : { ipBlock = { cidr = network, except = [] } }],
  )

  # And on the port of a URL that names one: an object store or a collector of one's own.
  https_and = { for name, urls in {
    models   = [for group in values(local.model_groups) : group.repository]
    policies = compact([var.policies.store])
    otlp     = compact([try(var.observability.otlp.endpoint, null)])
    } : name => [
    for port in distinct(concat([443], [
      for url in urls : tonumber(try(regex("://[^/]*?:([0-9]+)(?:/|$)", url)[0], can(regex("^(s3://)?http://", url)) ? "80" : "443"))
    ])) : { to = local.to_https, ports = [{ protocol = "TCP", port = port }] }
  ] }

  to_identity = [for endpoint in local.identity_endpoints : {
    to    = [{ ipBlock = { cidr = endpoint.cidr } }]
    ports = [{ protocol = "TCP", port = endpoint.port }]
  }]

  # The cluster's DNS, or its cache on the node (link-local; GKE switches it on by itself).
  to_dns = {
    to = [
      {
        namespaceSelector = { matchLabels = { "kubernetes.io/metadata.name" = "kube-system" } }
        podSelector       = { matchExpressions = [{ key = "k8s-app", operator = "In", values = ["kube-dns", "coredns", "node-local-dns"] }] }
      },
      { ipBlock = { cidr = "169.254.20.10/32" } },
    ]
    ports = [{ protocol = "UDP", port = 53 }, { protocol = "TCP", port = 53 }]
  }

  # The Kubernetes API, whose address no plan knows: clouds serve it on 443, kind and kubeadm on 6443.
  to_kubernetes = [for port in distinct([443, var.infrastructure.cloud == "local" ? 6443 : 443]) : {
    to    = local.to_anywhere
    ports = [{ protocol = "TCP", port = port }]
  }]

  to_collector = [for each in [{
    to    = [{ podSelector = { matchLabels = { "app.kubernetes.io/component" = "collector" } } }]
    ports = [{ protocol = "TCP", port = 4318 }]
  }] : each if var.observability.otlp != null]

  to_redis = [for each in [
    { bundled = true, to = [{ podSelector = { matchLabels = local.selectors.redis } }], port = 6379 },
    { bundled = false, to = local.to_anywhere, port = tonumber(try(regex(":([0-9]+)(?:/[0-9]*)?$", var.infrastructure.redis_url)[0], "6379")) },
  ] : { to = each.to, ports = [{ protocol = "TCP", port = each.port }] } if each.bundled == local.bundles_redis]

  to_inference = {
    to    = [{ podSelector = { matchLabels = { "app.kubernetes.io/component" = "inference" } } }]
    ports = [{ protocol = "TCP", port = 8000 }, { protocol = "TCP", port = 8001 }]
  }

  # Servers that run elsewhere: pods of another namespace, or the networks that are named.
  of_a_service = "^[a-z0-9-]+\\.([a-z0-9-]+)\\.svc(?:\\.cluster\\.local)?\\.?$"
  to_external = [for pool in values(var.policies.pools) : {
    to = concat([for network in pool.networks : { ipBlock = { cidr = network } }], [
      for namespace in try(regex(local.of_a_service, pool.address), []) : {
        namespaceSelector = { matchLabels = { "kubernetes.io/metadata.name" = namespace } }
        podSelector       = { matchLabels = pool.pod_labels }
      } if length(pool.networks) == 0
    ])
    ports = [for port in [pool.port, pool.grpc_port] : { protocol = "TCP", port = port } if port != null]
  }]

  # Of logic servers.
  to_models = local.through_gateway ? {
    to    = [{ podSelector = { matchLabels = local.selectors.gateway } }]
    ports = [{ protocol = "TCP", port = 8084 }]
  } : local.to_inference

  from_monitoring = { for port in [8002, 8082, 8092, 8888] : port => {
    from  = [{ namespaceSelector = { matchLabels = { "kubernetes.io/metadata.name" = var.observability.namespace } } }]
    ports = [{ protocol = "TCP", port = port }]
  } }

  traffic = {
    gateway = {
      ingress = concat(
        [{ ports = [{ protocol = "TCP", port = 8080 }, { protocol = "TCP", port = 8081 }] }],
        [local.from_monitoring[8082]],
        [for each in [{
          from = [{
            namespaceSelector = { matchLabels = { "kubernetes.io/metadata.name" = local.keda_namespace } }
            podSelector       = { matchLabels = { "app.kubernetes.io/name" = "keda-operator" } }
          }]
          ports = [{ protocol = "TCP", port = 8083 }]
        }] : each if var.keda.enabled],
        # Tickets count here, and whoever has one calls models in a tenant's name: nobody but logic servers.
        [for each in [{
          from  = [{ podSelector = { matchLabels = local.selectors.logic } }]
          ports = [{ protocol = "TCP", port = 8084 }]
        }] : each if local.through_gateway],
      )
      egress = concat(
        [local.to_dns, local.to_inference],
        [{
          to    = [{ podSelector = { matchLabels = { "app.kubernetes.io/component" = "logic" } } }]
          ports = [{ protocol = "TCP", port = 8090 }]
        }],
        local.to_redis, local.to_external, local.https_and.policies, local.to_kubernetes, local.to_identity, local.to_collector,
      )
    }
    logic = {
      ingress = [
        {
          from  = [{ podSelector = { matchLabels = { "app.kubernetes.io/component" = "gateway" } } }]
          ports = [{ protocol = "TCP", port = 8090 }]
        },
        local.from_monitoring[8092],
      ]
      egress = concat([local.to_dns, local.to_models], local.to_collector)
    }
    inference = {
      ingress = [
        {
          from = [{ podSelector = { matchExpressions = [
            { key = "app.kubernetes.io/component", operator = "In", values = local.through_gateway ? ["gateway"] : ["gateway", "logic"] },
          ] } }]
          ports = [{ protocol = "TCP", port = 8000 }, { protocol = "TCP", port = 8001 }]
        },
        local.from_monitoring[8002],
      ]
      egress = concat([local.to_dns], local.https_and.models, local.to_identity, local.to_collector)
    }
    redis = {
      ingress = [{
        from  = [{ podSelector = { matchLabels = { "app.kubernetes.io/component" = "gateway" } } }]
        ports = [{ protocol = "TCP", port = 6379 }]
      }]
      egress = []
    }
    collector = {
      ingress = [
        {
          from = [{ podSelector = { matchExpressions = [
            { key = "app.kubernetes.io/component", operator = "In", values = ["gateway", "logic", "inference"] },
          ] } }]
          ports = [{ protocol = "TCP", port = 4318 }]
        },
        local.from_monitoring[8888],
      ]
      egress = concat([local.to_dns], local.https_and.otlp)
    }
  }

  network_objects = concat(
    [{
      apiVersion = "networking.k8s.io/v1"
      kind       = "NetworkPolicy"
      metadata   = { name = "default-deny", namespace = local.namespace, labels = local.common_labels }
      spec       = { podSelector = {}, policyTypes = ["Ingress", "Egress"] }
    }],
    [for component, rules in local.traffic : {
      apiVersion = "networking.k8s.io/v1"
      kind       = "NetworkPolicy"
      metadata   = { name = component, namespace = local.namespace, labels = local.labels[component] }
      spec = {
        podSelector = { matchLabels = { "app.kubernetes.io/component" = component } }
        policyTypes = ["Ingress", "Egress"]
        ingress     = rules.ingress
        egress      = rules.egress
      }
      }
      if(component != "redis" || local.bundles_redis) && (component != "collector" || var.observability.otlp != null)
    ],
  )
}
