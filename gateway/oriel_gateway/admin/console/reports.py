"""Asks servers, while somebody looks, for what the gateway does not see: batches, providers, artefacts and versions.

One server of each of the busiest models and services of the last minute is asked: for the model's statistics (v2
protocol), so that unmodified Triton servers answer too, or for the description of the service. One server of each pool
is asked if it is ready: the answer names the calls of its language models. Answers are bounded in bytes, time and
number.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Final

import msgspec

from oriel_gateway.pools.pool import PoolGate
from oriel_gateway.routing.targets import Target
from oriel_wire.context import ARTEFACT, LANGUAGE, PROVIDER
from oriel_wire.engine.client import HttpClient, HttpResponse
from oriel_wire.errors import UpstreamError

EVERY_S: Final = 5.0
ANSWER_S: Final = 1.0
MAX_TARGETS: Final = 24
MAX_ANSWER_BYTES: Final = 256 * 1024


class _Statistics(msgspec.Struct):
    """One version of a model. Counts are text where a server writes protobuf's JSON."""

    version: str = ""
    inference_count: int | str = 0
    execution_count: int | str = 0
    last_inference: int | str = 0


class _Models(msgspec.Struct):
    model_stats: list[_Statistics]


class _Version(msgspec.Struct):
    version: str = ""
    weight: float = 0.0


class _Service(msgspec.Struct):
    """A service. versions: the versions among which calls are divided; empty if there is one."""

    version: str = ""
    versions: list[_Version] = []


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A server's report of one of its models or services.

    version: the version; several are divided by commas. provider, artefact, rows: only models have them.
    artefact: the state of the compiled artefact that the model asks for; "" if it asks for none.
    rows: the mean rows of a batch, since the report before, or since the server started if there was none.
    was: the version whose place this one has taken while somebody looked; "" if that has not happened.
    """

    version: str
    provider: str = ""
    artefact: str = ""
    rows: float | None = None
    was: str = ""


class Language(msgspec.Struct):
    """The calls of one server's language models. cache: the part of the cache in use, 0 to 1.

    calls: band -> the numbers of those that run, wait and are paused.
    made: tokens made since the server started; made_s: tokens a second since the report before, 0.0 if unknown.
    """

    cache: float
    calls: dict[str, tuple[int, int, int]]
    made: float = 0.0
    made_s: float = 0.0


class Reports:
    """The latest reports by target and by pool. Single writer: the loop."""

    def __init__(self) -> None:
        self.targets: dict[str, Report] = {}
        self.pools: dict[str, Language] = {}
        self._counts: dict[str, tuple[int, int]] = {}
        self._made: dict[tuple[str, int], tuple[float, float]] = {}  # server -> time and count of its latest report

    async def ask(self, targets: Iterable[Target], pools: Mapping[str, PoolGate]) -> None:
        """Ask once for each of the first `MAX_TARGETS` models and services; forget others."""
        chosen = [target for target in targets if target.kind in _PATHS and target.name][:MAX_TARGETS]
        routes = {target.route for target in chosen}
        self.targets = {route: report for route, report in self.targets.items() if route in routes}
        self._counts = {route: counts for route, counts in self._counts.items() if route in routes}
        for target in chosen:
            gate = pools.get(target.pool)
            usable = gate.endpoints.usable if gate is not None else ()
            if usable:
                await self._ask(target, *usable[0].address)
        past, self._made = self._made, {}
        for name, gate in (*pools.items(),)[:MAX_TARGETS]:
            self.pools.pop(name, None)
            address = gate.endpoints.usable[0].address if gate.endpoints.usable else None
            if address and (answer := await _get("/v2/health/ready", *address)):
                with suppress(ValueError):
                    self.pools[name] = found = msgspec.json.decode(answer.get(LANGUAGE) or "", type=Language)
                    now = monotonic()
                    at, made = past.get(address, (now, 0.0))
                    found.made_s = max(0.0, found.made - made) / (now - at) if now > at else 0.0
                    self._made[address] = now, found.made

    async def _ask(self, target: Target, host: str, port: int) -> None:
        version = f"/versions/{target.version}" if target.version and target.kind == "model" else ""
        answer = await _get(_PATHS[target.kind].format(target.name, version), host, port)
        if answer is None:
            return  # it is asked again; until then the latest report counts
        try:
            if target.kind == "service":
                self.targets[target.route] = _service(msgspec.json.decode(answer.body, type=_Service))
            else:
                found = msgspec.json.decode(answer.body, type=_Models).model_stats
                self._report(target.route, found, answer.get(PROVIDER) or "", answer.get(ARTEFACT) or "")
        except (ValueError, RecursionError):
            return

    def _report(self, route: str, found: list[_Statistics], provider: str, artefact: str) -> None:
        if not found:
            return
        latest = max(found, key=lambda each: (int(each.last_inference), each.version))
        rows, batches = int(latest.inference_count), int(latest.execution_count)
        rows_before, batches_before = self._counts.get(route, (0, 0))
        if batches < batches_before or rows < rows_before:
            rows_before = batches_before = 0  # another server, or one that was started anew
        before = self.targets.get(route)
        mean, was = (before.rows, before.was) if before is not None else (None, "")
        if before is not None and before.version != latest.version:
            was = "" if before.version in [each.version for each in found] else before.version
        if batches > batches_before:
            mean = (rows - rows_before) / (batches - batches_before)
        self._counts[route] = rows, batches
        self.targets[route] = Report(version=latest.version, provider=provider, artefact=artefact, rows=mean, was=was)


async def _get(path: str, host: str, port: int) -> HttpResponse | None:
    """Return what a server answers; None if it has no good answer in time."""
    client = HttpClient(host=host, port=port, max_connections=1, max_response_bytes=MAX_ANSWER_BYTES)
    try:
        answer = await client.request("GET", path, (), deadline=monotonic() + ANSWER_S)
        return answer if answer.status == 200 else None
    except UpstreamError:
        return None
    finally:
        await client.close()


_PATHS: Final = {"model": "/v2/models/{}{}/stats", "service": "/v1/services/{}{}"}


def _service(found: _Service) -> Report:
    shared = [each.version for each in found.versions if each.weight > 0.0]
    return Report(version=", ".join(shared) or found.version)
