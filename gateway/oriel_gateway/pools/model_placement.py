"""Places models on the servers of the pools with `place_models`, and reads how far the models of a start are loaded.

The rule is `oriel_policies.upstreams.placement`. Its input comes from the servers: each reports its models, their bytes
and their work at `/v2/repository/memory`. One gateway at a time decides, for as long as it keeps a role in the ledger
that ends after LEASE_S: it reads the reports, publishes where every model shall be, and has the servers load and
unload. The other gateways read what it has published, so that a call for a model that nobody has comes to the same
server whichever gateway it takes. Without the role nothing is moved; without a ledger a gateway decides alone.

A server takes a model out of memory LEAVE_S after that was published: until then no gateway sends it calls for the
model any more, which would load it again.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from math import exp, inf
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

import msgspec

from oriel_gateway.limits.ledger import Ledger, LedgerLost
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
from oriel_policies.upstreams.placement import (
    PlacedModel,
    PlacedServer,
    Step,
    first_of,
    memory_replicas,
    next_steps,
    place,
)

if TYPE_CHECKING:
    import httpx

EVERY_S: Final = 1.0
LEASE_S: Final = 3.0
LEAVE_S: Final = 5.0
LOAD_S: Final = 600.0
RETRY_S: Final = 30.0
# a report that is older does not count, and without a report of every usable server nothing is moved
STALE_S: Final = 10.0
IN_USE_S: Final = 300.0
WORK_S: Final = 30.0

_log = logging.getLogger(__name__)


class ServerLine(msgspec.Struct):
    """A server in what is published."""

    name: str
    up_s: float
    stays: bool
    budgets: dict[str, int]
    fixed: dict[str, int]


class ModelLine(msgspec.Struct):
    """A model in what is published. servers: those that shall have it; loaded: those that do."""

    name: str
    servers: list[str]
    loaded: list[str]
    why: str
    work: float
    bytes: int
    load_s: float
    in_use: bool


class Placed(msgspec.Struct):
    """The decisions of one gateway for a pool.

    leaving: (model, server) pairs; the server gets no more calls for the model.
    """

    servers: list[ServerLine] = []
    models: list[ModelLine] = []
    leaving: list[tuple[str, str]] = []
    steps: list[str] = []
    replicas: float = 0.0


_read_placed = msgspec.json.Decoder(Placed).decode


class _Use:
    """The use of one model over all servers.

    work: in shares of one server.
    """

    __slots__ = ("called_s", "seen", "work")

    def __init__(self) -> None:
        self.work = 0.0
        self.called_s = -inf
        self.seen: dict[str, tuple[float, int]] = {}

    def note(self, reported: Mapping[str, ReportedModel], passed_s: float, now: float) -> None:
        """Take what the servers report. passed_s: since the time before."""
        busy_s = 0.0
        for server, line in reported.items():
            before_s, before = self.seen.get(server, (line.busy_s, line.calls))
            # A counter that has fallen is that of a server that was started again, or has loaded the model again.
            busy_s += line.busy_s - before_s if line.busy_s >= before_s else line.busy_s
            if line.calls != before or line.waiting or line.wanted:
                self.called_s = now
        self.seen = {server: (line.busy_s, line.calls) for server, line in reported.items()}
        if passed_s > 0.0:
            kept = exp(-passed_s / WORK_S)
            self.work = self.work * kept + busy_s / passed_s * (1.0 - kept)


class PoolPlacement:
    """The models of one pool. Single writer: the gateway's loop.

    placed: what is in force. leads: whether this gateway decides.
    steps: action -> how many this gateway has had carried out.
    """

    def __init__(self, gate: PoolGate, *, leave_s: float = LEAVE_S) -> None:
        self.gate = gate
        self.placed = Placed()
        self.leads = False
        self.steps: Counter[str] = Counter()
        self._leave_s = leave_s
        self._homes: dict[str, Collection[str]] = {}
        self._reports: dict[str, tuple[Report, float]] = {}
        self._uses: dict[str, _Use] = {}
        self._noted_s = 0.0
        self._leaving: dict[tuple[str, str], float] = {}
        self._busy: dict[str, Step] = {}
        self._failed: dict[Step, float] = {}
        self._sets: tuple[EndpointSet[Any], ...] = (gate.endpoints, gate.grpc)
        for these in self._sets:
            these.model_locations.loads_first = partial(self._first, these)

    def end(self) -> None:
        """Stop to influence where calls go."""
        for these in self._sets:
            these.model_locations.loads_first = None

    async def turn(
        self, client: "httpx.AsyncClient", ledger: Ledger | None, plan: PoolPlan | None, tasks: asyncio.TaskGroup
    ) -> None:
        """Decide, if this gateway has the role, or adopt what another one has decided."""
        state = b""
        if ledger is None:
            self.leads = True
        else:
            own = msgspec.json.encode(self.placed) if self.leads else b""
            try:
                async with asyncio.timeout(REPORT_S):
                    self.leads, state = await ledger.lead(f"models:{self.gate.name}", own, for_s=LEASE_S)
            except (LedgerLost, TimeoutError):
                self.leads = False
        if self.leads:
            await self._decide(client, plan, tasks)
        elif state:
            try:
                self.adopt(_read_placed(state))
            except msgspec.MsgspecError:
                return  # of a gateway of another version: what is in force stays
        if plan is not None:
            plan.model_replicas = self.placed.replicas

    def adopt(self, placed: Placed) -> None:
        """Send calls accordingly from now on."""
        self.placed, now = placed, monotonic()
        self._homes = {line.name: line.servers for line in placed.models}
        for these in self._sets:
            for model, server in placed.leaving:
                for member in self._named(these, (server,)):
                    these.model_locations.note_leaving(member, model, now)

    async def _decide(self, client: "httpx.AsyncClient", plan: PoolPlan | None, tasks: asyncio.TaskGroup) -> None:
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
        models = self._models(reports, now)
        servers = self._servers(reports, plan.latest.wanted if plan is not None else len(reports))
        homes = place(servers, models)
        steps = next_steps(servers, models, homes)
        self._failed = {step: until for step, until in self._failed.items() if until > now}
        self._begin([step for step in steps if step not in self._failed], client, tasks, now)
        where = {model.name: [server.name for server in servers if model.name in server.loaded] for model in models}
        self.adopt(
            Placed(
                servers=[
                    ServerLine(
                        name=each.name,
                        up_s=each.age_s,
                        stays=each.stays,
                        budgets=dict(each.budgets),
                        fixed=dict(each.fixed),
                    )
                    for each in servers
                ],
                models=[
                    ModelLine(
                        name=model.name,
                        servers=list(homes[model.name].servers),
                        loaded=where[model.name],
                        why=homes[model.name].reason,
                        work=round(model.work, 4),
                        bytes=sum(model.sizes.values()),
                        load_s=model.load_s,
                        in_use=model.in_use,
                    )
                    for model in models
                ],
                leaving=list(self._leaving),
                steps=[f"{step.action} {step.model} on {step.server}" for step in self._busy.values()],
                replicas=memory_replicas(servers, models, homes),
            )
        )

    def _models(self, reports: Mapping[str, Report], now: float) -> list[PlacedModel]:
        """Return the models of all servers, with what was seen of their use."""
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
            sizes: Counter[str] = Counter()
            for line in each.values():
                sizes |= Counter(line.bytes)
            load_s = max([line.load_s for line in each.values()])
            in_use = now - use.called_s < IN_USE_S
            models.append(PlacedModel(name=name, sizes=dict(sizes), load_s=load_s, work=use.work, in_use=in_use))
        return models

    def _servers(self, reports: Mapping[str, Report], wanted: int) -> list[PlacedServer]:
        """Return the servers, the oldest first. wanted: how many an autoscaler keeps."""
        oldest = sorted(reports.items(), key=lambda each: (-each[1].up_s, each[0]))
        servers = []
        for number, (name, report) in enumerate(oldest):
            busy = self._busy.get(name)
            loading = [line.name for line in report.models if line.state == "loading"]
            servers.append(
                PlacedServer(
                    name=name,
                    age_s=report.up_s,
                    budgets=report.budgets,
                    fixed=report.fixed,
                    loaded=[line.name for line in report.models if line.state == "loaded"],
                    loading=[*loading, busy.model] if busy is not None else loading,
                    stays=number < max(1, wanted),
                )
            )
        return servers

    def _begin(self, steps: Sequence[Step], client: "httpx.AsyncClient", tasks: asyncio.TaskGroup, now: float) -> None:
        """Have the servers carry out the steps; what has to leave is published first."""
        leaving = {(step.model, step.server) for step in steps if step.action == "unload"}
        under_way = {(step.model, step.server) for step in self._busy.values()}
        self._leaving = {pair: self._leaving.get(pair, now) for pair in {*leaving, *(self._leaving.keys() & under_way)}}
        for step in steps:
            due = step.action == "load" or now - self._leaving[step.model, step.server] >= self._leave_s
            if due and step.server not in self._busy:
                self._busy[step.server] = step
                tasks.create_task(self._carry_out(client, step))

    async def _carry_out(self, client: "httpx.AsyncClient", step: Step) -> None:
        path = f"http://{step.server}/v2/repository/models/{step.model}/{step.action}"
        why = ""
        try:
            answer = await client.post(path, timeout=LOAD_S)
            why = "" if answer.is_success else f"{answer.status_code} {answer.text[:300]}"
        except Exception as error:  # httpx raises more than its own errors for addresses that cannot be used
            why = type(error).__name__
        finally:
            del self._busy[step.server]
            self._leaving.pop((step.model, step.server), None)
        self.steps[step.action if not why else "failed"] += 1
        if why:
            self._failed[step] = monotonic() + RETRY_S
            _log.warning("model %s cannot %s on %s: %s", step.model, step.action, step.server, why)
        else:
            _log.info("model %s: %s on %s", step.model, step.action, step.server)

    def _first(self, these: EndpointSet[Any], model: str, usable: Sequence[Any]) -> Sequence[Any]:
        """Return the endpoints that load a model which none has."""
        name = model.partition("/")[0]
        homes = self._homes.get(name)
        if not homes:
            first = first_of([server_name(member) for member in usable], name)
            return [member for member in usable if server_name(member) == first] or usable
        return [member for member in self._named(these, homes) if member in usable] or usable

    def _named(self, these: EndpointSet[Any], names: Collection[str]) -> list[Any]:
        """Return the endpoints of these servers, which are named by their addresses over HTTP."""
        if these is self.gate.endpoints:
            return [member for member in these.members if server_name(member) in names]
        http = self.gate.endpoints.members
        hosts = [member.address[0] for member in http]
        if len(set(hosts)) == len(hosts):  # every server has a host of its own: only the port differs
            chosen = {member.address[0] for member in http if server_name(member) in names}
            return [member for member in these.members if member.address[0] in chosen]
        if len(hosts) != len(these.members):
            return []
        # Fixed addresses of one machine: the n-th over gRPC is the n-th over HTTP.
        return [other for member, other in zip(http, these.members, strict=True) if server_name(member) in names]


class ModelPlacements:
    """The placements of a gateway, by pool. Single writer: the gateway's loop.

    pools, plans: those in force; called at each turn, so that a reload need not notify this.
    """

    def __init__(
        self, pools: Callable[[], Mapping[str, PoolGate]], plans: Callable[[], Mapping[str, PoolPlan]]
    ) -> None:
        self._pools = pools
        self._plans = plans
        self.pools: dict[str, PoolPlacement] = {}
        self.every_s = EVERY_S
        self.leave_s = LEAVE_S

    async def run(self, ledger: Ledger | None = None) -> None:
        """Decide once a second; never returns."""
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            client: httpx.AsyncClient | None = None
            while True:
                placing, starting, plans = self._placing(), self._starting(), self._plans()
                for name, old in list(self.pools.items()):
                    if placing.get(name) is not old.gate:
                        self.pools.pop(name).end()
                for name, gate in placing.items():
                    if name not in self.pools:
                        self.pools[name] = PoolPlacement(gate, leave_s=self.leave_s)
                if placing or starting:
                    if client is None:
                        client = await stack.enter_async_context(_client())
                    turns = [each.turn(client, ledger, plans.get(name), tasks) for name, each in self.pools.items()]
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
        name: {"decides": each.leads, **msgspec.to_builtins(each.placed)} for name, each in placements.pools.items()
    }
