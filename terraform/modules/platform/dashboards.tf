# Grafana dashboards as data: a title, a unit and the lines of each panel, legend -> PromQL. Only metrics that the units
# expose (docs/metrics*.md): a test holds them against the code.

locals {
  dashboards = {
    gateway = [
      { title = "Attainment by tier, and the objective", unit = "percentunit", lines = {
        "{{tier}}"           = "sum by (tier) (rate(oriel_gateway_attainment_total{result=\"met\"}[$__rate_interval])) / (sum by (tier) (rate(oriel_gateway_attainment_total{result=~\"met|late|missed\"}[$__rate_interval])) > 0)"
        "objective {{tier}}" = "max by (tier) (oriel_gateway_tier_objective)"
      } },
      { title = "Calls by outcome", unit = "reqps", lines = {
        "{{outcome}}" = "sum by (outcome) (rate(oriel_gateway_request_duration_seconds_count[$__rate_interval]))"
      } },
      { title = "Duration by tier, 99th percentile", unit = "s", lines = {
        "{{tier}}" = "histogram_quantile(0.99, sum by (le, tier) (rate(oriel_gateway_request_duration_seconds_bucket[$__rate_interval])))"
      } },
      { title = "Upstream until its head by pool, 99th percentile", unit = "s", lines = {
        "{{pool}}" = "histogram_quantile(0.99, sum by (le, pool) (rate(oriel_gateway_upstream_duration_seconds_bucket[$__rate_interval])))"
      } },
      { title = "Refused before a pool, by reason", unit = "reqps", lines = {
        "{{reason}}" = "sum by (reason) (rate(oriel_gateway_refused_total[$__rate_interval]))"
      } },
      # Tiers of one band show the same number: not a sum over tiers.
      { title = "Waiting calls", unit = "short", lines = {
        "{{pool}} {{tier}}"      = "sum by (pool, tier) (oriel_gateway_waiting)"
        "{{pool}} no endpoint"   = "sum by (pool) (oriel_gateway_waiting_for_endpoint)"
        "{{pool}} oldest wait s" = "max by (pool) (oriel_gateway_oldest_wait_seconds)"
      } },
      { title = "Time in the queue, 99th percentile", unit = "s", lines = {
        "{{pool}} {{tier}}" = "histogram_quantile(0.99, sum by (le, pool, tier) (rate(oriel_gateway_queue_wait_seconds_bucket[$__rate_interval])))"
      } },
      { title = "Permits out, and permits there are", unit = "short", lines = {
        "{{pool}} out"     = "sum by (pool) (oriel_gateway_inflight)"
        "{{pool}} permits" = "sum by (pool) (oriel_gateway_permits)"
      } },
      { title = "Endpoints of each gateway: usable, and known", unit = "short", lines = {
        "{{pool}} usable" = "min by (pool) (oriel_gateway_endpoints_usable)"
        "{{pool}} known"  = "max by (pool) (oriel_gateway_endpoints)"
      } },
      { title = "Second copies and ejections", unit = "ops", lines = {
        "{{pool}} second copies"     = "sum by (pool) (rate(oriel_gateway_repeats_total[$__rate_interval]))"
        "{{pool}} ejected {{cause}}" = "sum by (pool, cause) (rate(oriel_gateway_ejections_total[$__rate_interval]))"
      } },
      { title = "Bytes of bodies", unit = "Bps", lines = {
        "{{pool}} received" = "sum by (pool) (rate(oriel_gateway_received_bytes_total[$__rate_interval]))"
        "{{pool}} sent"     = "sum by (pool) (rate(oriel_gateway_sent_bytes_total[$__rate_interval]))"
      } },
      { title = "Bytes held", unit = "bytes", lines = {
        "{{pool}} waiting" = "sum by (pool) (oriel_gateway_waiting_bytes)"
        "slow readers"     = "sum(oriel_gateway_unread_bytes)"
        "kept answers"     = "sum(oriel_gateway_cache_bytes)"
      } },
      { title = "Tenants with the most calls", unit = "reqps", lines = {
        "{{tenant}}" = "topk(10, sum by (tenant) (rate(oriel_gateway_tenant_requests_total[$__rate_interval])))"
      } },
      { title = "Shared limits", unit = "short", lines = {
        "gateways that ask Redis"  = "sum(oriel_gateway_limiter_up)"
        "gateways that share"      = "max(oriel_gateway_limiter_replicas)"
        "share of batches late"    = "sum(rate(oriel_gateway_limiter_batches_late_total[$__rate_interval])) / (sum(rate(oriel_gateway_limiter_batches_total[$__rate_interval])) > 0)"
        "least rest of the limits" = "min(oriel_gateway_limiter_rest)"
      } },
      { title = "What should be 0", unit = "short", lines = {
        "mistakes in documents"   = "max(oriel_gateway_policy_mistakes)"
        "spans lost /s"           = "sum(rate(oriel_gateway_spans_dropped_total[$__rate_interval]))"
        "access log lines lost/s" = "sum(rate(oriel_gateway_access_log_dropped_total[$__rate_interval]))"
        "readers cut /s"          = "sum(rate(oriel_gateway_readers_cut_total[$__rate_interval]))"
      } },
    ]
    inference = [
      { title = "Requests by model and reason", unit = "reqps", lines = {
        "{{model}} {{reason}}" = "sum by (model, reason) (rate(oriel_requests_total[$__rate_interval]))"
      } },
      { title = "Duration by model, 99th percentile", unit = "s", lines = {
        "{{model}}" = "histogram_quantile(0.99, sum by (le, model) (rate(oriel_request_duration_seconds_bucket[$__rate_interval])))"
      } },
      { title = "Where time goes, per answered request", unit = "µs", lines = {
        "{{model}} queue"  = "sum by (model) (rate(nv_inference_queue_duration_us[$__rate_interval])) / (sum by (model) (rate(nv_inference_request_success[$__rate_interval])) > 0)"
        "{{model}} input"  = "sum by (model) (rate(nv_inference_compute_input_duration_us[$__rate_interval])) / (sum by (model) (rate(nv_inference_request_success[$__rate_interval])) > 0)"
        "{{model}} infer"  = "sum by (model) (rate(nv_inference_compute_infer_duration_us[$__rate_interval])) / (sum by (model) (rate(nv_inference_request_success[$__rate_interval])) > 0)"
        "{{model}} output" = "sum by (model) (rate(nv_inference_compute_output_duration_us[$__rate_interval])) / (sum by (model) (rate(nv_inference_request_success[$__rate_interval])) > 0)"
      } },
      { title = "Waiting requests by model and priority", unit = "short", lines = {
        "{{model}} {{priority}}" = "sum by (model, priority) (oriel_queue_depth)"
      } },
      { title = "Wait of a request that came now", unit = "s", lines = {
        "{{model}} {{priority}}" = "max by (model, priority) (oriel_expected_wait_seconds)"
      } },
      { title = "Rows per batch, mean", unit = "short", lines = {
        "{{model}}" = "sum by (model) (rate(nv_inference_count[$__rate_interval])) / (sum by (model) (rate(nv_inference_exec_count[$__rate_interval])) > 0)"
      } },
      { title = "Batches by why they were started", unit = "ops", lines = {
        "{{model}} {{reason}}" = "sum by (model, reason) (rate(oriel_batches_released_total[$__rate_interval]))"
      } },
      { title = "Requests without an answer", unit = "reqps", lines = {
        "{{model}} {{reason}}" = "sum by (model, reason) (rate(nv_inference_request_failure[$__rate_interval]))"
      } },
      { title = "Loading a version took", unit = "s", lines = {
        "{{model}} {{version}}" = "max by (model, version) (nv_model_load_duration_secs)"
      } },
      { title = "Repositories that cannot be read, loads refused", unit = "short", lines = {
        "servers without their repository" = "count(oriel_model_repository_up == 0) or vector(0)"
        "{{model}} {{reason}} refused /s"  = "sum by (model, reason) (rate(oriel_model_load_failures_total[$__rate_interval]))"
      } },
      { title = "Busy share of the nodes' processors", unit = "percentunit", lines = {
        "{{pod}}" = "max by (pod) (nv_cpu_utilization)"
      } },
      { title = "Memory of the nodes, used share", unit = "percentunit", lines = {
        "{{pod}}" = "max by (pod) (nv_cpu_memory_used_bytes) / max by (pod) (nv_cpu_memory_total_bytes)"
      } },
    ]
    logic = [
      { title = "Requests by service and outcome", unit = "reqps", lines = {
        "{{service}} {{outcome}}" = "sum by (service, outcome) (rate(oriel_logic_requests_total[$__rate_interval]))"
      } },
      { title = "Duration by service, 99th percentile", unit = "s", lines = {
        "{{service}}" = "histogram_quantile(0.99, sum by (le, service) (rate(oriel_logic_request_seconds_bucket[$__rate_interval])))"
      } },
      { title = "Time by stage, mean", unit = "s", lines = {
        "{{service}} {{stage}}" = "sum by (service, stage) (rate(oriel_logic_stage_seconds_sum[$__rate_interval])) / (sum by (service, stage) (rate(oriel_logic_stage_seconds_count[$__rate_interval])) > 0)"
      } },
      { title = "Requests under way, jobs that wait", unit = "short", lines = {
        "under way"    = "sum(oriel_logic_in_flight)"
        "jobs waiting" = "sum(oriel_logic_jobs_waiting)"
      } },
      { title = "Busy share of the workers", unit = "percentunit", lines = {
        "{{pod}}" = "sum by (pod) (rate(oriel_logic_worker_busy_seconds_total[$__rate_interval])) / (sum by (pod) (oriel_logic_workers_ready) > 0)"
      } },
      { title = "Wait of a job, mean", unit = "s", lines = {
        "{{pod}}" = "sum by (pod) (rate(oriel_logic_job_wait_seconds_total[$__rate_interval])) / (sum by (pod) (rate(oriel_logic_jobs_total[$__rate_interval])) > 0)"
      } },
      { title = "Jobs never started, workers lost", unit = "ops", lines = {
        "dropped {{reason}}" = "sum by (reason) (rate(oriel_logic_jobs_dropped_total[$__rate_interval]))"
        "killed {{reason}}"  = "sum by (reason) (rate(oriel_logic_workers_killed_total[$__rate_interval]))"
        "died"               = "sum(rate(oriel_logic_workers_died_total[$__rate_interval]))"
      } },
      { title = "Micro-batches: rows in one, mean", unit = "short", lines = {
        "rows" = "sum(rate(oriel_logic_batched_rows_total[$__rate_interval])) / (sum(rate(oriel_logic_batches_total[$__rate_interval])) > 0)"
      } },
      { title = "Event loop: lag (99th percentile), blocked by a handler", unit = "short", lines = {
        "lag s"                  = "histogram_quantile(0.99, sum by (le) (rate(oriel_logic_loop_lag_seconds_bucket[$__rate_interval])))"
        "{{service}} blocked /s" = "sum by (service) (rate(oriel_logic_loop_blocked_total[$__rate_interval]))"
      } },
      { title = "Releases of services by state", unit = "short", lines = {
        "{{state}}" = "sum by (state) (oriel_logic_releases)"
      } },
    ]
  }

  grafana = { for name, panels in local.dashboards : name => {
    uid           = "oriel-${name}"
    title         = "Oriel: ${name}"
    tags          = ["oriel"]
    schemaVersion = 39
    editable      = true
    refresh       = "30s"
    time          = { from = "now-1h", to = "now" }
    templating = { list = [{
      name  = "datasource"
      label = "Prometheus"
      type  = "datasource"
      query = "prometheus"
    }] }
    panels = [for i, panel in panels : {
      id          = i + 1
      type        = "timeseries"
      title       = panel.title
      datasource  = { type = "prometheus", uid = "$${datasource}" }
      gridPos     = { h = 8, w = 12, x = 12 * (i % 2), y = 8 * floor(i / 2) }
      fieldConfig = { defaults = { unit = panel.unit, min = 0 }, overrides = [] }
      options     = { legend = { displayMode = "table", placement = "right", calcs = ["lastNotNull"] } }
      targets = [for j, legend in keys(panel.lines) : {
        refId        = substr("ABCDEFGH", j, 1)
        expr         = panel.lines[legend]
        legendFormat = legend
        datasource   = { type = "prometheus", uid = "$${datasource}" }
      }]
    }]
  } }

  dashboard_objects = [for name, dashboard in local.grafana : {
    apiVersion = "v1"
    kind       = "ConfigMap"
    metadata = {
      name      = "dashboard-${name}"
      namespace = local.namespace
      labels    = merge(local.labels[name], { grafana_dashboard = "1" })
    }
    data = { "oriel-${name}.json" = jsonencode(dashboard) }
  } if var.observability.dashboards]
}
