"""What a head says of its request's deadline."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_wire.context import (
    CallContext,
    Hop,
    parse_timeout_ms,
    read_headers,
    valid_request_id,
)
from oriel_wire.observe.trace import TraceContext, child


@pytest.mark.parametrize(
    ("headers", "trusted", "left_s"),
    [
        ({}, True, 60.0),
        ({"x-oriel-timeout-ms": "90000"}, True, 90.0),
        ({"x-oriel-timeout-ms": "90000"}, False, 60.0),
        ({"x-request-timeout-ms": "300"}, False, 0.3),
        ({"x-request-timeout-ms": "90000"}, False, 60.0),  # a client only shortens
        ({"x-oriel-timeout-ms": "500", "x-request-timeout-ms": "300"}, True, 0.3),
        ({"x-oriel-timeout-ms": "200", "x-request-timeout-ms": "300"}, True, 0.2),
        ({"x-request-timeout-ms": "0"}, False, 60.0),
        ({"x-request-timeout-ms": "-1"}, False, 60.0),
        ({"x-request-timeout-ms": "soon"}, False, 60.0),
    ],
)
def test_deadline(headers: dict[str, str], trusted: bool, left_s: float) -> None:
    plan = read_headers(headers.get, trusted=trusted)
    for now in (100.0, 200.0):
        assert plan.at(now, 60.0).deadline == pytest.approx(now + left_s)


def test_requests_of_one_plan_have_their_own_ids() -> None:
    plan = read_headers({}.get, trusted=False)
    first, second = plan.at(1.0, 1.0), plan.at(1.0, 1.0)
    assert first.request_id != second.request_id and first.trace.trace_id != second.trace.trace_id


@pytest.mark.parametrize(("given", "kept"), [("a.b", True), ("_-1", True), (".", False), ("..", False), (".a", False)])
def test_an_id_that_a_path_would_swallow_is_not_kept(given: str, kept: bool) -> None:
    """`/decisions/..` is another page."""
    assert valid_request_id(given) is kept


@pytest.mark.parametrize(
    ("given", "seconds"),
    [
        ("86400001", 86400.0),
        ("999999999999", 86400.0),
        ("1000000000000", 86400.0),
        ("1" * 19, None),
        ("NaN", None),
        ("-1", None),
        ("\xb2", None),
    ],
)
def test_a_deadline_is_at_most_a_day(given: str, seconds: float | None) -> None:
    assert parse_timeout_ms(given) == seconds


@given(st.floats(-1.0, 1e4), st.sampled_from(["", "k=v,l=w"]))
def test_a_hop_has_what_the_context_has(left_s: float, state: str) -> None:
    trace = child(TraceContext(7, 9, True, state))
    ctx = CallContext(
        request_id="r-1", deadline=50.0 + left_s, tier="gold", band=3, tenant="acme", models=("a", "b*"), trace=trace
    )
    read = read_headers(dict(Hop(ctx).headers(50.0, trace)).get, trusted=True)
    assert (read.request_id, read.tier, read.band, read.tenant, read.models) == ("r-1", "gold", 3, "acme", ("a", "b*"))
    assert read.trace is not None and read.trace.trace_id == 7 and read.trace.state == state
    assert read.timeout_s is not None and -1e-9 < read.timeout_s - max(0.0, left_s) < 0.002
    bare = CallContext(request_id="r", deadline=1.0, tier="", band=0, tenant="", models=(), trace=trace)
    assert {name for name, _ in Hop(bare).headers(0.0, trace)} <= {
        *("x-request-id", "x-oriel-priority", "x-oriel-timeout-ms", "traceparent", "tracestate")
    }


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("token=50;max=600000", (0.05, 600.0)),
        ("token=0;max=7", (0.0, 0.007)),
        ("token=999999999;max=999999999", (86400.0, 86400.0)),
        *[(bad, (0.0, 0.0)) for bad in ("", "token=50", "max=1;token=1", "token=5.0;max=1", "token=1;max=1;")],
        *[(bad, (0.0, 0.0)) for bad in ("token=\u0661;max=1", "token=1234567890;max=1", "token=1;max=1\n")],
    ],
)
def test_the_times_of_a_stream_are_read_from_trusted_peers_and_sent_on(value: str, found: tuple[float, float]) -> None:
    get = {"x-oriel-stream": value}.get
    ctx = read_headers(get, trusted=True).at(1.0, 1.0)
    assert (ctx.token_s, ctx.stream_s) == found
    again = read_headers(dict(Hop(ctx).headers(1.0, ctx.trace)).get, trusted=True)
    assert (again.token_s, again.stream_s) == found
    stranger = read_headers(get, trusted=False).at(1.0, 1.0)
    assert (stranger.token_s, stranger.stream_s) == (0.0, 0.0)


@given(st.floats(-1.0, 1e4))
def test_a_gateway_is_given_the_requests_ticket_and_less_time_and_none_of_our_own_headers(left_s: float) -> None:
    trace = TraceContext(7, 9, True, "")
    ctx = CallContext(
        request_id="r-1",
        deadline=50.0 + left_s,
        tier="gold",
        band=1,
        tenant="acme",
        models=("a",),
        trace=trace,
        ticket="acme/gold/t",
    )
    found = dict(Hop(ctx, through_gateway=True).headers(50.0, trace))
    assert found["authorization"] == "Oriel-Ticket acme/gold/t"
    assert not any(name.startswith("x-oriel-") for name in found)
    timeout_ms = int(found["x-request-timeout-ms"])
    assert 1 <= timeout_ms <= max(1, left_s * 950.0 + 1, left_s * 1000.0 - 99.0)


def test_baggage_is_passed_on_up_to_a_bound() -> None:
    for sent, passed in (("a=1,b=2", "a=1,b=2"), ("a=" + "x" * 8190, "a=" + "x" * 8190), ("a=" + "x" * 8191, "")):
        ctx = read_headers({"baggage": sent}.get, trusted=False).at(1.0, 1.0)
        assert ctx.baggage == passed
        for hop in (Hop(ctx), Hop(ctx, through_gateway=True)):
            assert dict(hop.headers(1.0, ctx.trace)).get("baggage", "") == passed
