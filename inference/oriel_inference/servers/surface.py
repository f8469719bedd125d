"""What both v2 servers share: the models, whether the server is ready, what it says of itself."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from oriel_inference.backends import memory_bytes
from oriel_inference.control import ModelControl
from oriel_inference.dataplane import Dataplane
from oriel_inference.errors import ModelNotReady, UnknownModel
from oriel_inference.lifecycle import Catalog
from oriel_inference.log_settings import LogSettings
from oriel_inference.servers.meter import Meter
from oriel_wire.distribution import installed_version
from oriel_wire.engine.peers import TrustedPeers
from oriel_wire.trace import SpanSink
from oriel_wire.v2.proto import v2_pb2

__all__ = ["EXTENSIONS", "SERVER_NAME", "SERVER_VERSION", "Surface"]

SERVER_NAME = "oriel"
SERVER_VERSION = installed_version()
EXTENSIONS = (
    "classification",
    "schedule_policy",
    "model_configuration",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "model_repository",
    "model_repository(unload_dependents)",
    "logging",
)


@dataclass(slots=True, kw_only=True)
class Surface:
    """Single writer: the app, which sets `stopping` when the drain begins.

    under_way: requests that have begun and are not answered, of all servers.
    """

    catalog: Catalog
    control: ModelControl
    dataplane: Dataplane
    peers: TrustedPeers
    sink: SpanSink
    meter: Meter
    log: LogSettings
    default_timeout_s: float
    strict_readiness: bool | Literal["any"] = True
    stopping: bool = False
    server_id: str = SERVER_NAME
    under_way: Callable[[], int] = lambda: 0

    def readiness(self) -> tuple[bool, str]:
        """Whether requests are welcome, and if not why."""
        if self.stopping:
            return False, f"the server is shutting down, {self.under_way()} call(s) under way"
        if self.catalog.loading:
            return False, "models are being loaded"
        lacks = ""
        if self.catalog.unseen:
            lacks = f"the model repository {self.catalog.unseen[0]} could not be read yet"
        if missing := self.catalog.missing():
            lacks = f"model {missing!r} is not ready"
        if not self.strict_readiness or not lacks:
            return True, ""
        # "any": a bad upload does not take the other models away, yet a server on which nothing loads (for want of a
        # driver, of a library) takes nobody's place in a rollout.
        if self.strict_readiness is True or not self.catalog.serves_any():
            return False, lacks
        return True, ""

    def model_ready(self, name: str, version: str) -> bool:
        """Whether that version serves. Raises UnknownModel."""
        try:
            self.catalog.get(name, version)
        except ModelNotReady:
            return False
        return not self.stopping

    def statistics(self, name: str, version: str) -> v2_pb2.ModelStatisticsResponse:
        """Of one version, of all versions of a model, or of everything if no name is given. Raises UnknownModel."""
        if name:
            self.catalog.get(name, version)
        response = v2_pb2.ModelStatisticsResponse()
        for serving in self.catalog.serving():
            if name in ("", serving.spec.name) and version in ("", serving.version):
                memory = sum(memory_bytes(session) for session in serving.sessions)
                statistics = serving.batcher.statistics
                response.model_stats.append(statistics.message(serving.spec.name, serving.version, memory_bytes=memory))
        if name and not response.model_stats:
            raise UnknownModel("no statistics for that version")
        return response
