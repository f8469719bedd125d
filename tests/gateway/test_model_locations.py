"""Which endpoints have a model: servers of one pool often have different models."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_gateway.pools import model_locations as locations_module
from oriel_gateway.pools.endpoint_state import Reach
from oriel_gateway.pools.model_locations import ABSENT_S, ModelLocations

from ..waiting import until
from .endpoint_pools import endpoints, with_probe
from .gate import INFER, idle
from .special_routes import ok
from .stack import BRONZE, Client, Seen, Upstream, documents, gateway, upstream

UNKNOWN = b'{"error":"Request for unknown model: \'digits\' is not found"}'
BIG = b"x" * 200_000  # too large to be kept and sent again


class Asked:
    """An endpoint that reports at once whether it has a model. ready: None if it does not answer."""

    def __init__(self, ready: bool | None) -> None:
        self.ready = ready
        self.questions = 0

    def ask_for_model(self, model: str, timeout_s: float, done: Callable[[bool | None], None]) -> None:
        self.questions += 1
        if self.ready is not None:
            done(self.ready)


def locations(*ready: bool | None, first: bool = True) -> tuple[ModelLocations[Asked], list[Asked]]:
    usable = [Asked(each) for each in ready]
    made = ModelLocations[Asked](lambda: usable, probe_first=first)
    made.assigned(usable, usable)
    return made, usable


async def test_nobody_is_picked_before_everybody_was_asked() -> None:
    these, (a, b, c) = locations(False, True, False)
    assert these.unknown("m", 1.0) and these.among([a, b, c], "m", 1.0) == ()
    these.probe("m", None, 1.0)
    assert these.among([a, b, c], "m", 1.0) == [b] and list(these.lacking("m", 1.0)) == [a, c]
    assert [each.questions for each in (a, b, c)] == [1, 1, 1]


async def test_a_model_that_all_have_costs_nothing_more() -> None:
    these, all_ = locations(True, True)
    these.probe("m", None, 1.0)
    assert "m" in these.everywhere and these.among(all_, "m", 1.0) is all_ and list(these.lacking("m", 1.0)) == []


async def test_what_is_believed_is_asked_again_and_holds_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locations_module, "monotonic", lambda: 1.0)
    these, (a, b) = locations(False, True)
    these.probe("m", None, 1.0)
    a.ready = None  # this time it does not answer
    assert these.among([a, b], "m", 1.0 + ABSENT_S) == [b] and a.questions == 2
    assert these.among([a, b], "m", 1.5 + ABSENT_S) == [b] and a.questions == 2


async def test_a_model_nobody_has_is_not_asked_for_again_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locations_module, "monotonic", lambda: 1.0)
    these, all_ = locations(False, False)
    these.probe("m", None, 1.0)
    assert these.among(all_, "m", 2.0) == all_ and not these.unknown("m", 2.0) and not these.may_probe("m", 2.0)
    assert not these.elsewhere("m", 2.0, ()) and these.unknown("m", 4.0)


async def test_servers_that_do_not_know_the_question_are_judged_by_their_answers_to_calls() -> None:
    """Every server denies that it has the model, because it does not know the question, and one has it."""
    these, (a, b) = locations(False, False)
    these.probe("m", None, 1.0)
    these.note_denied(a, "m", 1.0)
    assert these.among([a, b], "m", 1.0) == [b]


async def test_a_model_that_moved_and_came_back_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1.0
    monkeypatch.setattr(locations_module, "monotonic", lambda: now)
    these, (a, b) = locations(True, False)
    these.probe("m", None, now)
    a.ready, b.ready = False, True
    these.note_denied(a, "m", now)
    now += 2.0
    assert these.may_probe("m", now) and these.probe("m", None, now)
    assert these.among([a, b], "m", now) == [b]
    a.ready, b.ready = True, False
    these.note_denied(b, "m", now)
    now += 2.0
    these.probe("m", None, now)
    assert these.among([a, b], "m", now) == [a]


async def test_what_servers_report_by_themselves_decides_where_calls_go() -> None:
    these, (a, b, c) = locations(True, True, True)
    these.probe("m", None, 1.0)
    these.note_reported("m", [b], 1.0)
    assert these.needs_check and these.among([a, b, c], "m", 1.0) == [b]
    these.note_denied(b, "m", 2.0)  # the server has taken the model out of memory since
    these.note_reported("m", [a, b], 3.0)
    assert these.among([a, b, c], "m", 3.0) == [a] and a.questions == 1
    these.note_reported("m", [a, b, c], 3.0 + ABSENT_S)
    assert "m" in these.everywhere and these.among([a, b, c], "m", 20.0) == [a, b, c]


async def test_new_endpoints_are_asked_before_calls_go_there() -> None:
    these, usable = locations(True, True)
    these.probe("m", None, 1.0)
    new = Asked(None)
    usable.append(new)
    these.assigned(usable, [new])
    assert these.among(usable, "m", 1.0) == usable[:2] and new.questions == 1


async def test_who_waits_is_told_once_and_not_after_leaving() -> None:
    these, _ = locations(None, None)
    told: list[str] = []
    stays, leaves = partial(told.append, "stays"), partial(told.append, "leaves")
    assert these.probe("m", stays, 1.0) and these.probe("m", leaves, 1.0)
    these.stop_waiting("m", leaves)
    await until(lambda: told == ["stays"])
    assert not these.unknown("m", 1.0)


async def test_questions_and_memory_are_bounded() -> None:
    """A client that names a thousand models that no server has costs one second's probes, and displaces no real
    name.
    """
    these, (a, b) = locations(True, False)
    these.max_models = 8
    these.probe("real", None, 1.0)
    a.ready = False
    for number in range(1000):
        if these.unknown(str(number), 1.0):
            these.probe(str(number), None, 1.0)
        these.note_denied(a, str(number), 1.0)
    assert a.questions <= locations_module.ASKS_PER_S / 2
    assert not these.probe("m", None, 1.0) and these.among([a, b], "m", 1.0) == [a, b]
    assert len(these._somewhere) <= 8 and len(these._nowhere) <= 8
    many, all_ = locations(*[False] * 300)
    many.probe("m", None, 1.0)
    assert sum(each.questions for each in all_) == 100  # the remaining names are asked for the next time


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(["denied", "probe", "gone", "back"])), max_size=30))
async def test_somebody_is_always_picked(steps: list[tuple[int, str]]) -> None:
    these, usable = locations(True, False, True)
    now = 1.0
    for which, step in steps:
        now += 0.7
        one = usable[which]
        if step == "denied":
            these.note_denied(one, "m", now)
        elif step == "look":
            these.probe("m", None, now)
        else:
            one.ready = step == "back"
        if these.unknown("m", now):
            these.probe("m", None, now)
        assert these.among(usable, "m", now)


# Through the gateway -----------------------------------------------------------------------------------------------


@pytest.fixture
async def four() -> AsyncIterator[list[Upstream]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(upstream()) for _ in range(4)]


def loaded(ups: list[Upstream], has: set[int], words: bytes = UNKNOWN) -> None:
    """Load the model on these servers only; the others answer as Triton does for an unknown model."""

    def of(number: int) -> Callable[[Seen], object]:
        async def answer(seen: Seen) -> bytes:
            if number in has or "/v2/health/" in seen.head:
                return ok()
            return ok(words, status="400 No") if seen.head.startswith("GET") else ok(words, status="404 Not Found")

        return answer

    for number, up in enumerate(ups):
        up.answer = of(number)  # type: ignore[assignment]


def calls(up: Upstream) -> int:
    return sum(seen.head.startswith("POST") for seen in up.seen)


@pytest.mark.parametrize("probed", [True, False], ids=["probed", "unprobed"])
async def test_a_model_is_found_where_it_is_loaded(four: list[Upstream], probed: bool) -> None:
    """One of four servers has the model. Calls go there, also after the model has moved."""
    loaded(four, {3})
    ports = [up.port for up in four]
    async with gateway(with_probe(ports) if probed else documents(ports)) as (port, core), Client(port) as client:
        these = core.pools["p"].endpoints
        these.model_locations.moved_s = 0.0
        if probed:
            await until(lambda: all(one.reach is Reach.READY for one in these))
        assert [(await client.ask(INFER, b"x")).status for _ in range(60)] == [200] * 60 and idle(core)
        assert calls(four[3]) == 60 and sum(map(calls, four)) <= (60 if probed else 61)
        loaded(four, {1})  # the model moves to another server
        before = calls(four[1])
        assert [(await client.ask(INFER, b"x")).status for _ in range(20)] == [200] * 20
        assert calls(four[1]) == before + 20


async def test_a_body_that_cannot_be_sent_twice_is_not_sent_where_the_model_is_not(four: list[Upstream]) -> None:
    """The gateway has to learn from probes, or from other calls, where the model is."""
    loaded(four, {2})
    ports = [up.port for up in four]
    async with gateway(with_probe(ports)) as (port, core), Client(port) as client:
        await until(lambda: all(one.reach is Reach.READY for one in core.pools["p"].endpoints))
        assert [(await client.ask(INFER, BIG)).status for _ in range(20)] == [200] * 20
    # without probes a call has to find out
    async with gateway(documents(ports)) as (port, core), Client(port) as client:
        assert [(await client.ask(INFER, BIG)).status for _ in range(20)][4:] == [200] * 16 and idle(core)


async def test_a_model_nobody_has_is_a_quick_404(four: list[Upstream]) -> None:
    loaded(four, set())
    async with gateway(with_probe([up.port for up in four])) as (port, core), Client(port) as client:
        await until(lambda: all(one.reach is Reach.READY for one in core.pools["p"].endpoints))
        assert {(await client.ask(INFER, b"x")).status for _ in range(20)} == {404}
        probes = [sum("GET /v2/models" in seen.head for seen in up.seen) for up in four]
        assert probes == [1] * 4 and sum(map(calls, four)) == 20 and core.pools["p"].retries.spent == 0
        assert (await client.ask(INFER, b"x", key=BRONZE)).status == 404 and idle(core)


async def test_a_404_of_the_model_itself_is_its_answer(four: list[Upstream]) -> None:
    """A model that runs may answer NOT_FOUND; such a call is not sent to another server."""

    async def answer(seen: Seen) -> bytes:
        return ok() if seen.head.startswith("GET") else ok(b'{"error":"no such user"}', status="404 Not Found")

    for up in four:
        up.answer = answer
    async with gateway(documents([up.port for up in four])) as (port, core), Client(port) as client:
        for _ in range(5):
            reply = await client.ask(INFER, b"x")
            assert reply.status == 404 and b"no such user" in reply.body
        assert sum(map(calls, four)) == 5 and core.pools["p"].retries.spent == 0 and idle(core)


async def test_a_caller_that_leaves_while_everybody_is_asked_leaves_nothing(four: list[Upstream]) -> None:
    async def silent(seen: Seen) -> bytes:
        if "GET /v2/models" in seen.head:
            await asyncio.Event().wait()
        return ok()

    for up in four:
        up.answer = silent
    async with gateway(with_probe([up.port for up in four])) as (port, core):
        await until(lambda: all(one.reach is Reach.READY for one in core.pools["p"].endpoints))
        async with Client(port) as client:
            client.send(INFER, b"x")
            await until(lambda: any("GET /v2/models" in seen.head for seen in four[0].seen))
            assert not idle(core)
        await until(lambda: idle(core))
        async with Client(port) as client:
            # no server has reported the model, so any of them may be called
            assert (await client.ask(INFER, b"x")).status == 200


# How errors count when an endpoint is picked -----------------------------------------------------------------------


@pytest.mark.parametrize("status", [400, 404, 405, 429, 500, 501, 502, 503, 504])
async def test_an_endpoint_that_fails_quickly_does_not_look_fast(status: int) -> None:
    """An endpoint that answers 429 at once must not get more calls than one that answers in 20 ms."""
    these = endpoints(2)
    good, bad = these
    got = {good: 0, bad: 0}
    now = 100.0
    for _ in range(600):
        now += 0.02
        one = these.pick(now)
        assert one is not None
        got[one] += 1
        if one is bad:
            these.note_error(bad, status, now, 0.0005)
        else:
            these.note_answer(good, now, 0.02)
            good.cost.load(0, now)
    if status in (429, 500, 502, 503):
        assert got[bad] <= 30
    else:
        assert got[bad] <= 400  # an error that the caller caused is no failure of the endpoint, but no advantage either
    await these.close()
