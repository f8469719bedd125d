"""Export `Stats`, the pools and the tiers as Prometheus metrics. docs/metrics.md has the table."""

from collections.abc import Iterator, Mapping, Sequence
from time import time

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from oriel_gateway.admin.families import counter, gauge, histogram
from oriel_gateway.admin.queues import oldest_wait_s, tiers_of
from oriel_gateway.core import Gateway
from oriel_gateway.observe.budgets import Key
from oriel_gateway.observe.objectives import CAUSE, RESULTS, Objectives
from oriel_gateway.pools.cold_start import Phase
from oriel_policies.ejection import Cause
from oriel_wire.engine.tls import Certificates
from oriel_wire.exemplars import Exemplar as Example
from oriel_wire.telemetry import Histogram


class GatewayCollector(Collector):
    """Collects the metrics of a gateway. It is read on the gateway's loop."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._shown: set[tuple[Key, str]] = set()  # the causes of the last scrape

    def collect(self) -> Iterator[Metric]:
        yield from self._calls()
        yield from self._promises()
        yield from self._pools()
        yield from self._endpoints()
        yield from self._scaling()
        yield from self._cold_starts()
        yield from self._placements()
        yield from self._loop()
        yield from self._losses()

    def _calls(self) -> Iterator[Metric]:
        stats, exemplars = self._gateway.records.stats, self._gateway.records.exemplars
        calls = histogram(
            "oriel_gateway_request_duration_seconds",
            "From a complete head to the last upstream byte.",
            "pool",
            "route",
            "tier",
            "outcome",
            "status",
        )
        upstream = histogram(
            "oriel_gateway_upstream_duration_seconds",
            "Time from the request's last byte to the upstream's head.",
            "pool",
            "route",
        )
        received = counter(
            "oriel_gateway_received_bytes", "Bytes of bodies that clients sent.", "pool", "route", "tier"
        )
        sent = counter("oriel_gateway_sent_bytes", "Bytes of bodies that upstreams answered.", "pool", "route", "tier")
        moved: dict[tuple[str, str, str], tuple[int, int]] = {}
        heads: dict[tuple[str, str], Histogram] = {}
        for (pool, route, tier, outcome, status), series in stats.series.items():
            labels = [pool, route, tier, outcome, f"{status}xx" if status else "none"]
            examples = exemplars.of((pool, route, tier, outcome, status))
            calls.add_metric(labels, _with_exemplars(series.buckets(), examples), series.total)
            came, went = moved.get((pool, route, tier), (0, 0))
            moved[pool, route, tier] = came + series.bytes_in, went + series.bytes_out
            heads.setdefault((pool, route), Histogram()).add(series.upstream)
        for key, (came, went) in moved.items():
            received.add_metric(key, came)
            sent.add_metric(key, went)
        for pair, durations in heads.items():
            upstream.add_metric(list(pair), durations.buckets(), durations.total)
        waits = histogram(
            "oriel_gateway_queue_wait_seconds", "Time in the queue, of calls that had to wait.", "pool", "tier"
        )
        for pair, durations in stats.waits.items():
            waits.add_metric(list(pair), durations.buckets(), durations.total)
        spilled = counter(
            "oriel_gateway_spilled_calls",
            "Calls that went on to a further pool of their route.",
            "route",
            "from",
            "to",
            "reason",
        )
        for four, count in stats.spills.items():
            spilled.add_metric(four, count)
        yield from (calls, upstream, received, sent, waits, spilled)

    def _promises(self) -> Iterator[Metric]:
        gateway = self._gateway
        attainment = counter(
            "oriel_gateway_attainment", "Requests by what became of the tier's promise.", "tier", "result"
        )
        objectives = gateway.records.stats.objectives
        reached = objectives.attainment
        for tier in gateway.snapshot.tiers:
            for result in RESULTS:
                attainment.add_metric([tier, result], reached.get((tier, result), 0))
        objective = gauge(
            "oriel_gateway_tier_objective", "The share that should be answered within the target.", "tier"
        )
        target = gauge("oriel_gateway_tier_target_seconds", "The tier's target.", "tier")
        for name, documented in gateway.snapshot.tiers.items():
            objective.add_metric([name], documented.objective)
            target.add_metric([name], documented.target_s)
        tenants = counter("oriel_gateway_tenant_requests", "Requests of the busiest tenants.", "tenant", "result")
        for tenant, counts in objectives.tenants.read().items():
            for result, count in counts.items():
                tenants.add_metric([tenant, result], count)
        refused = counter("oriel_gateway_refused", "Requests refused before they reached a pool.", "reason")
        for outcome, count in gateway.records.stats.refused.items():
            refused.add_metric([outcome.value], count)
        yield from (attainment, objective, target, tenants, refused)
        yield from self._objectives(objectives)

    def _objectives(self, objectives: Objectives) -> Iterator[Metric]:
        requests = counter(
            "oriel_gateway_slo_requests",
            "Requests by what became of the tier's promise.",
            "tenant",
            "tier",
            "target",
            "result",
        )
        bad = counter(
            "oriel_gateway_slo_bad",
            "Late and missed requests by the place that they lost their time in.",
            "tenant",
            "tier",
            "target",
            "cause",
        )
        examples = self._gateway.records.bad_exemplars
        shown: set[tuple[Key, str]] = set()
        for key, counts in objectives.pairs.read().items():
            for result in RESULTS:
                requests.add_metric([*key, result], counts.get(result, 0))
            for name, count in counts.items():
                if name.startswith(CAUSE):
                    cause = name.removeprefix(CAUSE)
                    # A series begins at 0, and has its first calls in the next scrape: rates do not miss them.
                    if (key, cause) in self._shown:
                        example = examples.of((key, cause)).get(0)
                        bad.add_metric([*key, cause], count, exemplar=example and _exemplar(example))
                    elif count:
                        bad.add_metric([*key, cause], 0)
                    if count:
                        shown.add((key, cause))
        self._shown = shown
        left = gauge(
            "oriel_gateway_slo_budget_remaining_ratio",
            "The share of the tier's error budget of 30 days that is left, by the calls of this gateway.",
            "tier",
        )
        now = time()
        for name, tier in self._gateway.snapshot.tiers.items():
            left.add_metric([name], objectives.budgets.left(name, tier.objective, now))
        yield from (requests, bad, left)

    def _pools(self) -> Iterator[Metric]:
        gateway = self._gateway
        inflight = gauge("oriel_gateway_inflight", "Permits that are out.", "pool")
        permits = gauge("oriel_gateway_permits", "Permits there are.", "pool")
        size = gauge("oriel_gateway_waiting_bytes", "Bytes that calls hold.", "pool")
        oldest = gauge("oriel_gateway_oldest_wait_seconds", "How long the oldest waiting call has waited.", "pool")
        waiting = gauge("oriel_gateway_waiting", "Calls that wait for a permit.", "pool", "tier")
        for name, gate in gateway.pools.items():
            admission = gate.admission
            inflight.add_metric([name], admission.inflight)
            permits.add_metric([name], admission.limit)
            size.add_metric([name], gate.held_bytes)
            tiers = tiers_of(gateway, gate)
            oldest.add_metric([name], oldest_wait_s(gate, {band for _, band in tiers}))
            for tier, band in tiers:
                waiting.add_metric([name, tier], admission.queue.depth(band))
        yield from (inflight, permits, size, oldest, waiting)

    def _endpoints(self) -> Iterator[Metric]:
        parked = gauge("oriel_gateway_waiting_for_endpoint", "Calls that wait because no endpoint is usable.", "pool")
        usable = gauge("oriel_gateway_endpoints_usable", "Endpoints that are asked.", "pool")
        known = gauge("oriel_gateway_endpoints", "Endpoints that are known.", "pool")
        repeats = counter("oriel_gateway_repeats", "Second copies of calls, sent.", "pool")
        ejected = counter("oriel_gateway_ejections", "Endpoints left alone for a while.", "pool", "cause")
        for name, gate in self._gateway.pools.items():
            parked.add_metric([name], gate.endpoints.parked + gate.grpc.parked)
            usable.add_metric([name], len(gate.endpoints.usable) + len(gate.grpc.usable))
            known.add_metric([name], len(gate.endpoints) + len(gate.grpc))
            repeats.add_metric([name], gate.retries.spent)
            for cause in Cause:
                count = gate.endpoints.ejections.get(cause, 0) + gate.grpc.ejections.get(cause, 0)
                ejected.add_metric([name, cause.value], count)
        yield from (parked, usable, known, repeats, ejected)

    def _scaling(self) -> Iterator[Metric]:
        wanted = gauge("oriel_gateway_scaling_wanted", "Replicas that are planned.", "pool")
        replicas = gauge("oriel_gateway_scaling_replicas", "Replicas there are.", "pool")
        active = gauge("oriel_gateway_scaling_active", "1 while one replica is needed.", "pool")
        held = gauge("oriel_gateway_scaling_held", "Calls that wait.", "pool")
        running = gauge("oriel_gateway_scaling_in_flight", "Calls that do not wait.", "pool")
        rate = gauge("oriel_gateway_scaling_rate", "Planned calls per second.", "pool", "tier")
        work = gauge("oriel_gateway_scaling_work", "Device-seconds per second of the planned calls.", "pool", "tier")
        refused = gauge("oriel_gateway_scaling_refused", "Calls of a minute that lacked capacity.", "pool", "tier")
        for name, plan in self._gateway.scaled.plans.items():
            latest, total = plan.latest, plan.demand.total
            wanted.add_metric([name], latest.wanted)
            replicas.add_metric([name], plan.replicas)
            active.add_metric([name], latest.active)
            held.add_metric([name], total.held)
            running.add_metric([name], total.in_flight)
            for tier, calls in latest.rates.items():
                rate.add_metric([name, tier], calls)
            for tier, seconds in latest.work.items():
                work.add_metric([name, tier], seconds)
            for tier, record in total.tiers.items():
                refused.add_metric([name, tier], record.refused)
        yield from (wanted, replicas, active, held, running, rate, work, refused)

    def _cold_starts(self) -> Iterator[Metric]:
        phases = gauge("oriel_gateway_cold_start_phase", "1 for the phase of the pool's first server.", "pool", "phase")
        took = gauge("oriel_gateway_cold_start_seconds", "How long the latest starts took.", "pool", "quantile")
        starts = counter("oriel_gateway_cold_starts", "Starts from no address to ready.", "pool")
        loaded = gauge(
            "oriel_gateway_cold_start_bytes",
            "Bytes of model files that the pool's first server has loaded, and has to load, while it loads them.",
            "pool",
            "of",
        )
        refused = counter("oriel_gateway_cold_start_refused", "Calls that could not wait for a start.", "pool")
        for name, gate in self._gateway.pools.items():
            cold = gate.cold_start
            if cold is None:
                continue
            for phase in Phase:
                phases.add_metric([name, phase.value], phase is cold.phase)
            for of, size_bytes in zip(("loaded", "all"), cold.loading or (), strict=False):
                loaded.add_metric([name, of], size_bytes)
            for share in (0.5, 0.95):
                took.add_metric([name, str(share)], cold.starts.quantile_s(share))
            starts.add_metric([name], cold.starts.count)
            refused.add_metric([name], cold.refused)
        yield from (phases, took, starts, refused, loaded)

    def _placements(self) -> Iterator[Metric]:
        steps = counter(
            "oriel_gateway_placement_steps", "Loads and unloads that this gateway asked for.", "pool", "result"
        )
        decides = gauge("oriel_gateway_placement_decides", "1 while this gateway places the pool's models.", "pool")
        for name, placement in self._gateway.placements.pools.items():
            decides.add_metric([name], placement.leads)
            for result in ("load", "unload", "failed"):
                steps.add_metric([name, result], placement.steps[result])
        yield from (steps, decides)

    def _loop(self) -> Iterator[Metric]:
        overload = self._gateway.overload
        yield GaugeMetricFamily(
            "oriel_gateway_loop_lag_seconds", "How late the event loop's timer was.", value=overload.lag_s
        )
        yield GaugeMetricFamily(
            "oriel_gateway_loop_behind", "1 while the event loop has more to read than it can.", value=overload.behind
        )
        yield CounterMetricFamily(
            "oriel_gateway_loop_overloads", "Times the event loop has fallen behind.", value=overload.times
        )
        yield GaugeMetricFamily(
            "oriel_gateway_held_back", "Connections and refusals that wait for a turn of it.", value=overload.waiting
        )

    def _losses(self) -> Iterator[Metric]:
        gateway = self._gateway
        unread = gateway.unread
        yield GaugeMetricFamily("oriel_gateway_unread_bytes", "Answers that wait for slow readers.", value=unread.bytes)
        yield CounterMetricFamily("oriel_gateway_readers_cut", "Slow readers cut to make room.", value=unread.cut)
        spans, lines = getattr(gateway.sink, "dropped", 0), gateway.records.access_log
        yield CounterMetricFamily("oriel_gateway_spans_dropped", "Spans that no collector took.", value=spans)
        yield CounterMetricFamily(
            "oriel_gateway_access_log_dropped",
            "Lines of the access log that were lost.",
            value=0 if lines is None else lines.dropped,
        )


def _exemplar(found: Example) -> Exemplar:
    return Exemplar({"trace_id": found.trace}, found.value, found.at_s)


def _with_exemplars(
    buckets: Sequence[tuple[str, int]], examples: Mapping[int, Example]
) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
    """Return the buckets of a histogram with their exemplars. examples: by the number of the bucket."""
    found: list[tuple[str, float] | tuple[str, float, Exemplar]] = [*buckets]
    for number, example in examples.items():
        found[number] = (*buckets[number], _exemplar(example))
    return found


class CertificateCollector(Collector):
    """Collects when the certificate of the public ports expires."""

    def __init__(self, certificates: Certificates) -> None:
        self._certificates = certificates

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily(
            "oriel_gateway_certificate_expires_timestamp_seconds",
            "When the first certificate of the public ports' chain in force expires.",
            value=self._certificates.expires_at,
        )
