"""The grammar of `oriel tune --objective`, and how a load is judged by it."""

from math import ceil, inf
from string import ascii_letters, digits

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from oriel_cli.main import main
from oriel_tools.load.tally import Outcome, Tally
from oriel_tools.tune.objective import (
    BadObjective,
    Objective,
    Reached,
    checked,
    loss_text,
    most_lost,
    number,
    parse,
    reached,
    score,
)


def decimals(least: float, most: float) -> st.SearchStrategy[float]:
    return st.integers(round(least * 1000), round(most * 1000)).map(lambda each: each / 1000)


OBJECTIVES = st.builds(
    Objective,
    percent=decimals(1.0, 99.99),
    bound_ms=decimals(0.1, 600_000.0),
    rate=decimals(0.01, 100_000.0),
    tier=st.text(ascii_letters + digits + "_-", max_size=64),
    as_percentile=st.booleans(),
)


@given(OBJECTIVES)
def test_what_an_objective_is_written_as_is_read_as_it_was(objective: Objective) -> None:
    assert parse(str(objective)) == objective


@given(OBJECTIVES, st.sampled_from(["", " ", "  \t"]))
def test_blanks_between_the_parts_and_seconds_do_not_matter(objective: Objective, blank: str) -> None:
    tier = f" {blank}for {objective.tier}" if objective.tier else ""
    goal = f"p{number(objective.percent)}{blank}<={blank}"
    if not objective.as_percentile:
        goal = f"{number(objective.percent)}{blank}%{blank} within {blank}"
    rate = f"at {blank}{number(objective.rate)}{blank}/{blank}s"
    text = f"{blank}{goal}{number(objective.bound_ms)}{blank}ms{tier} {rate}"
    assert parse(text) == objective


@given(st.text(max_size=80))
@example("p99 <= 50 ms at 300/s\n p50 <= 1 ms at 1/s")
@example("p٩٩ <= 50 ms at 300/s")
def test_any_other_text_is_refused_in_one_line_that_shows_the_form(text: str) -> None:
    with pytest.raises(BadObjective) as refused:
        parse(text)
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 500
    assert "p99 <= 50 ms for gold at 300/s" in str(refused.value) or " is " in str(refused.value)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "a percentile such as 'p99 <=', or a share such as '99 % within', is expected. The form is"),
        ("p99 < 50 ms at 300/s", "objective 'p99 < 50 ms at 300/s': write <= in place of <. The form is"),
        ("p99 <= 50 at 300/s", "a bound such as '50 ms' or '0.05 s' is expected, not '50 at 300/s'"),
        ("p99 <= 50 ms for  at 300/s", "the calls per second, such as 'at 300/s', and nothing after it, is expected"),
        ("p99 <= 50 ms for gold! at 300/s", "the name of a tier"),
        ("p99 <= 50 ms for gold", "the calls per second, such as 'at 300/s', and nothing after it, is expected. The"),
        ("p100 <= 50 ms at 300/s", "the percentile must be 1 to 99.99"),
        ("p99 <= 0 ms at 300/s", "the bound in ms must be 0.1 to 600000"),
        ("p99 <= 50 ms at 0/s", "the rate must be 0.01 to 100000"),
    ],
)
def test_a_mistake_is_named_where_it_is(text: str, why: str) -> None:
    with pytest.raises(BadObjective) as refused:
        parse(text)
    assert why in str(refused.value)


def test_both_forms_and_both_units_mean_the_same_goal() -> None:
    one, other = parse("p99 <= 0.05 s for gold at 300/s"), parse("99 % within 50 ms for gold at 300/s")
    assert (one.share, one.bound_ms, one.rate, one.name) == (0.99, 50.0, 300.0, "gold")
    assert (other.share, other.bound_ms, other.rate, other.name) == (0.99, 50.0, 300.0, "gold")
    assert str(one) == "p99 <= 50 ms for gold at 300/s" and str(other) == "99 % within 50 ms for gold at 300/s"
    assert parse("p99.9 <= 1 s at 0.5/s").name == "load"


def test_several_objectives_have_tiers_of_their_own() -> None:
    gold, bronze = parse("p99 <= 50 ms for gold at 1/s"), parse("p95 <= 1 s for bronze at 2/s")
    assert checked([gold, bronze]) == [gold, bronze]
    with pytest.raises(BadObjective, match="a tier of its own"):
        checked([gold, parse("p50 <= 5 ms for gold at 1/s")])
    with pytest.raises(BadObjective, match="9 objectives, at most 8"):
        checked([parse(f"p99 <= 1 s for t{index} at 1/s") for index in range(9)])


def test_the_command_refuses_a_bad_objective_as_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["tune", "m", "--repository", ".", "--objective", "fast"])
    assert ended.value.code == 2
    assert "the form is" in capsys.readouterr().err.lower()
    twice = ["--objective", "p99 <= 50 ms at 1/s"] * 2
    assert main(["tune", "m", "--repository", ".", *twice]) == 2
    assert "a tier of its own" in capsys.readouterr().err


@given(
    st.lists(st.one_of(st.none(), st.floats(0.1, 200.0)), min_size=1, max_size=60),
    st.sampled_from([50.0, 90.0, 99.0, 99.9]),
)
def test_an_objective_is_met_if_enough_of_all_calls_were_answered_in_time(
    latencies_ms: list[float | None], percent: float
) -> None:
    """None: a call that was refused."""
    objective = Objective(percent=percent, bound_ms=100.0, rate=10.0)
    tally = Tally()
    for latency_ms in latencies_ms:
        tally.scheduled += 1
        outcome = Outcome("good") if latency_ms is not None else Outcome("refused", "503 queue_full")
        tally.finished(outcome, (latency_ms or 0.0) / 1e3, 0.0, 0.1)
    found = reached(objective, tally, 2.0)
    needed = ceil(len(latencies_ms) * percent / 100.0 - 1e-9)
    ordered = sorted([inf if each is None else each for each in latencies_ms])
    in_time = len([each for each in latencies_ms if each is not None and each / 1e3 <= 0.1])
    assert found.met == (in_time >= needed)
    assert found.attained == in_time / len(latencies_ms) and found.goodput == in_time / 2.0
    exact_ms = ordered[needed - 1]
    assert found.latency_ms == exact_ms == inf or exact_ms * 0.999 <= found.latency_ms <= exact_ms * 1.006
    assert (found.shortfall == 0.0) or not found.met


def of(attained: float, latency_ms: float, *, as_percentile: bool = True, tier: str = "") -> Reached:
    objective = Objective(percent=99.0, bound_ms=50.0, rate=10.0, tier=tier, as_percentile=as_percentile)
    return Reached(objective=objective, calls=100, attained=attained, latency_ms=latency_ms, goodput=attained * 10.0)


def test_a_loss_is_counted_in_the_unit_of_the_objective() -> None:
    assert loss_text(of(1.0, 30.0), of(0.98, 61.5)) == "p99 61.5 ms instead of 30.0 (+31.5 ms)"
    as_share = loss_text(of(1.0, 30.0, as_percentile=False, tier="gold"), of(0.98, 61.5, as_percentile=False))
    assert as_share == "98.00% of gold in time instead of 100.00% (-2.00 points)"
    assert loss_text(of(1.0, 30.0), of(0.5, inf)) == "50.00% in time instead of 100.00% (-50.00 points)"


def test_what_misses_more_calls_scores_worse_and_then_what_takes_longer() -> None:
    scores = [score(each) for each in ([of(1.0, 20.0)], [of(1.0, 30.0)], [of(0.98, 60.0)], [of(0.5, inf)])]
    assert scores == sorted(scores) and len(set(scores)) == 4
    assert score([of(1.0, 30.0), of(0.5, inf)]) == score([of(0.5, inf)])
    better, worse = [of(1.0, 30.0), of(1.0, 20.0, tier="b")], [of(1.0, 31.0), of(1.0, 40.0, tier="b")]
    assert most_lost(better, worse) == (better[1], worse[1])
