"""Who used the processors of a logic server."""

from oriel_logic.errors import Outcome
from oriel_logic.observe.stages import Ledger
from oriel_logic.observe.usage import Usage
from oriel_wire.context import CallContext, Used, format_cost, parse_cost
from oriel_wire.observe.trace import new_trace


def call(tenant: str, *, unbilled: str = "") -> CallContext:
    return CallContext(
        request_id="r",
        deadline=0.0,
        tier="gold",
        band=0,
        tenant=tenant,
        models=(),
        trace=new_trace(False),
        unbilled=unbilled,
    )


def ledger(cpu_ns: int, tokens: int = 0) -> Ledger:
    made = Ledger(new_trace(False))
    made.cpu_ns, made.tokens_out = cpu_ns, tokens
    return made


SIZES = (10, 20)


def test_what_ends_well_is_the_tenants_and_the_rest_is_recorded_with_its_reason() -> None:
    usage = Usage()
    usage.account(call("a"), "s", Outcome.OK, ledger(5, 7), *SIZES)
    usage.account(call("a"), "s", Outcome.OK, ledger(6), *SIZES)
    usage.account(call("a"), "s", Outcome.HANDLER_FAILED, ledger(1), *SIZES)
    usage.account(call("a"), "s", Outcome.CALLER_LEFT, ledger(2), *SIZES)
    usage.account(call(""), "s", Outcome.OK, ledger(3), *SIZES)
    usage.account(call("a", unbilled="shadow"), "s", Outcome.OK, ledger(4), *SIZES)
    lines = {line.why: line for line in usage.added("2026-11-24T17:05")}
    assert {why: line.cpu_ns for why, line in lines.items()} == {
        "": 11,
        "failed": 1,
        "left": 2,
        "untenanted": 3,
        "shadow": 4,
    }
    mine = lines[""]
    assert (mine.requests, mine.bytes_in, mine.bytes_out, mine.tokens_out) == (2, 20, 40, 7)
    assert (mine.unit, mine.tenant, mine.tier, mine.target, mine.device) == ("logic", "a", "gold", "s", "")
    assert usage.added("2026-11-24T17:06") == []


def test_tokens_that_an_inference_server_has_recorded_are_not_recorded_again() -> None:
    """An export adds up the lines of all units, so that a language model's tokens were billed twice."""
    usage, mine = Usage(), ledger(1, 9)
    mine.tokens_in = 30
    mine.reported(7, "dev=100;cpu=0;class=h100;tin=30;tout=4")
    mine.reported(7, "dev=100;cpu=0;class=h100;tin=30;tout=4")
    usage.account(call("a"), "s", Outcome.OK, mine, *SIZES)
    (line,) = usage.added("2026-11-24T17:05")
    assert (line.tokens_in, line.tokens_out) == (0, 1)
    assert (mine.tokens_in, mine.tokens_out) == (30, 9), "the gateway is told all of them"


def test_what_models_report_is_added_to_the_request() -> None:
    mine = ledger(1)
    mine.reported(7, "dev=100;cpu=0;class=h100")
    mine.reported(2, "dev=50;cpu=3;class=h100")
    mine.reported(-1, "nonsense")
    mine.reported(-1, "")
    assert (mine.device_ns, mine.cpu_ns, mine.device_class, mine.cost_us) == (150, 4, "h100", 9)


def test_the_header_of_what_was_used_reads_back() -> None:
    for used in (Used(1, 2, "cpu", 0, 0), Used(10**17, 0, "", 3, 4)):
        text = format_cost(used.device_ns, used.cpu_ns, used.device_class, used.tokens_in, used.tokens_out)
        assert parse_cost(text) == used
    for bad in (
        "",
        "dev=1",
        "dev=-1;cpu=0;class=a",
        "dev=1;cpu=0;class=A",
        "dev=1;cpu=0;class=a;tin=1",
        "dev=1;cpu=0;class=a ",
    ):
        assert parse_cost(bad) is None
