"""The metrics, read from the models' own counters on request: Triton's names, and Oriel's beside them.

Every family is one line of FAMILIES or of the server's own families; `docs/metrics.md` has the same lines. A version
that is loaded again continues to count; a version that leaves keeps its series until its last request has ended.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from oriel_inference.artefacts.records import ArtefactCounts
from oriel_inference.backends.nvml import GpuLoad
from oriel_inference.batching.device import Devices
from oriel_inference.batching.statistics import Statistics
from oriel_inference.batching.summaries import TEXTS
from oriel_inference.catalog import ServingModel
from oriel_inference.errors import Outcome
from oriel_inference.host import HostLoad
from oriel_inference.language.scheduler import STATES, LanguageScheduler
from oriel_inference.quality.sampler import SAMPLE_RESULTS, VersionQuality
from oriel_inference.quality.tensor import ODD_KINDS
from oriel_inference.sequences.scheduler import SequenceScheduler
from oriel_inference.servers.surface import Surface
from oriel_inference.stores.remote import RemoteStore
from oriel_inference.stores.source import FAILURES
from oriel_policies.metering.usage import by_label, unbilled_ns
from oriel_wire.observe.exemplars import Exemplar
from oriel_wire.observe.telemetry import Histogram, head, histogram, label_text, pieces

PIECE_LINES = 2000
_REASONS = {
    Outcome.QUEUE_FULL: "REJECTED",
    Outcome.QUEUE_TIMEOUT: "REJECTED",
    Outcome.DEADLINE_EXCEEDED: "REJECTED",
    Outcome.DEADLINE_TOO_SHORT: "REJECTED",
    Outcome.SERVER_STOPPING: "REJECTED",
    Outcome.CALLER_LEFT: "CANCELED",
    Outcome.BACKEND_FAILED: "BACKEND",
}
_ALL_REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")


class _Traced(NamedTuple):
    """A histogram with traces by the number of their bucket."""

    found: Histogram
    exemplars: Mapping[int, Exemplar]


# Writes the lines of a sample, gets the name of the family and the text of its labels.
Lines = Callable[[str, str], Iterator[str]]
# Labels and value; a metric's name, kind, text and samples.
Samples = Iterable[tuple[Mapping[str, str], float | Histogram | _Traced | Lines]]
Own = tuple[str, str, str, Samples]


@dataclass(frozen=True, slots=True)
class Source:
    """The labels and counters of one version. queues: the schedulers of what serves, and of what it replaced and still
    finishes. quality: its samples, if it is sampled. exemplars: returns traces of a tier's requests.
    """

    labels: str
    statistics: Statistics
    serving: ServingModel
    queues: tuple[ServingModel, ...]
    quality: VersionQuality | None
    exemplars: Callable[[tuple[str, str, str]], Mapping[int, Exemplar]]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric of every version. read: returns its samples without the labels of the version."""

    name: str
    kind: str
    text: str
    read: Callable[[Source], Samples]


def exposition(surface: Surface, host: HostLoad, gpus: Sequence[GpuLoad], *, openmetrics: bool) -> Iterator[str]:
    """Yield the text in pieces of at most PIECE_LINES lines, so that a caller on the loop can let it go on in
    between. OpenMetrics needs `telemetry.END` behind them.

    gpus: the load of each.
    """
    sources = _sources(surface, openmetrics)
    metrics = surface.metrics
    summaries = (_summary(name, text, metrics.quantiles) for name, text in TEXTS.items() if metrics.quantiles)
    for family in (*FAMILIES, *summaries):
        if metrics.hides(family.name):
            continue
        yield head(family.name, family.kind, family.text, openmetrics=openmetrics)
        if family.name == "oriel_requests_total":
            yield from pieces(_lines(family.name, "", _refused(surface)), size=PIECE_LINES)
        lines = (line for each in sources for line in _lines(family.name, each.labels, family.read(each)))
        yield from pieces(lines, size=PIECE_LINES)
    for name, kind, text, samples in (*_server(surface, host, gpus), *_usage(surface.devices)):
        yield head(name, kind, text, openmetrics=openmetrics)
        yield from pieces(_lines(name, "", samples), size=PIECE_LINES)
    for made in list(surface.model_metrics.families.values()):
        yield head(made.name, made.kind, made.text, openmetrics=openmetrics)
        values = [(each.labels, each.value) for each in made.series.values()]
        yield from pieces(_lines(made.name, "", values), size=PIECE_LINES)


def _lines(name: str, common: str, samples: Samples) -> Iterator[str]:
    """Yield the lines of some samples. common: the text of labels that all of them have."""
    for more, value in samples:
        labels = ",".join(filter(None, (common, label_text(more))))
        if isinstance(value, _Traced):
            yield from histogram(name, labels, *value)
        elif callable(value):
            yield from value(name, labels)
        elif isinstance(value, Histogram):
            yield from histogram(name, labels, value)
        else:
            yield f"{name}{{{labels}}} {value!r}\n" if labels else f"{name} {value!r}\n"


def _sources(surface: Surface, openmetrics: bool) -> list[Source]:
    found: dict[tuple[str, str], list[ServingModel]] = {}
    for model in (*surface.catalog.serving(), *surface.catalog.leaving):
        found.setdefault((model.spec.name, model.version), []).append(model)
    return [
        Source(
            label_text(
                {"model": name, "version": version}
                | {f"_{key}": value for key, value in sorted(models[0].config.metric_tags.items())}
            ),
            models[0].batcher.statistics,
            models[0],
            tuple(models),
            surface.quality.of(name, models[0].spec.version),
            surface.meter.exemplars.of if openmetrics else lambda _: {},
        )
        for (name, version), models in sorted(found.items())
    ]


# Families of every version -----------------------------------------------------------------------------------------


def _number(read: Callable[[Statistics], float | Histogram]) -> Callable[[Source], Samples]:
    return lambda source: (({}, read(source.statistics)),)


def _micros(read: Callable[[Statistics], int]) -> Callable[[Source], Samples]:
    return _number(lambda statistics: read(statistics) // 1000)


def _total(read: Callable[[ServingModel], float]) -> Callable[[Source], Samples]:
    return lambda source: (({}, sum(read(each) for each in source.queues)),)


def _by(label: str, values: Iterable[tuple[str, float]]) -> Samples:
    return (({label: of}, value) for of, value in values)


def _failures(source: Source) -> Samples:
    found = Counter(dict.fromkeys(_ALL_REASONS, 0))
    for outcome, count in source.statistics.failures.items():
        found[_REASONS.get(outcome, "OTHER")] += count
    return _by("reason", found.items())


def _instances(source: Source) -> Samples:
    return [({"by": "demand" if source.serving.spec.by_demand else "configuration"}, source.serving.spec.instances)]


def _first_response(source: Source) -> Samples:
    return [({}, source.statistics.first_response)] if source.serving.spec.decoupled else ()


def _latency(source: Source) -> Samples:
    of = source.serving.spec.name, source.serving.version
    for tier, found in sorted(source.statistics.tiers.items()):
        yield {"tier": tier}, _Traced(found.latency, source.exemplars((*of, tier)))


def _requests(source: Source) -> Samples:
    for tier, found in sorted(source.statistics.tiers.items()):
        for outcome, count in {Outcome.OK: found.latency.count, **found.refusals}.items():
            yield {"tier": tier, "reason": outcome.value}, count


def _refused(surface: Surface) -> Samples:
    for (model, tier, outcome), count in list(surface.meter.refused.items()):
        yield {"model": model, "version": "", "tier": tier, "reason": outcome.value}, count


def _depth(source: Source) -> Samples:
    depths: Counter[int] = Counter()
    for model in source.queues:
        for band, items, _ in model.batcher.depths():
            depths[band] += items
    return _by("priority", ((str(band), items) for band, items in sorted(depths.items())))


def _expected_wait(source: Source) -> Samples:
    for band, _, seconds in source.serving.batcher.depths():
        if seconds is not None:
            yield {"priority": str(band)}, round(seconds, 6)


def _cached(read: Callable[[Statistics], float]) -> Callable[[Source], Samples]:
    return lambda source: (({}, read(source.statistics)),) if source.serving.spec.cached else ()


def _sequences(source: Source) -> Samples:
    tables = [each.batcher.table for each in source.queues if isinstance(each.batcher, SequenceScheduler)]
    if not tables:
        return ()
    return _by("state", (("holding", sum(t.holding for t in tables)), ("waiting", sum(t.waiting for t in tables))))


def _language(source: Source) -> Samples:
    counts: Counter[tuple[int, str]] = Counter()
    for each in source.queues:
        if isinstance(each.batcher, LanguageScheduler):
            for band, found in each.batcher.states().items():
                counts.update({(band, state): count for state, count in zip(STATES, found, strict=True)})
    return (({"priority": str(band), "state": state}, count) for (band, state), count in sorted(counts.items()))


def _cache_use(source: Source) -> Samples:
    scheduler = source.serving.batcher
    return [({}, scheduler.cache_use)] if isinstance(scheduler, LanguageScheduler) else ()


def _tokens(source: Source) -> Samples:
    counts = source.statistics.language
    return _by("kind", ((kind, counts[kind]) for kind in ("cached", "generated", "prompt") if counts))


def _pauses(source: Source) -> Samples:
    counts = source.statistics.language
    return [({}, counts["pauses"])] if counts else ()


def _artefact(source: Source) -> Samples:
    life = source.serving.artefact
    return [] if life is None else [({"compiler": life.compiler, "state": life.state.value}, 1)]


def _drift(index: int) -> Callable[[Source], Samples]:
    def read(source: Source) -> Samples:
        found = {} if source.quality is None else source.quality.drift()
        return _by("tensor", ((tensor, each[index]) for tensor, each in found.items()))

    return read


def _confidence(source: Source) -> Samples:
    totals = {} if source.quality is None else source.quality.totals
    return (({"tensor": tensor}, each.confidence) for tensor, each in totals.items() if each.confidence.count)


def _odd_values(source: Source) -> Samples:
    totals = {} if source.quality is None else source.quality.totals
    return (({"tensor": tensor, "kind": kind}, each.odd[kind]) for tensor, each in totals.items() for kind in ODD_KINDS)


def _sampled(source: Source) -> Samples:
    quality = source.quality
    return () if quality is None else _by("result", ((each, quality.samples[each]) for each in SAMPLE_RESULTS))


_ONCE = ", counted once per request"
_CACHE: tuple[tuple[str, str, Callable[[Statistics], float]], ...] = (
    ("num_hits", "Requests answered from the response cache", lambda s: s.cache_hit.count),
    ("hit_duration", "Microseconds in which those answers were found", lambda s: s.cache_hit.ns // 1000),
    ("num_misses", "Requests whose answer was not in the response cache", lambda s: s.cache_miss.count),
    ("miss_duration", "Microseconds of looking for those answers and keeping them", lambda s: s.cache_miss.ns // 1000),
)
# name, text, nanoseconds
_DURATIONS: tuple[tuple[str, str, Callable[[Statistics], int]], ...] = (
    ("nv_inference_request_duration_us", "Total time from entering the queue to the answer", lambda s: s.success.ns),
    ("nv_inference_queue_duration_us", "Total time in the queue", lambda s: s.queue.ns),
    ("nv_inference_compute_input_duration_us", f"Total time of assembling batches{_ONCE}", lambda s: s.stages.input.ns),
    ("nv_inference_compute_infer_duration_us", f"Total time of executing batches{_ONCE}", lambda s: s.stages.infer.ns),
    (
        "nv_inference_compute_output_duration_us",
        f"Total time of splitting batches{_ONCE}",
        lambda s: s.stages.output.ns,
    ),
)
FAMILIES = (
    Family("nv_inference_request_success", "counter", "Requests answered", _number(lambda s: s.success.count)),
    Family("nv_inference_request_failure", "counter", "Requests without an answer", _failures),
    Family("nv_inference_count", "counter", "Rows executed", _number(lambda s: s.inferences)),
    Family("nv_inference_exec_count", "counter", "Batches executed", _number(lambda s: s.executions)),
    *(Family(name, "counter", text, _micros(read)) for name, text, read in _DURATIONS),
    Family(
        "nv_inference_pending_request_count",
        "gauge",
        "Requests that wait",
        _total(lambda each: each.batcher.pending),
    ),
    *(Family(f"nv_cache_{name}_per_model", "counter", text, _cached(read)) for name, text, read in _CACHE),
    Family(
        "nv_model_load_duration_secs", "gauge", "Duration of loading the model", lambda s: (({}, s.serving.load_s),)
    ),
    Family(
        "nv_inference_first_response_histogram_ms",
        "histogram",
        "Time from entering the queue to the first response of a decoupled model",
        _first_response,
    ),
    Family(
        "oriel_request_duration_seconds",
        "histogram",
        "Time from arrival to answer of the requests that were answered",
        _latency,
    ),
    Family("oriel_requests_total", "counter", "Requests by outcome", _requests),
    Family("oriel_queue_depth", "gauge", "Requests that wait, by priority (0 is the most urgent)", _depth),
    Family(
        "oriel_expected_wait_seconds",
        "gauge",
        "Estimated wait of a new request of that priority",
        _expected_wait,
    ),
    Family("oriel_batch_rows", "histogram", "Rows of executed batches", _number(lambda s: s.sizes)),
    Family(
        "oriel_batches_released_total",
        "counter",
        "Batches by the reason for which they were started",
        lambda s: _by("reason", sorted(s.statistics.releases.items())),
    ),
    Family("oriel_instances", "gauge", "Batches that may run at once, and what decides that number", _instances),
    Family(
        "oriel_instances_running",
        "gauge",
        "Batches that run",
        _total(lambda each: each.batcher.running),
    ),
    Family("oriel_sequences", "gauge", "Sequences that hold a slot of an instance, and that wait for one", _sequences),
    Family(
        "oriel_sequences_ended_total",
        "counter",
        "Sequences by how they ended",
        lambda s: _by("how", sorted(s.statistics.sequences.items())),
    ),
    Family("oriel_language_calls", "gauge", "Calls of a language model that run, wait or are paused", _language),
    Family("oriel_language_cache_use_ratio", "gauge", "Share of a language model's cache in use", _cache_use),
    Family("oriel_language_tokens_total", "counter", "Tokens of a language model by kind", _tokens),
    Family("oriel_language_pauses_total", "counter", "Pauses of calls for more urgent ones", _pauses),
    Family("oriel_artefact_state", "gauge", "1 for the state of a model's compiled artefact", _artefact),
    Family("oriel_model_drift_psi", "gauge", "Distance of the latest sampled rows from the reference", _drift(0)),
    Family("oriel_model_drift_noise", "gauge", "The distance that chance alone makes on average", _drift(1)),
    Family("oriel_model_confidence", "histogram", "Share of the most likely class of sampled rows", _confidence),
    Family("oriel_model_odd_values_total", "counter", "Odd values of sampled rows by kind", _odd_values),
    Family("oriel_model_sampled_rows_total", "counter", "Rows to sample by what became of them", _sampled),
)


def _summary(name: str, text: str, shares: Sequence[float]) -> Family:
    def read(source: Source) -> Samples:
        found = source.statistics.summaries
        return () if found is None else [({}, partial(found.by_name[name].lines, shares))]

    return Family(f"nv_inference_{name}_summary_us", "summary", f"{text}, in microseconds", read)


# The server's own --------------------------------------------------------------------------------------------------


def _by_both(labels: tuple[str, str], values: Mapping[tuple[str, str], float]) -> Samples:
    return ((dict(zip(labels, of, strict=True)), value) for of, value in sorted(values.items()))


def _server(surface: Surface, host: HostLoad, gpus: Sequence[GpuLoad]) -> Iterator[Own]:
    if (busy := host.utilization()) is not None:
        yield "nv_cpu_utilization", "gauge", "Busy share of the machine's processors", [({}, busy)]
    if (memory := host.memory_bytes()) is not None:
        yield "nv_cpu_memory_total_bytes", "gauge", "Memory of the machine", [({}, memory[0])]
        yield "nv_cpu_memory_used_bytes", "gauge", "Memory of the machine that is in use", [({}, memory[1])]
    yield from _gpus(gpus)
    catalog, control = surface.catalog, surface.control
    stores = [each.store for each in control.repositories if isinstance(each.store, RemoteStore)]
    failures = {reason: sum(each.counts.failures[reason] for each in stores) for reason in FAILURES}
    up = control.repositories.up()
    fallbacks = (
        ({"model": found.name, "version": str(found.serving), "newest": str(found.newest)}, 1)
        for found in catalog.fallbacks()
    )
    text = "Whether every model repository could be read"
    yield "oriel_model_repository_up", "gauge", text, [({}, int(all(up.values())))]
    each_up = _by("repository", ((name, int(each)) for name, each in up.items()))
    yield "oriel_model_store_up", "gauge", "Whether a model repository could be read", each_up
    text = "Bytes read from object stores"
    yield "oriel_model_store_read_bytes_total", "counter", text, [({}, sum(each.counts.read_bytes for each in stores))]
    text = "Bytes from object stores kept on this machine"
    yield "oriel_model_cache_bytes", "gauge", text, [({}, sum(each.cache_bytes for each in stores))]
    text = "Failed reads from object stores by reason"
    yield "oriel_model_store_failures_total", "counter", text, _by("reason", failures.items())
    failed = _by_both(("model", "reason"), control.rollout.failures.counts)
    yield "oriel_model_load_failures_total", "counter", "Refused loads by reason", failed
    text = "1 if no version serves because one could not be loaded"
    yield "oriel_model_unavailable", "gauge", text, _by("model", ((model, 1) for model in catalog.unavailable()))
    text = "1 if an older version serves because the newest cannot be loaded"
    yield "oriel_model_fallback", "gauge", text, fallbacks
    if (answers := surface.answers) is not None:
        used = answers.size_bytes / answers.max_bytes
        yield "nv_cache_util", "gauge", "Share of the response cache in use", [({}, used)]
        yield "nv_cache_num_entries", "gauge", "Answers in the response cache", [({}, len(answers))]
        yield "nv_cache_num_evictions", "gauge", "Answers that made room for others", [({}, answers.evicted)]
    yield from _memory(surface)
    yield from _artefacts(control.artefacts.counts if control.artefacts is not None else ArtefactCounts())
    text = "Lines of the access log that were lost"
    log = surface.meter.log
    yield "oriel_access_log_dropped_total", "counter", text, [({}, log.dropped if log is not None else 0)]
    for family, text, values in surface.usage.families():
        yield f"{family}_total", "counter", text, _by("what", values.items())


def _gpus(gpus: Sequence[GpuLoad]) -> Iterator[Own]:
    """Yield Triton's families of GPUs; none on a machine without one."""
    if not gpus:
        return
    families: tuple[tuple[str, str, str, Callable[[GpuLoad], float | None]], ...] = (
        ("nv_gpu_utilization", "gauge", "Share of time in which the GPU computed", lambda gpu: gpu.utilization),
        ("nv_gpu_memory_total_bytes", "gauge", "Memory of the GPU", lambda gpu: gpu.memory_total),
        ("nv_gpu_memory_used_bytes", "gauge", "Memory of the GPU that is in use", lambda gpu: gpu.memory_used),
        ("nv_gpu_power_usage", "gauge", "Power that the GPU takes, in watts", lambda gpu: gpu.power),
        ("nv_gpu_power_limit", "gauge", "The most power that the GPU may take, in watts", lambda gpu: gpu.power_limit),
        ("nv_energy_consumption", "counter", "Energy that the GPU has taken, in joules", lambda gpu: gpu.energy),
    )
    for name, kind, text, read in families:
        values = [(gpu.uuid, value) for gpu in gpus if (value := read(gpu)) is not None]
        yield name, kind, text, _by("gpu_uuid", values)


def _memory(surface: Surface) -> Iterator[Own]:
    """Yield the families of models on demand and of their memory."""
    memory, demand = surface.control.memory, surface.control.demand
    by_device = (
        ("oriel_model_memory_budget_bytes", "Memory that models may take"),
        ("oriel_model_memory_used_bytes", "Memory of models that load, are loaded or have not left yet"),
        ("oriel_model_memory_wanted_bytes", "Memory of models that found no room in the last minute"),
    )
    for index, (name, text) in enumerate(by_device):
        sizes = [(device, each[index]) for device, each in sorted(memory.bytes.items())]
        yield name, "gauge", text, _by("device", sizes)
    by_model = (
        ("oriel_model_evictions_total", "counter", "Models taken out of memory for others", memory.evictions),
        ("oriel_model_memory_refusals_total", "counter", "Loads that found no room", memory.refusals),
        ("oriel_model_load_queue_depth", "gauge", "Requests that wait for their model to load", demand.waiting),
    )
    for name, kind, text, found in by_model:
        yield name, kind, text, _by("model", sorted(found.items()))


def _artefacts(counts: ArtefactCounts) -> Iterator[Own]:
    """Yield the families of compiled artefacts."""
    outcomes = _by_both(("compiler", "outcome"), counts.outcomes)
    yield "oriel_artefacts_total", "counter", "Artefacts that were built, found or refused, by outcome", outcomes
    build_s = _by("compiler", sorted(counts.build_s.items()))
    yield "oriel_artefact_build_seconds_total", "counter", "Time of the builds that succeeded", build_s
    rollbacks = _by("model", sorted(counts.rollbacks.items()))
    text = "Artefacts that failed in service and were taken out of it"
    yield "oriel_artefact_rollbacks_total", "counter", text, rollbacks
    yield "oriel_artefact_folder_bytes", "gauge", "Bytes of artefacts in their folder", [({}, counts.size_bytes)]


def _usage(devices: Devices) -> Iterator[Own]:
    """Yield the families of the use of devices. A tenant is charged when a batch ends, so what runs now is in the busy
    seconds alone.
    """
    book = devices.book
    busy, charged_ns = [], 0
    for device in devices.all():
        busy_ns, its_charged_ns = device.read()
        charged_ns += its_charged_ns
        busy.append(({"device": device.name, "class": device.device_class}, busy_ns / 1e9))
    text = "Time in which at least one batch ran on a device"
    yield "oriel_device_busy_seconds_total", "counter", text, busy
    charged = (
        (
            {"tenant": key.tenant, "tier": key.tier, "target": key.target, "class": key.device_class},
            row.device_ns / 1e9,
        )
        for row in by_label(book.rows())
        for key in (row.key,)
    )
    text = "Device time that tenants are charged for, without overlap"
    yield "oriel_usage_device_seconds_total", "counter", text, charged
    unbilled = ((why, ns / 1e9) for why, ns in unbilled_ns(book.rows()).items())
    text = "Device time that no tenant is charged for, by reason"
    yield "oriel_usage_unbilled_device_seconds_total", "counter", text, _by("why", unbilled)
    ratio = abs(charged_ns - book.device_ns) / charged_ns if charged_ns else 0.0
    text = "Share of the charged device time that no row accounts for"
    yield "oriel_usage_unreconciled_ratio", "gauge", text, [({"unit": "inference"}, ratio)]
