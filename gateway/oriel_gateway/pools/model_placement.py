"""Has models loaded where they belong in the pools that place them, and reads how far the models of a start are loaded.

The rule is `oriel_policies.upstreams.placement`. Its input comes from the servers: each reports its models, their bytes
and their work at `/v2/repository/memory`. Every gateway reads the reports and comes to the same result by itself: a
call for a model that nobody has goes to the same server whichever gateway it takes, and a server that two gateways ask
for the same load does it once. Calls otherwise go where a model is (`model_locations`). Nothing is unloaded: servers
take models out of memory by their own budgets.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from math import exp, inf
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from oriel_gateway.pools.cold_start import Phase
from oriel_gateway.pools.endpoints import EndpointSet
from oriel_gateway.pools.pool import PoolGate
from oriel_gateway.pools.scaling import PoolPlan
from oriel_gateway.pools.server_reports import (
    MOST_SERVERS,
    REPORT_S,
    Report,
    ReportedModel,
    read_progress,
    read_report,
    server_name,
)
from oriel_policies.upstreams.placement import PlacedModel, PlacedServer, Placement

if TYPE_CHECKING:
    import httpx

EVERY_S: Final = 1.0
LOAD_S: Final = 600.0
RETRY_S: Final = 30.0
# a report that is older does not count, and without a report of every usable server nothing is loaded
STALE_S: Final = 10.0
IN_USE_S: Final = 300.0
# time constants of the measured work: a model that gets more calls has its servers within seconds
RISE_S: Final = 1.0
FALL_S: Final = 30.0

_log = logging.getLogger(__name__)


class _Use:
    """The use of one model.

    work: server -> the share of it that the model's calls keep busy.
    called_s: the time of the latest call.
    """

    def __init__(self) -> None:
        self.work: dict[str, float] = {}
        self.called_s = -inf
        self._seen: dict[str, tuple[float, int]] = {}

    def note(self, reported: Mapping[str, ReportedModel], passed_s: float, now: float) -> None:
        """Take the servers' reports. passed_s: seconds since the reports before, 0 if there were none."""
        before, self.work = self.work, {}
        for server, line in reported.items():
            busy_s, calls = self._seen.get(server, (line.busy_s, line.calls))
            if line.calls != calls or line.waiting or line.wanted:
                self.called_s = now
            # A counter that has fallen is that of a server that was started again, or has loaded the model again.
            share = (line.busy_s - busy_s if line.busy_s >= busy_s else line.busy_s) / (passed_s or inf)
            work = before.get(server, 0.0)
            if share or work:
                self.work[server] = share + (work - share) * exp(-passed_s / (RISE_S if share > work else FALL_S))
        self._seen = {server: (line.busy_s, line.calls) for server, line in reported.items()}


class PoolPlacement:
    """The models of one pool. Single writer: the gateway's loop.

    placement: according to the last reports; None until every server has reported.
    steps: result -> loads that this gateway has asked for.
    """

    def __init__(self, gate: PoolGate) -> None:
        self.gate = gate
        self.placement: Placement | None = None
        self.steps: Counter[str] = Counter()
        self._reports: dict[str, tuple[Report, float]] = {}
        self._uses: dict[str, _Use] = {}
        self._noted_s = 0.0
        self._loading: dict[str, str] = {}
        self._failed: dict[tuple[str, str], float] = {}
        self._sets: tuple[EndpointSet[Any], ...] = (gate.endpoints, gate.grpc)
        for these in self._sets:
            these.model_locations.loads_first = partial(self._first, these)

    def close(self) -> None:
        """Stop to influence where calls go."""
        for these in self._sets:
            these.model_locations.loads_first = None

    async def turn(self, client: "httpx.AsyncClient", plan: PoolPlan | None, tasks: asyncio.TaskGroup) -> None:
        """Read the servers' reports, and have them load what they lack."""
        now = monotonic()
        names = [server_name(member) for member in self.gate.endpoints.usable[:MOST_SERVERS]]
        found = await asyncio.gather(*(read_report(client, name) for name in names))
        self._reports = {
            name: each for name, each in self._reports.items() if name in names and now - each[1] < STALE_S
        }
        self._reports |= {name: (each, now) for name, each in zip(names, found, strict=True) if each is not None}
        if not names or len(self._reports) < len(names):
            return
        reports = {name: report for name, (report, _) in self._reports.items()}
        for server, model in self.decide(
            reports, plan.latest.wanted if plan is not None else len(reports), now
        ).items():
            self._loading[server] = model
            tasks.create_task(self._load(client, server, model))
        if plan is not None and self.placement is not None:
            plan.model_replicas = self.placement.replicas()

    def decide(self, reports: Mapping[str, Report], wanted: int, now: float) -> dict[str, str]:
        """Place the models anew; return server -> the model that it has to load now.

        wanted: number of servers that an autoscaler keeps.
        now: monotonic seconds.
        """
        models = self._models(reports, now)
        self._failed = {pair: until for pair, until in self._failed.items() if until > now}
        self.placement = Placement(self._servers(reports, wanted), models)
        loaded: dict[str, list[str]] = {}
        for name, report in reports.items():
            for line in report.models:
                if line.state == "loaded":
                    loaded.setdefault(line.name, []).append(name)
        for these in self._sets:
            members = self._members(these)
            for model in models:
                having = [members[name] for name in loaded.get(model.name, ()) if name in members]
                if having and model.in_use:
                    these.model_locations.note_reported(model.name, having, now)
        return {
            name: model
            for name, model in self.placement.next_loads().items()
            if name not in self._loading and not any(line.state == "loading" for line in reports[name].models)
        }

    def _models(self, reports: Mapping[str, Report], now: float) -> list[PlacedModel]:
        """Return the models of all servers, after noting their use."""
        lines: dict[str, dict[str, ReportedModel]] = {}
        for server, report in reports.items():
            for line in report.models:
                lines.setdefault(line.name, {})[server] = line
        passed_s, self._noted_s = (now - self._noted_s if self._noted_s else 0.0), now
        self._uses = {name: self._uses.get(name) or _Use() for name in lines}
        models = []
        for name, each in sorted(lines.items()):
            use = self._uses[name]
            use.note(each, passed_s, now)
            sizes: dict[str, int] = {}
            for line in each.values():
                for device, size in line.bytes.items():
                    sizes[device] = max(size, sizes.get(device, 0))
            models.append(
                PlacedModel(
                    name=name,
                    sizes=sizes,
                    load_s=max(line.load_s for line in each.values()),
                    in_use=now - use.called_s < IN_USE_S,
                )
            )
        return models

    def _servers(self, reports: Mapping[str, Report], wanted: int) -> list[PlacedServer]:
        """Return the servers, the oldest first."""
        oldest = sorted(reports.items(), key=lambda each: (-each[1].up_s, each[0]))
        return [
            PlacedServer(
                name=name,
                budgets=report.budgets,
                fixed=report.fixed,
                work={model: use.work[name] for model, use in self._uses.items() if name in use.work},
                has={line.name for line in report.models if line.state != "available"}
                | {model for server, model in self._loading.items() if server == name},
                refused={line.name for line in report.models if line.wanted}
                | {model for server, model in self._failed if server == name},
                stays=number < max(1, wanted),
            )
            for number, (name, report) in enumerate(oldest)
        ]

    async def _load(self, client: "httpx.AsyncClient", server: str, model: str) -> None:
        why = ""
        try:
            answer = await client.post(f"http://{server}/v2/repository/models/{model}/load", timeout=LOAD_S)
            why = "" if answer.is_success else f"{answer.status_code} {answer.text[:300]}"
        except Exception as error:  # httpx raises more than its own errors for addresses that cannot be used
            why = type(error).__name__
        finally:
            del self._loading[server]
        self.steps["failed" if why else "load"] += 1
        if why:
            self._failed[server, model] = monotonic() + RETRY_S
            _log.warning("model %s cannot be loaded on %s: %s", model, server, why)
        else:
            _log.info("model %s: loaded on %s", model, server)

    def _first(self, these: EndpointSet[Any], model: str, usable: Sequence[Any]) -> Sequence[Any]:
        """Return the endpoints that load a model which none has."""
        there = set(usable)
        able = {name: member for name, member in self._members(these).items() if member in there}
        placement = self.placement or Placement([PlacedServer(name=name) for name in able], ())
        first = placement.first_server(model.partition("/")[0], able)
        return usable if first is None else [able[first]]

    def _members(self, these: EndpointSet[Any]) -> dict[str, Any]:
        """Return server -> its endpoint. Servers are named by their addresses over HTTP."""
        http = self.gate.endpoints.members
        names, hosts = [server_name(member) for member in http], [member.address[0] for member in http]
        if these is not self.gate.endpoints and len(set(hosts)) == len(hosts):
            # Every server has a host of its own: only the port differs.
            by_host = {member.address[0]: member for member in these.members}
            return {name: by_host[host] for name, host in zip(names, hosts, strict=True) if host in by_host}
        # Fixed addresses of one machine: the n-th over gRPC is the n-th over HTTP.
        return dict(zip(names, these.members, strict=True)) if len(names) == len(these.members) else {}


class ModelPlacements:
    """The placements of a gateway, by pool. Single writer: the gateway's loop.

    pools, plans: return the pools and plans in force; called at each turn, so that a reload need not notify this.
    """

    def __init__(
        self, pools: Callable[[], Mapping[str, PoolGate]], plans: Callable[[], Mapping[str, PoolPlan]]
    ) -> None:
        self._pools = pools
        self._plans = plans
        self.pools: dict[str, PoolPlacement] = {}
        self.every_s = EVERY_S

    async def run(self) -> None:
        """Read the reports of servers once a second; never returns."""
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            client: httpx.AsyncClient | None = None
            while True:
                placing, starting, plans = self._placing(), self._starting(), self._plans()
                for name, old in list(self.pools.items()):
                    if placing.get(name) is not old.gate:
                        self.pools.pop(name).close()
                for name, gate in placing.items():
                    if name not in self.pools:
                        self.pools[name] = PoolPlacement(gate)
                if placing or starting:
                    if client is None:
                        client = await stack.enter_async_context(_client())
                    turns = [each.turn(client, plans.get(name), tasks) for name, each in self.pools.items()]
                    await asyncio.gather(*turns, *(read_progress(client, gate) for gate in starting))
                await asyncio.sleep(self.every_s)

    def _placing(self) -> dict[str, PoolGate]:
        return {name: gate for name, gate in self._pools().items() if gate.pool.place_models}

    def _starting(self) -> list[PoolGate]:
        """Return the pools whose first server loads its models at present."""
        gates = [gate for gate in self._pools().values() if gate.cold_start is not None]
        return [gate for gate in gates if gate.cold_start is not None and gate.cold_start.phase is Phase.LOADING]


def _client() -> "httpx.AsyncClient":
    import httpx  # only here: most gateways place no models, and it is large

    limits = httpx.Limits(max_connections=64, max_keepalive_connections=64)
    return httpx.AsyncClient(timeout=REPORT_S, limits=limits, trust_env=False)


def shown(placements: ModelPlacements) -> dict[str, Any]:
    """Return what the admin port shows of all pools."""
    return {
        name: {
            "models": [
                {
                    "name": model.name,
                    "in_use": model.in_use,
                    "work": round(placement.work(model.name), 4),
                    "bytes": sum(model.sizes.values()),
                    "loaded": placement.loaded(model.name),
                    "servers": placement.servers_for(model),
                }
                for model in placement.models
            ],
            "replicas": placement.replicas(),
        }
        for name, pool in placements.pools.items()
        if (placement := pool.placement) is not None
    }
