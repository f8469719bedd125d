"""The metrics, read from the models' own counters on request: Triton's names, and Oriel's beside them.

Every family is one line of FAMILIES or of the server's own families; `docs/metrics.md` has the same lines. A version
that is loaded again continues to count; a version that leaves keeps its series until its last request has ended.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from oriel_inference.artefacts.records import ArtefactCounts
from oriel_inference.backends.nvml import GpuLoad
from oriel_inference.batching.device import Devices
from oriel_inference.batching.statistics import Statistics
from oriel_inference.catalog import Catalog, ServingModel
from oriel_inference.errors import Outcome
from oriel_inference.host import HostLoad
from oriel_inference.quality.sampler import SAMPLE_RESULTS, VersionQuality
from oriel_inference.quality.tensor import ODD_KINDS
from oriel_inference.stores.remote import StoreCounts
from oriel_policies.metering.usage import UsageRow, by_label, unbilled_ns
from oriel_wire.observe.exemplars import Exemplars
from oriel_wire.observe.telemetry import head, histogram, label_text, pieces
from oriel_wire.usage.lines import LedgerCounts

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


@dataclass(frozen=True, slots=True)
class Source:
    """The labels and counters of one version. queues: the schedulers of what serves, and of what it replaced and still
    finishes. exemplars: traces of its requests; None where the text cannot show them.
    """

    labels: str
    statistics: Statistics
    serving: ServingModel
    queues: tuple[ServingModel, ...]
    exemplars: Exemplars[tuple[str, str, str]] | None


@dataclass(frozen=True, slots=True)
class Family:
    """One metric of every version. lines: returns its samples, complete with name and labels."""

    name: str
    kind: str
    text: str
    lines: Callable[[str, Source], Iterator[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCounts:
    """Counts outside the versions.

    refused: (model, tier, outcome) -> requests that reached no version.
    failed_loads: (model, reason) -> times.
    memory: device -> its budget, the bytes of models, the bytes of models that found no room in the last minute.
    evictions, memory_refusals: model -> times.
    load_queues: model -> requests that wait for it to be loaded.
    usage: counts of the usage ledger.
    exemplars: traces of answered requests by (model, version, tier).
    artefacts: counts of builds and checks.
    gpus: the load of each.
    """

    refused: Mapping[tuple[str, str, Outcome], int]
    failed_loads: Mapping[tuple[str, str], int]
    repository_up: bool
    repositories_up: Mapping[str, bool]
    stores: StoreCounts
    log_lines_dropped: int
    memory: Mapping[str, tuple[int, int, int]]
    evictions: Mapping[str, int]
    memory_refusals: Mapping[str, int]
    load_queues: Mapping[str, int]
    usage: LedgerCounts
    exemplars: Exemplars[tuple[str, str, str]]
    artefacts: ArtefactCounts
    gpus: Sequence[GpuLoad]


def exposition(
    catalog: Catalog, counts: ServerCounts, host: HostLoad, devices: Devices, *, openmetrics: bool
) -> Iterator[str]:
    """Yield the text in pieces of at most PIECE_LINES lines, so that a caller on the loop can let it go on in
    between. OpenMetrics needs `telemetry.END` behind them.
    """
    sources = _sources(catalog, counts.exemplars if openmetrics else None)
    for family in FAMILIES:
        yield head(family.name, family.kind, family.text, openmetrics=openmetrics)
        lines = (line for source in sources for line in family.lines(family.name, source))
        if family.name == "oriel_requests_total":
            yield from pieces(_refused(family.name, counts), size=PIECE_LINES)
        yield from pieces(lines, size=PIECE_LINES)
    own = (*_server(counts, catalog, host), *_usage(devices))
    yield from pieces(_own(own, openmetrics), size=PIECE_LINES)


def _sources(catalog: Catalog, exemplars: Exemplars[tuple[str, str, str]] | None) -> list[Source]:
    found: dict[tuple[str, str], list[ServingModel]] = {}
    for model in (*catalog.serving(), *catalog.leaving):
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
            exemplars,
        )
        for (name, version), models in sorted(found.items())
    ]


# Families of every version -----------------------------------------------------------------------------------------


def _number(read: Callable[[Statistics], int]) -> Callable[[str, Source], Iterator[str]]:
    def lines(name: str, source: Source) -> Iterator[str]:
        yield f"{name}{{{source.labels}}} {read(source.statistics)}\n"

    return lines


def _failures(name: str, source: Source) -> Iterator[str]:
    found = Counter(dict.fromkeys(_ALL_REASONS, 0))
    for outcome, count in source.statistics.failures.items():
        found[_REASONS.get(outcome, "OTHER")] += count
    for reason, count in found.items():
        yield f'{name}{{{source.labels},reason="{reason}"}} {count}\n'


def _pending(name: str, source: Source) -> Iterator[str]:
    yield f"{name}{{{source.labels}}} {sum(model.batcher.pending for model in source.queues)}\n"


def _instances(name: str, source: Source) -> Iterator[str]:
    by = "demand" if source.serving.spec.by_demand else "configuration"
    yield f'{name}{{{source.labels},by="{by}"}} {source.serving.spec.instances}\n'


def _running(name: str, source: Source) -> Iterator[str]:
    yield f"{name}{{{source.labels}}} {sum(model.batcher.running for model in source.queues)}\n"


def _load_seconds(name: str, source: Source) -> Iterator[str]:
    yield f"{name}{{{source.labels}}} {source.serving.load_s!r}\n"


def _first_response(name: str, source: Source) -> Iterator[str]:
    if source.serving.spec.decoupled:
        yield from histogram(name, source.labels, source.statistics.first_response)


def _latency(name: str, source: Source) -> Iterator[str]:
    serving, exemplars = source.serving, source.exemplars
    for tier, found in sorted(source.statistics.tiers.items()):
        examples = None if exemplars is None else exemplars.of((serving.spec.name, serving.version, tier))
        yield from histogram(name, f'{source.labels},tier="{tier}"', found.latency, examples)


def _requests(name: str, source: Source) -> Iterator[str]:
    for tier, found in sorted(source.statistics.tiers.items()):
        counts = {Outcome.OK: found.latency.count, **found.refusals}
        for outcome, count in counts.items():
            yield f'{name}{{{source.labels},tier="{tier}",reason="{outcome.value}"}} {count}\n'


def _refused(name: str, counts: ServerCounts) -> Iterator[str]:
    for (model, tier, outcome), count in counts.refused.items():
        labels = label_text({"model": model, "version": "", "tier": tier, "reason": outcome.value})
        yield f"{name}{{{labels}}} {count}\n"


def _depth(name: str, source: Source) -> Iterator[str]:
    depths: Counter[int] = Counter()
    for model in source.queues:
        for band, items, _ in model.batcher.depths():
            depths[band] += items
    for band, items in sorted(depths.items()):
        yield f'{name}{{{source.labels},priority="{band}"}} {items}\n'


def _expected_wait(name: str, source: Source) -> Iterator[str]:
    for band, _, seconds in source.serving.batcher.depths():
        if seconds is not None:
            yield f'{name}{{{source.labels},priority="{band}"}} {round(seconds, 6)!r}\n'


def _batch_rows(name: str, source: Source) -> Iterator[str]:
    yield from histogram(name, source.labels, source.statistics.sizes)


def _releases(name: str, source: Source) -> Iterator[str]:
    for reason, count in sorted(source.statistics.releases.items()):
        yield f'{name}{{{source.labels},reason="{reason}"}} {count}\n'


def _artefact(name: str, source: Source) -> Iterator[str]:
    if (life := source.serving.artefact) is not None:
        yield f'{name}{{{source.labels},compiler="{life.compiler}",state="{life.state.value}"}} 1\n'


def _quality(source: Source) -> VersionQuality | None:
    sampler = source.statistics.sampler
    return sampler if isinstance(sampler, VersionQuality) else None


def _of_tensor(source: Source, tensor: str) -> str:
    return f"{source.labels},{label_text({'tensor': tensor})}"


def _drift(index: int) -> Callable[[str, Source], Iterator[str]]:
    def lines(name: str, source: Source) -> Iterator[str]:
        if (quality := _quality(source)) is not None:
            for tensor, found in quality.drift().items():
                yield f"{name}{{{_of_tensor(source, tensor)}}} {found[index]!r}\n"

    return lines


def _confidence(name: str, source: Source) -> Iterator[str]:
    if (quality := _quality(source)) is not None:
        for tensor, totals in quality.totals.items():
            if totals.confidence.count:
                yield from histogram(name, _of_tensor(source, tensor), totals.confidence)


def _odd_values(name: str, source: Source) -> Iterator[str]:
    if (quality := _quality(source)) is not None:
        for tensor, totals in quality.totals.items():
            for kind in ODD_KINDS:
                yield f'{name}{{{_of_tensor(source, tensor)},kind="{kind}"}} {totals.odd[kind]}\n'


def _sampled(name: str, source: Source) -> Iterator[str]:
    if (quality := _quality(source)) is not None:
        for result in SAMPLE_RESULTS:
            yield f'{name}{{{source.labels},result="{result}"}} {quality.samples[result]}\n'


FAMILIES = (
    Family("nv_inference_request_success", "counter", "Requests answered", _number(lambda s: s.success.count)),
    Family("nv_inference_request_failure", "counter", "Requests without an answer", _failures),
    Family("nv_inference_count", "counter", "Rows executed", _number(lambda s: s.inferences)),
    Family("nv_inference_exec_count", "counter", "Batches executed", _number(lambda s: s.executions)),
    Family(
        "nv_inference_request_duration_us",
        "counter",
        "Total time from entering the queue to the answer",
        _number(lambda s: s.success.ns // 1000),
    ),
    Family(
        "nv_inference_queue_duration_us", "counter", "Total time in the queue", _number(lambda s: s.queue.ns // 1000)
    ),
    Family(
        "nv_inference_compute_input_duration_us",
        "counter",
        "Total time of assembling batches, counted once per request",
        _number(lambda s: s.stages.input.ns // 1000),
    ),
    Family(
        "nv_inference_compute_infer_duration_us",
        "counter",
        "Total time of executing batches, counted once per request",
        _number(lambda s: s.stages.infer.ns // 1000),
    ),
    Family(
        "nv_inference_compute_output_duration_us",
        "counter",
        "Total time of splitting batches, counted once per request",
        _number(lambda s: s.stages.output.ns // 1000),
    ),
    Family("nv_inference_pending_request_count", "gauge", "Requests that wait", _pending),
    Family("nv_model_load_duration_secs", "gauge", "Duration of loading the model", _load_seconds),
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
    Family("oriel_batch_rows", "histogram", "Rows of executed batches", _batch_rows),
    Family("oriel_batches_released_total", "counter", "Batches by the reason for which they were started", _releases),
    Family("oriel_instances", "gauge", "Batches that may run at once, and what decides that number", _instances),
    Family("oriel_instances_running", "gauge", "Batches that run", _running),
    Family("oriel_artefact_state", "gauge", "1 for the state of a model's compiled artefact", _artefact),
    Family("oriel_model_drift_psi", "gauge", "Distance of the latest sampled rows from the reference", _drift(0)),
    Family("oriel_model_drift_noise", "gauge", "The distance that chance alone makes on average", _drift(1)),
    Family("oriel_model_confidence", "histogram", "Share of the most likely class of sampled rows", _confidence),
    Family("oriel_model_odd_values_total", "counter", "Odd values of sampled rows by kind", _odd_values),
    Family("oriel_model_sampled_rows_total", "counter", "Rows to sample by what became of them", _sampled),
)


# The server's own --------------------------------------------------------------------------------------------------

Samples = Iterable[tuple[Mapping[str, str], float]]  # labels and value
Own = tuple[str, str, str, Samples]  # a metric's name, kind and text


def _own(metrics: Iterable[Own], openmetrics: bool) -> Iterator[str]:
    for name, kind, text, samples in metrics:
        yield head(name, kind, text, openmetrics=openmetrics)
        for labels, value in samples:
            yield f"{name}{{{label_text(labels)}}} {value!r}\n" if labels else f"{name} {value!r}\n"


def _by(label: str, values: Iterable[tuple[str, float]]) -> Samples:
    return (({label: of}, value) for of, value in values)


def _by_both(labels: tuple[str, str], values: Mapping[tuple[str, str], float]) -> Samples:
    return ((dict(zip(labels, of, strict=True)), value) for of, value in sorted(values.items()))


def _server(counts: ServerCounts, catalog: Catalog, host: HostLoad) -> Iterator[Own]:
    if (busy := host.utilization()) is not None:
        yield "nv_cpu_utilization", "gauge", "Busy share of the machine's processors", [({}, busy)]
    if (memory := host.memory_bytes()) is not None:
        yield "nv_cpu_memory_total_bytes", "gauge", "Memory of the machine", [({}, memory[0])]
        yield "nv_cpu_memory_used_bytes", "gauge", "Memory of the machine that is in use", [({}, memory[1])]
    yield from _gpus(counts.gpus)
    stores, up = counts.stores, int(counts.repository_up)
    each_up = _by("repository", ((name, int(each)) for name, each in counts.repositories_up.items()))
    failed = _by_both(("model", "reason"), counts.failed_loads)
    fallbacks = (
        ({"model": found.name, "version": str(found.serving), "newest": str(found.newest)}, 1)
        for found in catalog.fallbacks()
    )
    yield "oriel_model_repository_up", "gauge", "Whether every model repository could be read", [({}, up)]
    yield "oriel_model_store_up", "gauge", "Whether a model repository could be read", each_up
    text = "Bytes read from object stores"
    yield "oriel_model_store_read_bytes_total", "counter", text, [({}, stores.read_bytes)]
    text = "Bytes from object stores kept on this machine"
    yield "oriel_model_cache_bytes", "gauge", text, [({}, stores.cache_bytes)]
    text = "Failed reads from object stores by reason"
    yield "oriel_model_store_failures_total", "counter", text, _by("reason", stores.failures.items())
    yield "oriel_model_load_failures_total", "counter", "Refused loads by reason", failed
    text = "1 if no version serves because one could not be loaded"
    yield "oriel_model_unavailable", "gauge", text, _by("model", ((model, 1) for model in catalog.unavailable()))
    text = "1 if an older version serves because the newest cannot be loaded"
    yield "oriel_model_fallback", "gauge", text, fallbacks
    yield from _memory(counts)
    yield from _artefacts(counts.artefacts)
    text = "Lines of the access log that were lost"
    yield "oriel_access_log_dropped_total", "counter", text, [({}, counts.log_lines_dropped)]
    for family, text, values in counts.usage.families():
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


def _memory(counts: ServerCounts) -> Iterator[Own]:
    """Yield the families of models on demand and of their memory."""
    by_device = (
        ("oriel_model_memory_budget_bytes", "Memory that models may take"),
        ("oriel_model_memory_used_bytes", "Memory of models that load, are loaded or have not left yet"),
        ("oriel_model_memory_wanted_bytes", "Memory of models that found no room in the last minute"),
    )
    for index, (name, text) in enumerate(by_device):
        sizes = [(device, each[index]) for device, each in sorted(counts.memory.items())]
        yield name, "gauge", text, _by("device", sizes)
    by_model = (
        ("oriel_model_evictions_total", "counter", "Models taken out of memory for others", counts.evictions),
        ("oriel_model_memory_refusals_total", "counter", "Loads that found no room", counts.memory_refusals),
        ("oriel_model_load_queue_depth", "gauge", "Requests that wait for their model to load", counts.load_queues),
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
    charged = ((_usage_labels(row), row.device_ns / 1e9) for row in by_label(book.rows()))
    text = "Device time that tenants are charged for, without overlap"
    yield "oriel_usage_device_seconds_total", "counter", text, charged
    unbilled = ((why, ns / 1e9) for why, ns in unbilled_ns(book.rows()).items())
    text = "Device time that no tenant is charged for, by reason"
    yield "oriel_usage_unbilled_device_seconds_total", "counter", text, _by("why", unbilled)
    ratio = abs(charged_ns - book.device_ns) / charged_ns if charged_ns else 0.0
    text = "Share of the charged device time that no row accounts for"
    yield "oriel_usage_unreconciled_ratio", "gauge", text, [({"unit": "inference"}, ratio)]


def _usage_labels(row: UsageRow) -> dict[str, str]:
    """Return the labels of a row of a tenant's use."""
    key = row.key
    return {"tenant": key.tenant, "tier": key.tier, "target": key.target, "class": key.device_class}
