"""The table of sequences against a model that remembers everything."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.pools.endpoint_state import HttpEndpoint, Reach
from oriel_gateway.pools.sequences import IDLE_S, Sequences, Stick
from oriel_policies.documents import Tenant, compile_documents

from .endpoint_pools import pool
from .stack import documents

SNAPSHOT = compile_documents(documents([1]))
TENANTS = [SNAPSHOT.tenants["g"], SNAPSHOT.tenants["b"]]
STEPS = st.tuples(
    st.just("step"), st.integers(0, 1), st.integers(0, 1), st.booleans(), st.booleans(), st.integers(0, 1)
)
EVENTS = st.one_of(
    STEPS,
    st.tuples(st.sampled_from(("down", "up")), st.integers(0, 1)),
    st.tuples(st.just("pass"), st.sampled_from((1.0, IDLE_S / 2, IDLE_S))),
)


@dataclass
class Lived:
    """A sequence as it was. lost: its steps without START were refused since its endpoint was down."""

    home: int
    used_s: float
    lost: bool = False


def step_of(tenant: Tenant, number: int, *, start: bool = False) -> Stick:
    return Stick(f"{tenant.name} {number}", tenant, start=start)


@given(st.lists(EVENTS, max_size=60), st.sampled_from((2, 1000)))
def test_a_step_goes_to_the_home_of_its_sequence_or_nowhere(events: list[tuple], most: int) -> None:  # type: ignore[type-arg]
    made = pool(2)
    places = [HttpEndpoint(address, made) for address in made.endpoints]
    table, known, now = Sequences(most), dict[str, Lived](), 0.0
    for kind, *about in events:
        if kind == "pass":
            now += about[0]
        elif kind in ("down", "up"):
            places[about[0]].reach = Reach.UNREACHABLE if kind == "down" else Reach.READY
        else:
            by, number, start, end, other = about
            step = step_of(TENANTS[by], number, start=start)
            lived = known.get(step.key)
            if lived is not None and now - lived.used_s >= IDLE_S:
                lived = known.pop(step.key) and None
            down = lived is not None and (lived.lost or places[lived.home].reach is Reach.UNREACHABLE)
            try:
                table.find(step, now)
            except Refused as refused:
                assert refused.outcome is Outcome.SEQUENCE_LOST and down and not start and lived is not None
                lived.lost = True
                continue
            if start or lived is None:
                assert step.home is None
            elif most == 1000:
                assert not down and step.home is places[lived.home]
            else:  # it may have been forgotten for another one
                assert step.home is None or (not down and step.home is places[lived.home])
            at = places.index(step.home) if step.home is not None else other
            table.place(step, places[at], now)
            known[step.key] = Lived(at, now)
            if end:
                table.forget(step.key)
                del known[step.key]
        assert len(table._latest) <= most and table._shares.held == len(table._latest) == len(table.users)


def test_the_sequences_of_one_tenant_leave_room_for_those_of_another() -> None:
    made = pool(1)
    table, (place,) = Sequences(8), [HttpEndpoint(address, made) for address in made.endpoints]
    gold, other = TENANTS[0], SNAPSHOT.tenants["limited"]
    assert gold.tier is other.tier
    for number in range(20):
        table.place(step_of(gold, number, start=True), place, 0.0)
    for number in range(4):
        table.place(step_of(other, number, start=True), place, 0.0)
    for number in range(4):
        found = step_of(other, number)
        table.find(found, 1.0)
        assert found.home is place, number
    assert len(table._latest) == 8


def test_an_endpoint_is_a_home_until_its_sequences_are_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    made = pool(1)
    table, (place,) = Sequences(), [HttpEndpoint(address, made) for address in made.endpoints]
    table.place(step_of(TENANTS[0], 1, start=True), place, 0.0)
    for now, homes in ((IDLE_S - 1.0, {place}), (IDLE_S, set())):
        monkeypatch.setattr("oriel_gateway.pools.sequences.monotonic", lambda now=now: now)
        assert table.homes() == homes


def test_an_id_has_one_tenant_at_servers_that_do_not_tell_tenants_apart() -> None:
    made = pool(1)
    http, grpc, (place,) = Sequences(), Sequences(), [HttpEndpoint(address, made) for address in made.endpoints]
    grpc.users = http.users
    first, other = (Stick("sum 7", tenant, start=True) for tenant in TENANTS)
    assert http.place(first, place, 0.0)
    for table in (http, grpc):
        with pytest.raises(Refused, match="another tenant uses this sequence_id"):
            table.find(other, 1.0)
        assert not table.place(other, place, 1.0), "both have asked at once"
    http.apart = True
    http.find(other, 1.0)
    assert http.place(other, place, 1.0)
    http.forget(first.key)
    assert list(http.users.values()) == [other]
    http.forget(other.key)
    assert not http.users
