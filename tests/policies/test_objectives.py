"""The rule that names where a late call lost its time: a delay in one place is found there, and nothing gets lost."""

from math import isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_policies.promise.objectives import (
    ALPHA,
    MODEL_CALLS,
    STAGES,
    Stamps,
    Times,
    Usual,
    blame,
    divide,
    inside,
    passed_in,
    place_not_left,
)

seconds = st.floats(0.0, 30.0).map(lambda value: round(value, 6))
REPORTED = (*MODEL_CALLS, "logic", "logic-wait", "logic-pre", "queue", "gateway-queue", "compute")


@st.composite
def stamps(draw: st.DrawFn) -> Stamps:
    """A call that reached some of its stages, in order."""
    at = [1000.0 + draw(seconds)]
    for _ in range(6):
        at.append(at[-1] + draw(seconds))
    received, limited, queued, permit, sent, response, ended = at
    reached = draw(st.integers(0, 4))
    return Stamps(
        received,
        limited if draw(st.booleans()) else 0.0,
        queued if reached > 0 else 0.0,
        permit if reached > 1 else 0.0,
        sent if reached > 2 else 0.0,
        response if reached > 3 or (reached == 1 and draw(st.booleans())) else 0.0,
        ended,
        draw(seconds),
    )


@given(stamps(), st.dictionaries(st.sampled_from(REPORTED), seconds))
def test_places_sum_to_the_whole_time_of_a_call_whatever_a_server_reports(
    of: Stamps, reported: dict[str, float]
) -> None:
    times = divide(of, reported)
    assert len(times) == len(STAGES) and min(times) >= -1e-9
    assert isclose(sum(times), of.ended_s - of.received_s, abs_tol=1e-6)


def a_call(delayed: str = "", delay_s: float = 0.0, *, usual_s: float = 0.01) -> tuple[float, ...]:
    """A call through all places but `upstream`, for its times to be divided anew from stamps and reports."""
    took = {place: usual_s for place in STAGES if place != "upstream"}
    if delayed:
        took[delayed] += delay_s
    received = 5000.0
    limited = received + took["body"]
    queued = limited + took["limiter"]
    permit = queued + took["queue"]
    sent = permit + took["endpoint"]
    called = took["model_wait"] + took["model"]
    logic = took["logic_wait"] + took["logic"] + called
    response = sent + took["network"] + logic
    reported = {
        "logic": logic, "logic-wait": took["logic_wait"], "logic-infer": called, "queue": took["model_wait"],
        "compute": took["model"],
    }  # fmt: skip
    return divide(Stamps(received, limited, queued, permit, sent, response, response + took["answer"]), reported)


@given(st.sampled_from([place for place in STAGES if place != "upstream"]), st.floats(0.02, 5.0), st.floats(0.0, 0.5))
def test_the_place_that_is_delayed_is_the_cause(place: str, delay_s: float, usual_s: float) -> None:
    usual = Usual()
    for _ in range(30):
        usual.learn(a_call(usual_s=usual_s))
    cause, excess_s = blame(a_call(place, delay_s, usual_s=usual_s), usual)
    assert cause == place and isclose(excess_s, delay_s, abs_tol=1e-6)


@given(
    st.lists(st.lists(seconds, min_size=11, max_size=11), min_size=1, max_size=40),
    st.lists(seconds, min_size=11, max_size=11),
)
def test_a_call_slower_than_all_that_were_learned_has_a_cause_with_an_excess(
    learned: list[list[float]], late: list[float]
) -> None:
    usual = Usual()
    for times in learned:
        usual.learn(times)
    if sum(late) > max(map(sum, learned)) + 1e-6:
        cause, excess_s = blame(late, usual)
        assert cause in STAGES and excess_s > 0.0


def test_of_equal_excesses_the_earlier_place_is_the_cause() -> None:
    times = [0.0] * len(STAGES)
    times[STAGES.index("model")] = times[STAGES.index("queue")] = 0.2
    usual = Usual()
    usual.learn([0.0] * len(STAGES))
    assert blame(times, usual) == ("queue", 0.2)
    assert blame(times, None) == ("queue", 0.2)


def test_without_any_excess_the_place_with_the_most_time_is_the_cause() -> None:
    times = [0.0] * len(STAGES)
    times[STAGES.index("model")] = 0.3
    usual = Usual()
    usual.learn([1.0] * len(STAGES))  # the calls of a slower tier
    assert blame(times, usual) == ("model", 0.0)


def test_what_is_usual_follows_with_a_weight_of_a_twentieth() -> None:
    usual = Usual()
    usual.learn([1.0] * len(STAGES))
    usual.learn([3.0] * len(STAGES))
    assert usual.times == [2.0] * len(STAGES)  # the first ones weigh the same
    for _ in range(100):
        usual.learn([2.0] * len(STAGES))
    usual.learn([4.0] * len(STAGES))
    assert usual.times[0] == pytest.approx(2.0 + ALPHA * 2.0)


@pytest.mark.parametrize(
    ("reported", "expected"),
    [
        ({}, "upstream"),
        ({"app": 0.9, "total": 1.0}, "upstream"),  # another server's own words
        ({"queue": 0.2, "compute": 0.7}, "network model_wait model"),
        ({"logic": 0.9}, "network logic"),
        ({"logic": 0.9, "logic-infer": 0.6}, "network logic model"),  # a model server that says nothing of itself
        ({"logic": 0.9, "logic-infer": 0.6, "gateway-queue": 0.3}, "network logic model_wait"),
        ({"logic": 0.9, "logic-infer": 0.1, "logic-stream": 0.7, "compute": 0.8}, "network logic model"),
    ],
)
def test_the_servers_own_words_divide_the_time_until_their_answer(reported: dict[str, float], expected: str) -> None:
    parts = inside(1.0, reported)._asdict()
    assert " ".join(place for place, took in parts.items() if took > 1e-9) == expected
    assert isclose(sum(parts.values()), 1.0)


def test_overlapping_calls_of_models_are_no_longer_than_the_time_that_passed() -> None:
    # Two calls at the same time, of 0.4 s each, in a service that took 0.5 s.
    parts = inside(0.5, {"logic": 0.5, "logic-infer": 0.8, "queue": 0.2, "compute": 0.6})
    assert parts == pytest.approx(Times(model_wait=0.125, model=0.375))


def test_where_the_target_passed_is_told_beside_the_cause() -> None:
    times = a_call("model", 1.0, usual_s=0.1)
    assert passed_in(times, 0.25) == "queue" and passed_in(times, 1.0) == "model" and passed_in(times, 9.0) == ""


def test_a_call_that_never_left_a_place_was_lost_there() -> None:
    reached = [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 9.0]
    expected = ["body", "limiter", "queue", "endpoint", "upstream", "answer"]
    for stage, place in enumerate(expected):
        if stage:
            reached[stage] = 1.0 + stage
        assert place_not_left(Stamps(*reached)) == place
