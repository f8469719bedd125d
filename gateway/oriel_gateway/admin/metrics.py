"""Export `Stats`, the pools and the tiers as Prometheus metrics. docs/metrics.md has the table."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from time import monotonic, time

from prometheus_client.core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from oriel_gateway.admin.queues import oldest_wait_s, tiers_of
from oriel_gateway.core import Gateway
from oriel_gateway.observe.budgets import Key
from oriel_gateway.observe.objectives import CAUSE, RESULTS, Objectives
from oriel_gateway.pools.cold_start import Phase
from oriel_gateway.pools.pool import PoolGate
from oriel_gateway.pools.scaling import PoolPlan
from oriel_policies.upstreams.ejection import Cause
from oriel_wire.engine.families import counter, gauge, histogram
from oriel_wire.engine.tls import Certificates
from oriel_wire.observe.exemplars import Exemplar as Example
from oriel_wire.observe.telemetry import Histogram


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
        yield from self._routes()
        yield from self._budgets()
        yield from self._tokens()

    def _calls(self) -> Iterator[Metric]:
        stats, exemplars = self._gateway.records.stats, self._gateway.records.exemplars
        text = "From a complete head to the last upstream byte."
        calls = histogram("oriel_gateway_request_duration_seconds", text, "pool route tier outcome status")
        received: Counter[tuple[str, str, str]] = Counter()
        sent: Counter[tuple[str, str, str]] = Counter()
        heads: defaultdict[tuple[str, str], Histogram] = defaultdict(Histogram)
        for (pool, route, tier, outcome, status), series in stats.series.items():
            labels = [pool, route, tier, outcome, f"{status}xx" if status else "none"]
            examples = exemplars.of((pool, route, tier, outcome, status))
            calls.add_metric(labels, _with_exemplars(series.buckets(), examples), series.total)
            received[pool, route, tier] += series.bytes_in
            sent[pool, route, tier] += series.bytes_out
            heads[pool, route].add(series.upstream)
        yield calls
        text = "Time from the request's last byte to the upstream's head."
        yield histogram("oriel_gateway_upstream_duration_seconds", text, "pool route", heads.items())
        text = "Bytes of bodies that clients sent."
        yield counter("oriel_gateway_received_bytes", text, "pool route tier", received.items())
        text = "Bytes of bodies that upstreams answered."
        yield counter("oriel_gateway_sent_bytes", text, "pool route tier", sent.items())
        text = "Time in the queue, of calls that had to wait."
        yield histogram("oriel_gateway_queue_wait_seconds", text, "pool tier", stats.waits.items())
        text = "Time to the first event of streams whose tier has a time per token."
        first = [(of, each) for of, (each, _) in stats.streams.items()]
        yield histogram("oriel_gateway_first_token_seconds", text, "pool tier", first)
        text = "Mean time per token of these streams."
        pace = [(of, each) for of, (_, each) in stats.streams.items()]
        yield histogram("oriel_gateway_time_per_token_seconds", text, "pool tier", pace)
        text = "Calls that went on to a further pool of their route."
        yield counter("oriel_gateway_spilled_calls", text, "route from to reason", stats.spills.items())

    def _promises(self) -> Iterator[Metric]:
        stats, tiers = self._gateway.records.stats, self._gateway.snapshot.tiers
        reached = stats.objectives.attainment
        results = [((tier, result), reached.get((tier, result), 0)) for tier in tiers for result in RESULTS]
        text = "Requests by what became of the tier's promise."
        yield counter("oriel_gateway_attainment", text, "tier result", results)
        objectives = [(name, tier.objective) for name, tier in tiers.items()]
        text = "The share that should be answered within the target."
        yield gauge("oriel_gateway_tier_objective", text, "tier", objectives)
        targets = [(name, tier.target_s) for name, tier in tiers.items()]
        yield gauge("oriel_gateway_tier_target_seconds", "The tier's target.", "tier", targets)
        paces = [(name, tier.token_s) for name, tier in tiers.items() if tier.token_s]
        yield gauge("oriel_gateway_tier_token_seconds", "The tier's time per token.", "tier", paces)
        tenants = _by_result(stats.objectives.tenants.read())
        yield counter("oriel_gateway_tenant_requests", "Requests of the busiest tenants.", "tenant result", tenants)
        refused = [(outcome.value, count) for outcome, count in stats.refusals.items()]
        yield counter("oriel_gateway_refused", "Requests refused before they reached a pool.", "reason", refused)
        yield from self._objectives(stats.objectives)

    def _objectives(self, objectives: Objectives) -> Iterator[Metric]:
        text = "Requests by what became of the tier's promise."
        requests = counter("oriel_gateway_slo_requests", text, "tenant tier target result")
        text = "Late and missed requests by the place that they lost their time in."
        bad = counter("oriel_gateway_slo_bad", text, "tenant tier target cause")
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
        yield from (requests, bad)
        now, tiers = time(), self._gateway.snapshot.tiers.items()
        left = [(name, objectives.budgets.remaining(name, tier.objective, now)) for name, tier in tiers]
        text = "The share of the tier's error budget of 30 days that is left, by the calls of this gateway."
        yield gauge("oriel_gateway_slo_budget_remaining_ratio", text, "tier", left)

    def _by_pool(self, read: Callable[[PoolGate], float]) -> list[tuple[str, float]]:
        return [(name, read(gate)) for name, gate in self._gateway.pools.items()]

    def _pools(self) -> Iterator[Metric]:
        oldest: list[tuple[str, float]] = []
        waiting: list[tuple[tuple[str, str], float]] = []
        for name, gate in self._gateway.pools.items():
            tiers = tiers_of(self._gateway, gate)
            oldest.append((name, oldest_wait_s(gate, {band for _, band in tiers})))
            waiting += [((name, tier), gate.admission.queue.depth(band)) for tier, band in tiers]
        inflight = self._by_pool(lambda gate: gate.admission.inflight)
        yield gauge("oriel_gateway_inflight", "Permits that are out.", "pool", inflight)
        permits = self._by_pool(lambda gate: gate.admission.limit)
        yield gauge("oriel_gateway_permits", "Permits there are.", "pool", permits)
        held = self._by_pool(lambda gate: gate.held_bytes)
        yield gauge("oriel_gateway_waiting_bytes", "Bytes that calls hold.", "pool", held)
        text = "How long the oldest waiting call has waited."
        yield gauge("oriel_gateway_oldest_wait_seconds", text, "pool", oldest)
        yield gauge("oriel_gateway_waiting", "Calls that wait for a permit.", "pool tier", waiting)
        engines = [(name, gate.engines) for name, gate in self._gateway.pools.items() if gate.engines is not None]
        calls = [
            ((name, state), getattr(each.load, state)) for name, each in engines for state in ("waiting", "running")
        ]
        yield gauge("oriel_gateway_engine_calls", "Calls inside engines of others.", "pool state", calls)
        cache = [(name, each.load.cache) for name, each in engines]
        yield gauge("oriel_gateway_engine_cache_ratio", "Part of the fullest engine's cache in use.", "pool", cache)
        missing = [(name, each.missing) for name, each in engines]
        yield gauge("oriel_gateway_engine_metrics_missing", "1 while no engine's metrics can be read.", "pool", missing)

    def _endpoints(self) -> Iterator[Metric]:
        parked = self._by_pool(lambda gate: gate.endpoints.parked + gate.grpc.parked)
        text = "Calls that wait because no endpoint is usable."
        yield gauge("oriel_gateway_waiting_for_endpoint", text, "pool", parked)
        usable = self._by_pool(lambda gate: len(gate.endpoints.usable) + len(gate.grpc.usable))
        yield gauge("oriel_gateway_endpoints_usable", "Endpoints that are asked.", "pool", usable)
        known = self._by_pool(lambda gate: len(gate.endpoints) + len(gate.grpc))
        yield gauge("oriel_gateway_endpoints", "Endpoints that are known.", "pool", known)
        repeats = self._by_pool(lambda gate: gate.retries.spent)
        yield counter("oriel_gateway_repeats", "Second copies of calls, sent.", "pool", repeats)
        ejected = [
            ((name, cause.value), gate.endpoints.ejections.get(cause, 0) + gate.grpc.ejections.get(cause, 0))
            for name, gate in self._gateway.pools.items()
            for cause in Cause
        ]
        now = monotonic()
        withheld = self._by_pool(lambda gate: sum(len(each.withheld(now)) for each in (*gate.endpoints, *gate.grpc)))
        yield gauge("oriel_gateway_models_withheld", "Models that an endpoint gets no calls for.", "pool", withheld)
        yield counter("oriel_gateway_ejections", "Endpoints left alone for a while.", "pool cause", ejected)

    def _scaling(self) -> Iterator[Metric]:
        plans = self._gateway.scaled.plans

        def each(read: Callable[[PoolPlan], float]) -> list[tuple[str, float]]:
            return [(name, read(plan)) for name, plan in plans.items()]

        def by_tier(read: Callable[[PoolPlan], Mapping[str, float]]) -> list[tuple[tuple[str, str], float]]:
            return [((name, tier), value) for name, plan in plans.items() for tier, value in read(plan).items()]

        wanted, replicas = each(lambda plan: plan.latest.wanted), each(lambda plan: plan.replicas)
        active, held = each(lambda plan: plan.latest.active), each(lambda plan: plan.demand.total.held)
        running = each(lambda plan: plan.demand.total.in_flight)
        yield gauge("oriel_gateway_scaling_wanted", "Replicas that are planned.", "pool", wanted)
        yield gauge("oriel_gateway_scaling_replicas", "Replicas there are.", "pool", replicas)
        yield gauge("oriel_gateway_scaling_active", "1 while one replica is needed.", "pool", active)
        yield gauge("oriel_gateway_scaling_held", "Calls that wait.", "pool", held)
        yield gauge("oriel_gateway_scaling_in_flight", "Calls that do not wait.", "pool", running)
        rates = by_tier(lambda plan: plan.latest.rates)
        yield gauge("oriel_gateway_scaling_rate", "Planned calls per second.", "pool tier", rates)
        text, work = "Device-seconds per second of the planned calls.", by_tier(lambda plan: plan.latest.work)
        yield gauge("oriel_gateway_scaling_work", text, "pool tier", work)
        refused = by_tier(lambda plan: {tier: record.refused for tier, record in plan.demand.total.tiers.items()})
        text = "Calls of a minute that lacked capacity."
        yield gauge("oriel_gateway_scaling_refused", text, "pool tier", refused)

    def _cold_starts(self) -> Iterator[Metric]:
        starts = [(name, gate.cold_start) for name, gate in self._gateway.pools.items()]
        cold = [(name, each) for name, each in starts if each is not None]
        phases = [((name, phase.value), phase is each.phase) for name, each in cold for phase in Phase]
        text = "1 for the phase of the pool's first server."
        yield gauge("oriel_gateway_cold_start_phase", text, "pool phase", phases)
        took = [((name, str(share)), each.starts.quantile_s(share)) for name, each in cold for share in (0.5, 0.95)]
        yield gauge("oriel_gateway_cold_start_seconds", "How long the latest starts took.", "pool quantile", took)
        counts = [(name, each.starts.count) for name, each in cold]
        yield counter("oriel_gateway_cold_starts", "Starts from no address to ready.", "pool", counts)
        refused = [(name, each.refused) for name, each in cold]
        text = "Calls that could not wait for a start."
        yield counter("oriel_gateway_cold_start_refused", text, "pool", refused)
        loaded = [
            ((name, of), size_bytes)
            for name, each in cold
            for of, size_bytes in zip(("loaded", "all"), each.loading or (), strict=False)
        ]
        text = "Bytes of model files that the pool's first server has loaded, and has to load, while it loads them."
        yield gauge("oriel_gateway_cold_start_bytes", text, "pool of", loaded)

    def _placements(self) -> Iterator[Metric]:
        pools = self._gateway.placements.pools.items()
        steps = [((name, result), pool.steps[result]) for name, pool in pools for result in ("load", "failed")]
        yield counter("oriel_gateway_placement_steps", "Loads that this gateway asked for.", "pool result", steps)

    def _loop(self) -> Iterator[Metric]:
        overload = self._gateway.overload
        yield gauge("oriel_gateway_loop_lag_seconds", "How late the event loop's timer was.", "", overload.lag_s)
        text = "1 while the event loop has more to read than it can."
        yield gauge("oriel_gateway_loop_behind", text, "", overload.behind)
        yield counter("oriel_gateway_loop_overloads", "Times the event loop has fallen behind.", "", overload.times)
        text = "Connections and refusals that wait for a turn of it."
        yield gauge("oriel_gateway_held_back", text, "", overload.waiting)

    def _losses(self) -> Iterator[Metric]:
        gateway = self._gateway
        yield gauge("oriel_gateway_unread_bytes", "Answers that wait for slow readers.", "", gateway.unread.bytes)
        yield counter("oriel_gateway_readers_cut", "Slow readers cut to make room.", "", gateway.unread.cut)
        spans, lines = getattr(gateway.sink, "dropped", 0), gateway.records.access_log
        yield counter("oriel_gateway_spans_dropped", "Spans that no collector took.", "", spans)
        text, dropped = "Lines of the access log that were lost.", 0 if lines is None else lines.dropped
        yield counter("oriel_gateway_access_log_dropped", text, "", dropped)

    def _routes(self) -> Iterator[Metric]:
        state = self._gateway.routing
        text = "Calls by the side of a split they went to."
        yield counter("oriel_gateway_split_calls", text, "route side", state.side_counts.items())
        text = "Copies by how their answer compares."
        yield counter("oriel_gateway_shadow_copies", text, "route pool result", state.shadow_counts.items())
        text = "Answers of deterministic routes by source."
        yield counter("oriel_gateway_cache_answers", text, "route source", state.cache_counts.items())
        yield gauge("oriel_gateway_cache_bytes", "Bytes of kept answers.", "", state.cache.size_bytes)
        text = "Kept answers that made room for others."
        yield counter("oriel_gateway_cache_evicted", text, "", state.cache.evicted)
        text = "Calls that are being made for one or more callers."
        yield gauge("oriel_gateway_flights", text, "", len(state.flights))
        yield gauge("oriel_gateway_shadow_copies_inflight", "Copies that are on their way.", "", state.shadows)
        latest = list(state.agreement.latest.items())
        ratios = [(of, each.ratio) for of, each in latest if each.ratio is not None and each.error is not None]
        text = "Share of rows with the same class, of answers compared lately."
        yield gauge("oriel_model_agreement_ratio", text, "model with", ratios)
        errors = [(of, each.error) for of, each in latest if each.ratio is not None and each.error is not None]
        text = "Largest difference of an element, of answers compared lately."
        yield gauge("oriel_model_largest_error", text, "model with", errors)
        counts = [((*of, result), count) for of, each in latest for result, count in each.counts.items()]
        text = "Pairs of answers by how their values compare."
        yield counter("oriel_model_compared", text, "model with result", counts)
        text = "1 for a side of a split that gets no calls any more, until its route changes."
        rolled_back = [((found.route, found.side, found.reason), 1) for found in state.canaries.shown()]
        yield gauge("oriel_gateway_canary_rolled_back", text, "route side reason", rolled_back)

    def _budgets(self) -> Iterator[Metric]:
        gateway = self._gateway
        gateway.records.stats.count()
        fills = [((fill.tenant, fill.budget), fill) for fill in gateway.spending.fills()]
        text = "Share of a tenant's budget that is spent."
        yield gauge("oriel_gateway_budget_spent_ratio", text, "tenant budget", [(of, fill.ratio) for of, fill in fills])
        text = "Share of a tenant's budget from which a warning is due."
        yield gauge("oriel_gateway_budget_warn_ratio", text, "tenant budget", [(of, fill.warn) for of, fill in fills])
        text = "1 if calls are refused once the budget is spent."
        yield gauge("oriel_gateway_budget_stops", text, "tenant budget", [(of, fill.stop) for of, fill in fills])

    def _tokens(self) -> Iterator[Metric]:
        # `type` is `gen_ai.token.type` of OpenTelemetry's semantic conventions
        gateway = self._gateway
        used = gateway.records.stats.usage.tokens.read()
        tokens = [((*of, kind), count) for of, counts in used.items() for kind, count in counts.items()]
        yield counter("oriel_gateway_tokens", "Tokens that calls read and wrote.", "tenant route tier type", tokens)
        left = [(each[:2], max(0.0, 1.0 - each.ratio)) for each in gateway.spending.tokens()]
        text = "Share of a tenant's token limit that is free."
        yield gauge("oriel_gateway_token_limit_left_ratio", text, "tenant limit", left)


def _by_result(counts: Mapping[str, Mapping[str, int]]) -> list[tuple[tuple[str, str], float]]:
    return [((name, result), count) for name, each in counts.items() for result, count in each.items()]


def _exemplar(found: Example) -> Exemplar:
    return Exemplar({"trace_id": found.trace}, found.value, found.at_s)


def _with_exemplars(
    buckets: Sequence[tuple[str, int]], examples: Mapping[int, Example]
) -> list[tuple[str, float] | tuple[str, float, Exemplar]]:
    """Return the buckets of a histogram with their exemplars. examples: an example by the number of its bucket."""
    found: list[tuple[str, float] | tuple[str, float, Exemplar]] = [*buckets]
    for number, example in examples.items():
        found[number] = (*buckets[number], _exemplar(example))
    return found


def certificate_metrics(certificates: Certificates) -> Iterator[Metric]:
    """Yield when the certificate of the public ports expires."""
    text = "When the first certificate of the public ports' chain in force expires."
    yield gauge("oriel_gateway_certificate_expires_timestamp_seconds", text, "", certificates.expires_at)
