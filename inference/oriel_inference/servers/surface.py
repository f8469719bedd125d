"""State shared by both v2 servers: the models, whether the server is ready, and its metadata."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from oriel_inference.backends.python.model_metrics import ModelMetrics
from oriel_inference.batching.device import Devices
from oriel_inference.catalog import Catalog
from oriel_inference.dataplane.dataplane import Dataplane
from oriel_inference.errors import ModelNotReady, UnknownModel
from oriel_inference.language.scheduler import LanguageScheduler
from oriel_inference.log_settings import LogSettings
from oriel_inference.metrics_choice import MetricsChoice
from oriel_inference.models.control import ModelControl
from oriel_inference.quality.sampler import Quality
from oriel_inference.servers.forwarded_headers import ForwardedHeaders
from oriel_inference.servers.meter import Meter
from oriel_inference.servers.regions import Regions, SharedInputs
from oriel_inference.servers.traces import TraceSettings
from oriel_policies.upstreams.answer_cache import AnswerCache
from oriel_wire.distribution import installed_version
from oriel_wire.engine.peers import TrustedPeers
from oriel_wire.observe.semantics import NOWHERE
from oriel_wire.observe.trace import SpanSink
from oriel_wire.usage.lines import LedgerCounts
from oriel_wire.v2.messages import Array
from oriel_wire.v2.proto import v2_pb2

SERVER_NAME = "oriel"
STATISTICS_PER_TURN = 64  # as JSON these take 3 ms
SERVER_VERSION = installed_version()
EXTENSIONS = (
    "classification",
    "sequence",
    "sequence(string_id)",
    "schedule_policy",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "statistics",
)
# Extensions that a gateway offers to operators only: callers through a gateway do not see them.
OPERATOR_EXTENSIONS = ("model_repository", "model_repository(unload_dependents)", "trace", "logging")


@dataclass(slots=True, kw_only=True)
class Surface:
    """The server's state. Single writer: the app, which sets `stopping` when the drain begins.

    under_way: returns the requests of all servers that have begun and are not answered.
    usage: counts of the usage ledger, if there is one. grpc_address: address and port of the gRPC listener.
    quality: samples of what the models get and answer. regions: shared memory; None if its use is not allowed.
    metrics: latencies that are shown.
    http_headers, grpc_headers: choose the headers that models get as parameters; None if they get none.
    answers: the response cache; None if there is none.
    model_metrics: the metrics that Python models define.
    """

    catalog: Catalog
    control: ModelControl
    dataplane: Dataplane
    peers: TrustedPeers
    sink: SpanSink
    meter: Meter
    devices: Devices
    quality: Quality
    log: LogSettings
    model_metrics: ModelMetrics
    traces: TraceSettings
    default_timeout_s: float
    strict_readiness: bool | Literal["any"] = True
    stopping: bool = False
    server_id: str = SERVER_NAME
    under_way: Callable[[], int] = lambda: 0
    usage: LedgerCounts = field(default_factory=LedgerCounts)
    grpc_address: tuple[str, int] = NOWHERE
    regions: Regions | None = None
    metrics: MetricsChoice = MetricsChoice()
    http_headers: ForwardedHeaders | None = None
    grpc_headers: ForwardedHeaders | None = None
    answers: AnswerCache[Sequence[Array]] | None = None

    def extensions(self, *, of_tenant: bool) -> tuple[str, ...]:
        """Return the extensions that a caller may use. of_tenant: True if a gateway sent the call for a tenant."""
        if of_tenant:
            return EXTENSIONS
        shared = ("system_shared_memory",) if self.regions is not None else ()
        return EXTENSIONS + OPERATOR_EXTENSIONS + shared

    def shared_inputs(self, *, of_tenant: bool) -> SharedInputs | None:
        """Return the reader of one request's inputs in shared memory; None if the caller may not use any."""
        return None if of_tenant or self.regions is None else SharedInputs(self.regions)

    def readiness(self) -> tuple[bool, str]:
        """Return whether requests are accepted, and if not, why."""
        if self.stopping:
            return False, f"the server is shutting down, {self.under_way()} call(s) in progress"
        if self.catalog.loading:
            return False, "models are being loaded"
        lacks = ""
        if self.catalog.unseen:
            lacks = f"the model repository {self.catalog.unseen[0]} could not be read yet"
        if missing := self.catalog.missing():
            lacks = f"model {missing!r} is not ready"
        if not self.strict_readiness or not lacks:
            return True, ""
        # "any": a bad upload does not take the other models out of service, and a server on which nothing loads
        # (because a driver or a library is missing) does not replace another one in a rollout.
        if self.strict_readiness is True or not self.catalog.serves_any():
            return False, lacks
        return True, ""

    def model_ready(self, name: str, version: str) -> bool:
        """Return whether that version serves. Raises UnknownModel."""
        try:
            self.catalog.get(name, version)
        except ModelNotReady:
            return False
        return not self.stopping

    def execution(self, name: str, version: str) -> tuple[str, str]:
        """Return the execution provider of a version, or of the newest that serves, and the state of its artefact.

        "" for each that there is not.
        """
        found = [each for each in self.catalog.serving() if each.spec.name == name and version in ("", each.version)]
        if not found:
            return "", ""
        life = found[-1].artefact
        return found[-1].provider, life.state.value if life is not None else ""

    def language_load(self) -> str:
        """Return the calls of the language models as `x-oriel-language` has them; "" without such a model."""
        calls: dict[str, list[int]] = {}
        cache_use, made = 0.0, 0
        for scheduler in [each.batcher for each in self.catalog.serving()]:
            if isinstance(scheduler, LanguageScheduler):
                cache_use = max(cache_use, scheduler.cache_use)
                made += scheduler.statistics.language["generated"]
                for band, found in scheduler.states().items():
                    calls[str(band)] = [a + b for a, b in zip(calls.get(str(band), (0, 0, 0)), found, strict=True)]
        reported = {"cache": round(cache_use, 3), "calls": calls, "made": made}
        return msgspec.json.encode(reported).decode() if calls else ""

    async def statistics(self, name: str, version: str) -> AsyncIterator[v2_pb2.ModelStatistics]:
        """Give the statistics of one version, of all versions of a model, or of everything if no name is given. The
        loop serves others after every few. Raises UnknownModel.
        """
        if name:
            self.catalog.get(name, version)
        count = 0
        for serving in self.catalog.serving():
            if name in ("", serving.spec.name) and version in ("", serving.version):
                memory = sum(session.memory_bytes() for session in serving.sessions)
                yield serving.batcher.statistics.message(serving.spec.name, serving.version, memory_bytes=memory)
                count += 1
                if not count % STATISTICS_PER_TURN:
                    await asyncio.sleep(0)
        if name and not count:
            raise UnknownModel("no statistics for that version")
