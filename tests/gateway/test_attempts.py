"""The decision table of `attempts`: what is decided for each event of a call. No endpoint is contacted."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from oriel_gateway.call.attempts import (
    Attempts,
    Because,
    Decision,
    GiveUp,
    Send,
    Wait,
    decided_by_itself,
    mark_spent,
    note_failure,
    sticky_endpoint,
)
from oriel_gateway.pools.endpoint_state import HttpEndpoint, Reach
from oriel_gateway.pools.pool import PoolGate
from oriel_gateway.pools.sequences import Stick
from oriel_gateway.pools.upstream_answers import AnswerKind
from oriel_policies.documents import compile_documents
from oriel_policies.upstreams.budget import MAX_ATTEMPTS
from oriel_wire.errors import UpstreamBroken, UpstreamError, UpstreamUnreachable, UpstreamUnread
from oriel_wire.h1.response import ResponseHead, ResponseMemo, parse_response_head

from .endpoint_pools import pool
from .stack import documents

NOW = 1.0
MODEL = "digits"


def gate_of(count: int, probe: str = "") -> PoolGate:
    return PoolGate(replace(pool(count), probe=probe))


def head_of(status: int, *fields: bytes) -> ResponseHead:
    return parse_response_head(b"\r\n".join((b"HTTP/1.1 %d X" % status, *fields, b"content-length: 0")), ResponseMemo())


def reason(decision: Decision) -> tuple[type[Decision], Because]:
    return type(decision), decision.because


def failed(attempts: Attempts, endpoint: HttpEndpoint, error: UpstreamError, **given: bool) -> Decision:
    facts = {"kept": True, "sent": True, "twice": True, **given}
    return attempts.after_failure(endpoint, error, NOW, **facts)


def full_budget(gate: PoolGate) -> None:
    for _ in range(100):
        gate.retries.requested(NOW)


def empty_budget(gate: PoolGate) -> None:
    while gate.retries.spend(NOW):
        pass


@pytest.mark.parametrize(
    ("error", "given", "expected"),
    [
        (UpstreamUnreachable("down"), {"sent": False, "twice": False}, (Send, Because.UNREACHABLE)),
        (UpstreamUnread("closed"), {"twice": False}, (Send, Because.UNREAD)),
        (UpstreamBroken("cut"), {}, (Send, Because.IDEMPOTENT)),
        (UpstreamBroken("cut"), {"twice": False}, (GiveUp, Because.PERHAPS_EXECUTED)),
        (UpstreamBroken("cut"), {"kept": False}, (GiveUp, Because.NOT_KEPT)),
        (UpstreamUnread("closed"), {"kept": False}, (GiveUp, Because.NOT_KEPT)),
    ],
)
async def test_after_a_failure(error: UpstreamError, given: dict[str, bool], expected: object) -> None:
    gate = gate_of(2)
    full_budget(gate)
    attempts = Attempts(gate.endpoints, gate.retries, MODEL)
    first, second = gate.endpoints
    note_failure(gate.endpoints, first, error, NOW, "digits")
    decision = failed(attempts, first, error, **given)
    assert reason(decision) == expected
    if isinstance(decision, Send):
        assert decision.fresh is not isinstance(error, UpstreamUnreachable)
        assert decision.endpoint is second or isinstance(error, UpstreamUnread)
        assert attempts.count == (2 if decision.because is Because.IDEMPOTENT else 1)


@pytest.mark.parametrize("kind", [AnswerKind.REFUSED, AnswerKind.NO_MEMORY, AnswerKind.ABSENT])
async def test_a_step_of_a_sequence_goes_to_its_home_or_nowhere(kind: AnswerKind) -> None:
    gate = gate_of(2)
    full_budget(gate)
    home, other = gate.endpoints
    tenant = compile_documents(documents([1])).tenants["g"]
    step = Stick("t m 1", tenant)
    step.home = home
    attempts = Attempts(gate.endpoints, gate.retries, MODEL, step)
    refusal = attempts.after_answer(home, head_of(503), kind, NOW, kept=True)
    assert reason(refusal) == (GiveUp, Because.STICKS)
    again = failed(attempts, home, UpstreamUnread("closed"), twice=False)
    assert isinstance(again, Send) and again.endpoint is home and again.fresh
    note_failure(gate.endpoints, home, UpstreamUnreachable("down"), NOW, MODEL)
    assert gate.endpoints.usable == [other]
    assert reason(failed(attempts, home, UpstreamUnreachable("down"))) == (GiveUp, Because.LOST)


async def test_the_first_step_of_a_sequence_may_begin_at_another_endpoint() -> None:
    gate = gate_of(2)
    tenant = compile_documents(documents([1])).tenants["g"]
    step, further = Stick("t m 1", tenant, start=True), Stick("t m 1", tenant)
    first = sticky_endpoint(gate.endpoints, step, MODEL, NOW)
    assert first is not None
    (other,) = [each for each in gate.endpoints if each is not first]
    note_failure(gate.endpoints, first, UpstreamUnreachable("down"), NOW, MODEL)
    attempts = Attempts(gate.endpoints, gate.retries, MODEL, step)
    decision = failed(attempts, first, UpstreamUnreachable("down"), sent=False)
    assert isinstance(decision, Send) and decision.endpoint is other
    gate.endpoints.sequences.find(further, NOW)
    assert further.bound is other


async def test_a_request_that_was_not_read_is_sent_once_more_only() -> None:
    gate = gate_of(2)
    attempts, endpoint, unread = (
        Attempts(gate.endpoints, gate.retries, MODEL),
        gate_of(1).endpoints[0],
        UpstreamUnread("closed"),
    )
    assert reason(failed(attempts, endpoint, unread)) == (Send, Because.UNREAD)
    assert reason(failed(attempts, endpoint, unread)) == (GiveUp, Because.UNREAD)


async def test_a_broken_request_is_repeated_within_the_budget_and_the_attempts() -> None:
    gate = gate_of(2)
    endpoint, broken = gate.endpoints[0], UpstreamBroken("cut")
    empty_budget(gate)
    assert reason(failed(Attempts(gate.endpoints, gate.retries, MODEL), endpoint, broken)) == (GiveUp, Because.BUDGET)
    full_budget(gate)
    attempts = Attempts(gate.endpoints, gate.retries, MODEL)
    attempts.count = MAX_ATTEMPTS
    assert reason(failed(attempts, endpoint, broken)) == (GiveUp, Because.ATTEMPTS)


async def test_without_an_endpoint_a_call_waits_asks_for_the_model_or_gives_up() -> None:
    gate = gate_of(1)
    only = gate.endpoints[0]
    attempts = Attempts(gate.endpoints, gate.retries, MODEL)
    attempts.tried = (only,)
    assert reason(attempts.another(NOW, Because.FOUND)) == (GiveUp, Because.NOBODY_ELSE)
    gate.endpoints.note_reach(only, Reach.UNREACHABLE)
    assert reason(attempts.nobody(NOW)) == (Wait, Because.NOBODY_USABLE)
    probed = gate_of(2, probe="/v2/health/ready")
    assert reason(Attempts(probed.endpoints, probed.retries, MODEL).another(NOW, Because.FOUND)) == (
        Wait,
        Because.MODEL,
    )


@pytest.mark.parametrize(
    ("said", "status", "copy", "expected"),
    [
        (AnswerKind.ANSWER, 400, False, (GiveUp, Because.ANSWER)),
        (AnswerKind.ANSWER, 500, False, (GiveUp, Because.ANSWER)),
        (AnswerKind.ANSWER, 503, False, None),
        (AnswerKind.REFUSED, 503, False, None),
        (AnswerKind.ABSENT, 404, False, None),
        (AnswerKind.ANSWER, 404, True, (GiveUp, Because.ANSWER)),
        (AnswerKind.ANSWER, 500, True, (Wait, Because.COPY)),
        (AnswerKind.ABSENT, 404, True, (Wait, Because.COPY)),
        (AnswerKind.REFUSED, 503, True, (Wait, Because.COPY)),
    ],
)
def test_what_an_answer_decides_by_itself(said: AnswerKind, status: int, copy: bool, expected: object) -> None:
    decision = decided_by_itself(said, status, copy=copy)
    assert (None if decision is None else reason(decision)) == expected


def nothing(gate: PoolGate, attempts: Attempts) -> None:
    """The pool has budget, and the call an attempt."""


def spent(gate: PoolGate, attempts: Attempts) -> None:
    attempts.count = MAX_ATTEMPTS


def alone(gate: PoolGate, attempts: Attempts) -> None:
    gate.endpoints.note_reach(gate.endpoints[1], Reach.UNREACHABLE)


def poor(gate: PoolGate, attempts: Attempts) -> None:
    empty_budget(gate)


REFUSED, ABSENT, PERHAPS = AnswerKind.REFUSED, AnswerKind.ABSENT, AnswerKind.PERHAPS_ABSENT


@pytest.mark.parametrize(
    ("said", "status", "fields", "stick", "kept", "before", "expected"),
    [
        (REFUSED, 503, (), "", True, nothing, (Send, Because.REFUSED)),
        (REFUSED, 503, (), "user", True, nothing, (GiveUp, Because.STICKS)),
        (REFUSED, 503, (b"x-oriel-retry: spent",), "", True, nothing, (GiveUp, Because.PASSED_ON)),
        (REFUSED, 503, (), "", True, spent, (GiveUp, Because.ATTEMPTS)),
        (REFUSED, 503, (), "", False, nothing, (GiveUp, Because.ATTEMPTS)),
        (REFUSED, 503, (), "", True, alone, (GiveUp, Because.NOBODY_ELSE)),
        (REFUSED, 503, (), "", True, poor, (GiveUp, Because.BUDGET)),
        (AnswerKind.ANSWER, 503, (), "", True, nothing, (GiveUp, Because.ANSWER)),
        (ABSENT, 404, (), "", True, nothing, (Send, Because.ABSENT)),
        (ABSENT, 404, (), "user", True, nothing, (Send, Because.ABSENT)),
        (ABSENT, 404, (), "", True, alone, (GiveUp, Because.NOBODY_ELSE)),
        (ABSENT, 404, (), "", True, poor, (GiveUp, Because.BUDGET)),
        (PERHAPS, 404, (), "", True, nothing, (GiveUp, Because.ANSWER)),
    ],
)
async def test_after_an_answer_that_was_not_executed(
    said: AnswerKind,
    status: int,
    fields: tuple[bytes, ...],
    stick: str,
    kept: bool,
    before: Callable[[PoolGate, Attempts], None],
    expected: object,
) -> None:
    gate = gate_of(2)
    full_budget(gate)
    first, second = gate.endpoints
    attempts = Attempts(gate.endpoints, gate.retries, MODEL, Stick(stick) if stick else None)
    before(gate, attempts)
    if said is ABSENT:
        gate.endpoints.model_locations.note_denied(first, MODEL, NOW)
    decision = attempts.after_answer(first, head_of(status, *fields), said, NOW, kept=kept, searched=True)
    assert reason(decision) == expected
    if isinstance(decision, Send):
        assert decision.endpoint is second and attempts.count == 2 and not decision.fresh


@pytest.mark.parametrize("said", [ABSENT, PERHAPS])
async def test_the_model_is_searched_for_first_also_for_the_sake_of_the_next_call(said: AnswerKind) -> None:
    gate = gate_of(2)
    first = gate.endpoints[0]
    gate.endpoints.model_locations.note_denied(first, MODEL, NOW)
    assert Attempts(gate.endpoints, gate.retries, MODEL).after_answer(
        first, head_of(404), said, NOW, kept=True
    ) == Wait(Because.MODEL)
    gone = Attempts(gate.endpoints, gate.retries, MODEL).after_answer(first, head_of(404), said, NOW, kept=False)
    assert gone == GiveUp(Because.ATTEMPTS, search=True)


async def test_a_decision_starts_nothing() -> None:
    gate = gate_of(3, probe="/v2/health/ready")
    full_budget(gate)
    before = asyncio.all_tasks()
    first = gate.endpoints[0]
    attempts = Attempts(gate.endpoints, gate.retries, MODEL)
    attempts.another(NOW, Because.FOUND)
    failed(attempts, first, UpstreamBroken("cut"))
    attempts.after_answer(first, head_of(503), REFUSED, NOW, kept=True)
    assert asyncio.all_tasks() == before and all(endpoint.outstanding == 0 for endpoint in gate.endpoints)


def test_a_503_that_is_passed_on_is_marked_once() -> None:
    full, other = head_of(503), head_of(404)
    for head in (full, full, other):
        mark_spent(head)
    assert full.forward.count(b"x-oriel-retry: spent") == 1 and b"x-oriel-retry: spent" not in other.forward
