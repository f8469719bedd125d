"""Replays a load in virtual time: gateway, servers and batches decide as they do in production, executions take the
time of a measured profile.

The arrivals, the counts and the report are those of `oriel load`, so that a simulated load and a measured one can be
laid side by side. With policy documents every call passes a gateway, and its tenant follows from its stream's key;
without them every call goes straight to a server. Each call goes to the less loaded of two random replicas.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from itertools import count
from random import Random
from typing import Any

from oriel_cli.errors import CommandFailed
from oriel_policies.documents import Snapshot, Tenant
from oriel_policies.metering.device_clock import DeviceClock
from oriel_policies.upstreams.picking import PeakEwma, two_of
from oriel_policies.waiting.batch import BatchBounds
from oriel_tools.load.generator import Record, schedule
from oriel_tools.load.scenario import Scenario
from oriel_tools.load.tally import Outcome, Tally, Timeline
from oriel_tools.simulate.autoscaled import Autoscaled, Planned, Rule, scaling_of
from oriel_tools.simulate.profile import Profile, drawn
from oriel_tools.simulate.requests import Request

DEFAULT_TIMEOUT_S = 60.0  # a server's timeout for a call that names none
# The end of a call (status, reason, cost in microseconds), and how to cancel one; as in `oriel_gateway.simulated`.
End = Callable[[int, str, int], None]
Cancel = Callable[[], None]


@dataclass(slots=True, kw_only=True)
class Use:
    """The use of the servers by one load.

    replicas: number at the beginning. slots: executions that can run at once on one replica.
    replica_s: seconds of all replicas, from the order of each.
    scaled: replicas, ready and starting, by bin; empty if their number is fixed.
    device_s: device time of each model, in which no instant of a server counts twice.
    tier_s: the share of it that answered calls are charged, by tier.
    batches: model -> rows -> executions.
    busy: seconds of executions by model and bin.
    waiting: the most calls that waited at once, by place ("gateway", "servers") and bin.
    """

    replicas: int
    slots: int
    width_s: float
    replica_s: float = 0.0
    scaled: list[int] = field(default_factory=list)
    device_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    batches: dict[str, Counter[int]] = field(default_factory=dict)
    tier_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    busy: dict[str, list[float]] = field(default_factory=dict)
    waiting: dict[str, list[int]] = field(default_factory=dict)

    def ran(self, model: str, rows: int, seconds: float, offset_s: float) -> None:
        """Count an execution that begins at `offset_s`."""
        self.batches.setdefault(model, Counter())[rows] += 1
        bins, end_s = self.busy.setdefault(model, []), offset_s + seconds
        while offset_s < end_s:
            index = int(offset_s / self.width_s + 1e-9)
            edge = min(end_s, (index + 1) * self.width_s)
            bins.extend([0.0] * (index + 1 - len(bins)))
            bins[index] += edge - offset_s
            offset_s = edge if edge > offset_s else end_s

    def has(self, replicas: int, offset_s: float) -> None:
        """Count the replicas of one second."""
        self.replica_s += replicas
        index = int(offset_s / self.width_s)
        self.scaled.extend([0] * (index + 1 - len(self.scaled)))
        self.scaled[index] = max(self.scaled[index], replicas)

    def capacity_s(self, index: int) -> float:
        """Return for how many seconds executions can run in a bin."""
        replicas = self.scaled[index] if index < len(self.scaled) else self.scaled[-1] if self.scaled else self.replicas
        return self.width_s * self.slots * max(1, replicas)  # one that ends finishes its calls

    def waits(self, place: str, calls: int, offset_s: float) -> None:
        """Count the calls that wait now."""
        bins, index = self.waiting.setdefault(place, []), int(offset_s / self.width_s)
        bins.extend([0] * (index + 1 - len(bins)))
        bins[index] = max(bins[index], calls)


class _Replica:
    """One server (`oriel_inference.simulated.SimulatedServer`), as whoever picks between replicas knows it."""

    __slots__ = ("cost", "device", "outstanding", "server")

    def __init__(self) -> None:
        self.server: Any = None
        self.device = DeviceClock()
        self.cost = PeakEwma()
        self.outstanding = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """The servers of a load.

    replicas: equal servers, at the beginning. cores: executions that may run at once on a replica; 0: as many as its
    models have instances. scale: pool of the policy documents whose scaling table the replicas follow; "": their number
    is fixed. begins_s: wall clock when the load begins, in epoch seconds, for the schedule of this pool.
    rule: makes another rule of scaling for the pool, to compare it. start_s: bounds of the time that a replica takes to
    start; the pool's `start_ms` if it is empty. crashes: seconds of the load at which a replica is lost.
    """

    replicas: int = 1
    cores: int = 0
    scale: str = ""
    begins_s: float = 0.0
    rule: Callable[[Snapshot, str], Rule] | None = None
    start_s: tuple[float, float] | None = None
    crashes: tuple[int, ...] = ()


class VirtualLoad:
    """One load on some servers.

    requests: requests of the streams, by index. profiles: times of the models, by name. snapshot: policy documents of
    the gateway that the calls pass, if they pass one.
    """

    def __init__(
        self,
        scenario: Scenario,
        requests: Sequence[Request],
        profiles: Mapping[str, Profile],
        servers: Servers,
        snapshot: Snapshot | None = None,
    ) -> None:
        from oriel_gateway.simulated import SimulatedGateway
        from oriel_inference.clock import VirtualClock

        self._scenario = scenario
        self._requests = requests
        self._profiles = profiles
        self._clock = VirtualClock()
        self._began_s = self._clock.now()
        self._chance = Random(f"{scenario.seed}/servers")
        instances = sum(profile.instances for profile in profiles.values())
        self._cores = servers.cores or instances
        tail_s = max(stream.gives_up_s for stream in scenario.stream)
        self._timelines = {stream.tier: Timeline(scenario.seconds, tail_s) for stream in scenario.stream}
        self._tallies = [[Tally() for _ in scenario.stream] for _ in scenario.phase]
        width_s = next(iter(self._timelines.values())).width_s
        self.use = Use(replicas=servers.replicas, slots=min(self._cores, instances), width_s=width_s)
        self._numbers = count()
        self._replicas: list[_Replica] = []
        self._stopped: list[_Replica] = []
        self._pool = servers.scale
        self._scaled: Autoscaled | None = None
        self._set_replicas(servers.replicas)
        self._gateway: Any = None
        self._tenants: list[Tenant] = []
        self._longest_s = max(DEFAULT_TIMEOUT_S, *[request.timeout_s or 0.0 for request in requests])
        if snapshot is not None:
            self._gateway = SimulatedGateway(snapshot, self._clock.now, self._call_at, self._forward, servers.scale)
            self._longest_s = max(self._longest_s, *[tier.give_up_s for tier in snapshot.tiers.values()])
            self._tenants = [tenant_of(snapshot, stream.name, stream.key) for stream in scenario.stream]
            if servers.scale:
                table = scaling_of(snapshot, servers.scale)
                self._longest_s += max([table.hold_for(tier) or 0.0 for tier in snapshot.tiers])
                self._gateway.set_replicas(servers.scale, servers.replicas)
                begins_s = servers.begins_s - self._began_s
                self._scaled = Autoscaled(
                    servers.rule(snapshot, servers.scale)
                    if servers.rule is not None
                    else Planned(snapshot, servers.scale, begins_s=begins_s),
                    replicas=servers.replicas,
                    start_s=servers.start_s or (table.start_s, table.start_s),
                    record=self._gateway.count_demand(servers.scale, table.capacity, self._first_call),
                    change=self._set_replicas,
                    crashes=tuple([round(self._began_s) + each for each in servers.crashes]),
                )

    def _start(self) -> None:
        """Add a replica that is ready."""
        from oriel_inference.simulated import SimulatedServer

        number, replica = next(self._numbers), _Replica()
        models = [
            _model(each, Random(f"{self._scenario.seed}/{number}/{each.model}")) for each in self._profiles.values()
        ]
        replica.server = SimulatedServer(
            models,
            self._clock,
            cores=self._cores,
            chance=Random(f"{self._scenario.seed}/{number}"),
            ran=partial(self._ran, replica.device),
        )
        self._replicas.append(replica)

    def _set_replicas(self, replicas: int, grows_until_s: float = 0.0) -> None:
        """Add replicas that are ready, or give the newest ones no more calls; these finish the calls that they have."""
        while len(self._replicas) < replicas:
            self._start()
        self._stopped += self._replicas[replicas:]
        del self._replicas[replicas:]
        if self._scaled is not None:
            self._gateway.set_replicas(self._pool, replicas, grows_until_s)

    def _first_call(self) -> None:
        """Order a replica at once: the gateway pushes the first call of an idle pool to KEDA."""
        if self._scaled is not None and not self._scaled.replicas:
            self._scaled.second(round(self._clock.now()))

    def _second(self) -> None:
        """Decide about the replicas, and again a second later."""
        now = self._clock.now()
        if self._scaled is None or now >= self._began_s + self._scenario.seconds:
            return
        self._scaled.second(round(now))
        self.use.has(self._scaled.replicas, now - self._began_s)
        self._clock.call_at(now + 1.0, self._second)

    def run(self) -> Record:
        """Run the load to its end, and until all calls have ended."""
        numbers = count()
        if self._scaled is None:
            self.use.replica_s = self._scenario.seconds * self.use.replicas
        self._second()
        for offset_s, phase, stream in schedule(self._scenario):
            self._clock.advance(self._began_s + offset_s - self._clock.now())
            self._send(offset_s, phase, stream, next(numbers))
            self._clock.run()
            self._measure(offset_s)
        self._clock.advance(self._began_s + self._scenario.seconds + self._longest_s + 1.0 - self._clock.now())
        return Record(tallies=self._tallies, timelines=self._timelines, ran_s=self._scenario.seconds)

    def _measure(self, offset_s: float) -> None:
        self.use.waits("servers", sum([each.server.waiting for each in (*self._replicas, *self._stopped)]), offset_s)
        if self._gateway is not None:
            self.use.waits("gateway", self._gateway.waiting, offset_s)

    def _ran(self, device: DeviceClock, model: str, rows: int, seconds: float, end_s: float) -> None:
        self.use.ran(model, rows, seconds, end_s - seconds - self._began_s)
        started = device.start(round((end_s - seconds) * 1e9))

        def finished() -> None:
            self.use.device_s[model] += device.end(started, round(end_s * 1e9)) / 1e9

        self._clock.call_at(end_s, finished)

    def _send(self, offset_s: float, phase: int, index: int, number: int) -> None:
        stream, request = self._scenario.stream[index], self._requests[index]
        tally, timeline = self._tallies[phase][index], self._timelines[stream.tier]
        tally.scheduled += 1
        tally.sent += 1
        tally.lag.add(0.0)
        arrived = timeline.at(offset_s)
        arrived.arrivals += 1
        target_s = None if stream.target_ms is None else stream.target_ms / 1e3
        ended = False

        def end(status: int, reason: str, cost_us: int) -> None:
            nonlocal ended
            if ended:
                return
            ended = True
            now_s = self._clock.now() - self._began_s
            latency_s, answered = now_s - offset_s, timeline.at(now_s)
            outcome = _outcome(status, reason)
            kept = tally.finished(outcome, latency_s, latency_s, target_s)
            if outcome.kind == "good":
                answered.good += 1
                arrived.latency.add(latency_s)
                arrived.kept += kept
                self.use.tier_s[stream.tier] += cost_us / 1e6
            else:
                answered.others += 1

        if self._gateway is not None:
            self._gateway.call(
                self._tenants[index],
                request.path,
                stream.headers,
                request_id=f"{number:016x}",
                rows=request.rows,
                size_bytes=request.size_bytes,
                timeout_s=request.timeout_s,
                end=end,
            )
            return
        now = self._clock.now()
        deadline = now + (DEFAULT_TIMEOUT_S if request.timeout_s is None else request.timeout_s)
        leave = self._submit(
            request.model,
            request.rows,
            deadline=deadline,
            band=request.band,
            tenant=request.tenant,
            end=end,
        )

        def give_up() -> None:
            leave()
            end(0, "timed out", 0)

        self._clock.call_at(now + stream.gives_up_s, give_up)

    def _call_at(self, when_s: float, call: Callable[[], None]) -> Cancel:
        return self._clock.call_at(when_s, call).cancel

    def _forward(self, name: str, tenant: Tenant, rows: int, deadline: float, end: End) -> Cancel:
        if name not in self._profiles:
            raise CommandFailed(f"there is no profile of model {name!r}, give it with --profile")
        return self._submit(name, rows, deadline=deadline, band=tenant.tier.band, tenant=tenant.name, end=end)

    def _submit(self, model: str, rows: int, *, deadline: float, band: int, tenant: str, end: End) -> Cancel:
        from oriel_inference.errors import InferenceError
        from oriel_inference.servers.statuses import http_status

        replica, clock = self._picked(), self._clock
        began_s, overhead_s = clock.now(), self._profiles[model].overhead_ms / 1e3
        replica.outstanding += 1
        left = False

        def reply(result: Any) -> None:
            if isinstance(result, InferenceError):
                answer = (http_status(result), result.outcome.value, -1)
            else:
                answer = (200, "", result.cost_us)
            clock.call_at(clock.now() + overhead_s, lambda: arrive(*answer))

        def arrive(status: int, reason: str, cost_us: int) -> None:
            nonlocal left
            if left:
                return
            left = True
            replica.outstanding -= 1
            now = clock.now()
            if status == 200:
                replica.cost.observed(now - began_s, now)
            else:
                replica.cost.record_failure(now - began_s, now)
            end(status, reason, cost_us)

        leave = replica.server.submit(model, rows, timeout_s=deadline - began_s, reply=reply, band=band, tenant=tenant)

        def cancel() -> None:
            nonlocal left
            if not left:
                left = True
                replica.outstanding -= 1
                leave()

        return cancel

    def _picked(self) -> _Replica:
        if len(self._replicas) == 1:
            return self._replicas[0]
        now = self._clock.now()
        one, other = [self._replicas[index] for index in two_of(len(self._replicas), self._chance.random)]
        return other if one.cost.load(one.outstanding, now) > other.cost.load(other.outstanding, now) else one


def tenant_of(snapshot: Snapshot, stream: str, key: str) -> Tenant:
    """Return the tenant whose key a stream sends. Raises CommandFailed."""
    if not key:
        raise CommandFailed(f"stream {stream!r} has no key, which says whose calls these are: pass --key")
    found = snapshot.keys.get(sha256(key.encode("utf-8", "surrogateescape")).digest())
    if found is None:
        raise CommandFailed(f"stream {stream!r}: its key belongs to no tenant of the documents")
    return found.tenant


def _model(profile: Profile, chance: Random) -> Any:
    from oriel_inference.simulated import LoopTimes, SimulatedModel

    bounds = None
    if profile.max_rows:
        bounds = BatchBounds(
            max_rows=profile.max_rows,
            preferred_rows=tuple(profile.preferred_rows),
            max_delay_s=profile.max_delay_ms / 1e3,
        )
    return SimulatedModel(
        name=profile.model,
        bounds=bounds,
        instances=profile.instances,
        seconds=drawn(profile, chance),
        row_s=profile.row_ms / 1e3,
        loop=LoopTimes(
            turn_s=profile.loop.turn_ms / 1e3, call_s=profile.loop.call_ms / 1e3, batch_s=profile.loop.batch_ms / 1e3
        ),
        learned=[size.rows for size in profile.sizes],
    )


def _outcome(status: int, reason: str) -> Outcome:
    if status == 200:
        return Outcome("good")
    return Outcome("refused", f"{status} {reason}") if status else Outcome("failed", reason)
