"""The rules of permit lending at one pool: who has which permit, and who pays for it."""

import asyncio
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_gateway.pools import lending as lending_module
from oriel_gateway.pools.lending import PermitLending
from oriel_gateway.pools.pool import PoolGate
from oriel_gateway.routing.targets import Target, resolve_grpc
from oriel_policies.documents import Tenant, compile_documents
from oriel_policies.promise.routing import RouteTable
from oriel_policies.waiting.exchanges import Exchange, Habits
from oriel_policies.waiting.flows import Ticket

from ..waiting import until
from .lending_streams import (
    SOON_S,
)
from .stack import documents


async def test_a_permit_is_suspended_once_and_resumed_once() -> None:
    snapshot = compile_documents(documents([1], max_inflight=1))
    gate = PoolGate(snapshot.pools["p"])
    gate.suspend_after_s = SOON_S
    assert gate.admission.enter()
    lending = PermitLending(gate, snapshot.tenants["limited"], Exchange(Habits(), "t"))
    lending.resume()
    assert gate.admission.inflight == 1
    for _ in range(2):
        lending.wait_for_client()
        lending.wait_for_client()
        await until(lambda: lending.suspended)
        assert gate.admission.inflight == 0
        lending.resume()
        lending.resume()
        assert gate.admission.inflight == 1 and not lending.suspended
    lending.wait_for_client()
    lending.resume()  # too short a pause for a suspension
    await until(lambda: lending._timer is None)
    assert gate.admission.inflight == 1
    lending.wait_for_client()
    await until(lambda: lending.suspended)
    assert lending.finish() > 0.0 and gate.admission.inflight == 1
    lending.wait_for_client()
    assert lending.finish() > 0.0 and gate.admission.inflight == 1
    assert gate.admission.inflight == 1 and lending._timer is None, "a call that has ended lends no permit"
    await gate.close()


async def test_the_time_of_a_suspended_permit_is_not_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seconds in which a client does not read are neither charged nor counted as service time."""
    gate, tenants, _ = _gate()
    gate.admission.inflight = 1
    now = 100.0
    monkeypatch.setattr(lending_module, "monotonic", lambda: now)
    lending = PermitLending(gate, tenants[0], Exchange(Habits(), "t"))
    lending._since_s = now
    now += 2.0 * gate.suspend_after_s
    lending._poll()
    assert lending.suspended and gate.admission.inflight == 0
    now += 5.0
    assert lending.finish() == 5.0 and gate.admission.inflight == 1


class _Call:
    """A stream or a short call at a pool."""

    def __init__(self, gate: PoolGate, tenant: Tenant, target: Target, stream: bool) -> None:
        self.gate, self.tenant, self.target = gate, tenant, target
        self.ticket: Ticket | None = None
        self.exchange = Exchange(gate.habits, tenant.name)
        self.lending = PermitLending(gate, tenant, self.exchange) if stream else None
        self.asking: asyncio.Task[None] | None = None
        self.has = False
        if gate.admission.enter():
            self.admitted()
        else:
            self.ticket = gate.join_queue(self, tenant, target, received_s=0.0, deadline=1e12, size_bytes=0)
            gate.pump()

    def admitted(self) -> None:
        self.has = True
        if self.lending is not None:
            self.exchange.sent("m")
            self.lending.message_sent()

    def displaced(self) -> None:
        raise AssertionError

    @property
    def waits(self) -> bool:
        """Whether it waits for a permit."""
        return not self.has or (self.asking is not None and not self.asking.done())

    def silent(self) -> None:
        """Do what the stream's timer does after a long silence."""
        if self.has and self.lending is not None and not self.lending.suspended:
            if self.exchange.unanswered:
                self.lending._moved_s = 1e-9
            else:
                self.lending._since_s = 1e-9
            self.lending._poll()

    def answered(self) -> None:
        """Have all messages answered, and the answers read."""
        if self.has and self.lending is not None and self.exchange.unanswered:
            self.exchange.answered("m", True, 0.0)
            self.lending.resume()
            self.lending.wait_for_client()
            if self.exchange.unanswered:
                self.lending.answer_arrived()
            else:
                self.lending.client_took_answer()

    def asks(self) -> None:
        if self.has and self.lending is not None and (self.asking is None or self.asking.done()):
            self.asking = asyncio.create_task(self._ask(self.lending))

    async def _ask(self, lending: PermitLending) -> None:
        await lending.admit_message(self.tenant, self.target, 1)
        self.exchange.sent("m")
        lending.message_sent()

    async def end(self) -> None:
        if self.asking is not None:
            self.asking.cancel()
            with suppress(asyncio.CancelledError):
                await self.asking
        if self.has:
            if self.lending is not None:
                self.lending.finish()
            self.gate.release_permit(self.target, self.tenant, self.ticket, 0.01, -1, -1, True)
        else:
            assert self.ticket is not None and self.gate.leave_queue(self.ticket)


LIMIT = 3
WHAT = ["stream", "stream", "streams", "call", "hush", "silent", "answered", "answered", "asks", "asks", "end", "end"]


@settings(max_examples=120, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(WHAT), st.integers(0, 3), st.integers(0, 30)), max_size=120))
def test_permits_are_consistent_whatever_streams_do(operations: list[tuple[str, int, int]]) -> None:
    """Every permit has one holder, and while calls wait neither resting nor only silent streams keep permits."""
    asyncio.run(_do(operations))


@pytest.mark.parametrize("cost_us, charged_s", [(-1, 3.0), (5_000_000, 5.0), (100_000, 1.2)])
async def test_each_turn_of_a_stream_is_charged_when_it_is_over(
    monkeypatch: pytest.MonkeyPatch, cost_us: int, charged_s: float
) -> None:
    """If it were charged at the stream's end, its messages would until then go before those of other tenants for
    free.
    """
    gate, tenants, target = _gate()
    gate.admission.limit, gate.learned = 1, None
    now = 100.0
    monkeypatch.setattr(lending_module, "monotonic", lambda: now)
    other = _Call(gate, tenants[1], target, False)
    stream = _Call(gate, tenants[0], target, True)
    assert stream.lending is not None and stream.ticket is not None
    await other.end()
    lending = stream.lending
    lending.ticket, stream.ticket = stream.ticket, None
    flow = lending.ticket._flow
    assert flow is not None and stream.has
    waiting = [_Call(gate, tenants[1], target, False) for _ in range(2)]
    now += 1.0
    stream.answered()
    assert lending.suspended_at_rest and waiting[0].has and flow.virtual == 1.0
    now += 7.0  # seconds without a permit
    stream.asks()
    await asyncio.sleep(0)
    for call in waiting:
        await call.end()
    await asyncio.sleep(0)
    assert not lending.suspended and flow.virtual == 1.0 + 0.01, "an estimate"
    now += 2.0
    lending.finish(cost_us)
    assert flow.virtual == pytest.approx(charged_s) and lending._total_s == 7.0
    assert stream.asking is not None
    await stream.asking
    gate.release_permit(target, stream.tenant, None, 3.0, cost_us, -1, True)
    assert gate.admission.inflight == 0


async def test_tenants_of_silent_streams_leave_a_third_one_a_permit_at_a_time() -> None:
    """Streams of two tenants must not hand each other their permits while a third tenant waits."""
    gate, tenants, target = _gate()
    mute = [_Call(gate, tenant, target, True) for tenant in tenants[:2] for _ in range(LIMIT)]
    for call in (*mute, *mute):
        call.silent()
    third = [_Call(gate, tenants[2], target, False) for _ in range(4)]
    more = _Call(gate, tenants[0], target, False)
    for number in range(4):
        assert len(gate.to_resume) == LIMIT + 1 and gate.admission.inflight == LIMIT
        (served,) = [call for call in third if call.has]
        third.remove(served)
        await served.end()
        assert len(third) == 3 - number and not more.has
    assert len(gate.to_resume) == LIMIT, "one more set of permits than the pool has, as at the beginning"
    for call in (*mute, more):
        await call.end()
    assert gate.admission.inflight == 0 and not gate.to_resume and not gate.lendable


def _gate() -> tuple[PoolGate, list[Tenant], Target]:
    more = f'[tenants.h]\ntier = "gold"\nmodels = ["*"]\nkeys = [{{ sha256 = "{"0" * 64}" }}]\n'
    snapshot = compile_documents(documents([1], max_inflight=LIMIT, extra=more))
    tenants = sorted(snapshot.tenants.values(), key=lambda each: each.tier.band)
    assert [each.tier.name for each in tenants] == ["gold", "gold", "gold", "bronze"]
    target = resolve_grpc("model", "digits", "", "ModelStreamInfer", tenants[0], RouteTable(snapshot.routes))
    gate = PoolGate(snapshot.pools["p"])
    gate.suspend_after_s = 30.0  # the timer does not run in these tests; `silent` stands in for it
    return gate, tenants, target


async def _do(operations: list[tuple[str, int, int]]) -> None:
    gate, tenants, target = _gate()
    calls: list[_Call] = []
    for what, whose, number in operations:
        if what in ("stream", "streams", "call"):
            count = LIMIT if what == "streams" else 1
            calls.extend([_Call(gate, tenants[whose], target, what != "call") for _ in range(count)])
        elif what == "hush":
            for call in calls:
                call.silent()
        elif calls:
            call = calls[number % len(calls)]
            if what == "end":
                calls.remove(call)
                await call.end()
            else:
                getattr(call, what)()
        for _ in range(4):
            await asyncio.sleep(0)
        _check(gate, calls, tenants)
    for call in calls:
        await call.end()
    assert not gate.to_resume and not gate.lendable and gate.admission.inflight == 0 and gate.held_bytes == 0


def _check(gate: PoolGate, calls: list[_Call], tenants: list[Tenant]) -> None:
    streams = [(call, call.lending) for call in calls if call.lending is not None]
    suspended = [lending for _, lending in streams if lending.suspended]
    inflight, queue = gate.admission.inflight, gate.admission.queue
    assert inflight == sum([call.has for call in calls]) - len(suspended)
    assert set(gate.to_resume) == {lending for lending in suspended if not lending.suspended_at_rest}
    at_work = [call for call in calls if call.has and not (call.lending is not None and call.lending.suspended_at_rest)]
    assert sum([call.tenant is tenants[-1] for call in at_work]) <= LIMIT
    waiting = [
        call
        for call in calls
        if call.waits and not (call.lending is not None and call.has and not call.lending.suspended_at_rest)
    ]
    assert len(waiting) == len(queue)
    if waiting:
        assert not [lending for _, lending in streams if lending.rests], (
            "a resting stream keeps no permit from a waiting call"
        )
    if waiting or gate.to_resume:
        assert inflight >= LIMIT
    urgent = min([call.tenant.tier.band for call in waiting], default=9)
    assert not [each for each in gate.lendable if each.tenant.tier.band > urgent], "it would be suspended"
    silent = [lending for lending in gate.lendable if lending.silent]
    if len(silent) == inflight and any(lending.tenant.tier.band >= urgent for lending in silent):
        mute = {lending.tenant.name for lending in (*silent, *gate.to_resume)}
        first = [call for call in waiting if call.tenant.tier.band == urgent]
        assert not [call for call in first if call.tenant.name not in mute], (
            "silent streams keep all permits from a tenant that has none of them"
        )
