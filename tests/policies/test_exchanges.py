"""Which messages of a stream may still be executing, judged by the messages and answers that were seen."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_policies.waiting.exchanges import MAX_KNOWN, MAX_MODELS, Exchange, Habits

AFTER_S = 0.5


def exchange(habits: Habits | None = None, tenant: str = "t") -> Exchange:
    return Exchange(Habits() if habits is None else habits, tenant)


def test_one_answer_each_is_rest_at_once() -> None:
    one = exchange()
    assert one.rests(0.0, AFTER_S)
    one.sent("m")
    assert one.unanswered == 1 and one.at_work == ["m"] and not one.rests(9.0, AFTER_S)
    one.answered("m", None, 1.0)
    assert one.unanswered == 0 and one.at_work == [] and one.rests(1.0, AFTER_S)
    one.sent("m")
    assert one.ends
    one.held()
    assert not one.ends, "it may gather messages, and answer them together"
    one.answered("m", None, 2.0)
    one.sent("m")
    assert one.ends


def test_a_model_that_says_more_without_a_last_word_may_always_say_more() -> None:
    habits = Habits()
    one = exchange(habits)
    one.sent("m")
    one.answered("m", None, 1.0)
    one.answered("m", None, 1.2)
    assert not one.rests(1.6, AFTER_S) and one.rests(1.7, AFTER_S)
    other = exchange(habits)
    other.sent("m")
    other.answered("m", None, 2.0)
    assert not other.rests(2.4, AFTER_S) and other.rests(2.5, AFTER_S), "known from the first answer on"
    other.sent("m")
    assert not other.ends
    stranger = exchange(habits, "another tenant")
    stranger.sent("m")
    stranger.answered("m", None, 2.0)
    assert stranger.rests(2.0, AFTER_S), "nobody learns from another tenant"


def test_a_last_word_is_believed() -> None:
    one = exchange()
    one.sent("m")
    for now in (1.0, 1.1, 1.2):
        one.answered("m", False, now)
        assert one.unanswered == 0 and not one.rests(9.0, AFTER_S)
    one.answered("m", True, 1.3)
    assert one.rests(1.3, AFTER_S)
    one.sent("m")
    one.answered("m", False, 2.0)
    one.silent()  # not every server says the last word
    assert one.rests(2.5, AFTER_S)


def test_a_message_without_an_answer_is_at_work_and_its_model_answers_not_each() -> None:
    one = exchange()
    one.sent("m")
    one.answered("m", None, 1.0)
    one.sent("m")
    one.sent("n")
    one.silent()
    assert not one.ends and one.unanswered == 2 and not one.rests(9.0, AFTER_S)
    one.answered("n", None, 2.0)
    assert one.at_work == ["m"]
    one.answered("", True, 3.0)  # an error names no model
    assert one.rests(3.0, AFTER_S)


def test_what_is_remembered_is_bounded() -> None:
    habits = Habits()
    one = exchange(habits)
    for n in range(MAX_MODELS * 3):
        one.sent(f"m{n}")
    assert one.unanswered == MAX_MODELS * 3 and len(one.at_work) == MAX_MODELS + 1
    for n in range(MAX_MODELS * 3):
        one.answered(f"m{n}", None, 1.0)
    assert one.unanswered == 0 and one.rests(1.0, AFTER_S)
    for n in range(MAX_KNOWN * 2):
        one.sent(f"x{n}")
        one.answered(f"x{n}", None, 1.0)
    assert len(habits) <= MAX_KNOWN


ANSWERS = st.integers(0, 3)  # of one message


@settings(max_examples=100, deadline=None)
@given(
    st.booleans(),
    st.lists(st.tuples(st.sampled_from(["ask", "answer", "answer"]), st.sampled_from("abc"), ANSWERS), max_size=80),
)
def test_what_rests_is_not_at_work(says_last: bool, operations: list[tuple[str, str, int]]) -> None:
    """Before a server that says the last word, or one that answers each message once, in any order of models."""
    one = exchange()
    under_way: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    now = 0.0
    for what, model, answers in operations:
        now += 0.01
        left = under_way[model]
        if what == "ask":
            one.sent(model)
            left.append(1 + answers if says_last else 1)
        elif left:
            left[0] -= 1
            one.answered(model, left[0] == 0 if says_last else None, now)
            if not left[0]:
                left.pop(0)
        at_work = [name for name, each in under_way.items() if each]
        assert one.rests(now, AFTER_S) is (not at_work)
        assert set(one.at_work) <= set(at_work)
        assert 0 <= one.unanswered <= sum(map(len, under_way.values()))
        if not says_last:
            assert set(one.at_work) == set(at_work)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["asked", "answered", "answered", "silent"]),
            st.sampled_from(["a", "b", "", "other"]),
            st.sampled_from([None, True, False]),
        ),
        max_size=80,
    )
)
def test_any_server_leaves_the_counts_sound(operations: list[tuple[str, str, Any]]) -> None:
    habits = Habits()
    one = exchange(habits)
    asked, now = 0, 0.0
    for what, model, final in operations:
        now += 0.01
        if what == "asked":
            one.sent(model)
            asked += 1
        elif what == "answered":
            one.answered(model, final, now)
        else:
            one.silent()
        assert 0 <= one.unanswered <= asked
        assert one.at_work or not one.unanswered
        assert not (one.unanswered and one.rests(now + 9.0, AFTER_S))
    for _ in range(asked):
        one.answered("", True, now)
    one.silent()
    assert one.unanswered == 0 and one.rests(now + 9.0, AFTER_S), "it can always come to rest"


def test_a_first_word_is_not_the_end_of_the_work() -> None:
    one = exchange(Habits())
    one.sent("a")
    one.answered("a", False, 0.1)
    assert one.at_work == ["a"]
    one.sent("a")
    one.answered("a", True, 0.2)
    assert one.at_work == ["a"]
    one.answered("a", True, 0.3)
    assert one.at_work == []


def test_an_answer_without_a_name_takes_no_model_from_its_work() -> None:
    """An error, say: which of two models it is of cannot be known."""
    one = exchange(Habits())
    one.sent("dear")
    one.sent("broken")
    one.answered("", True, 0.1)
    assert one.at_work == ["dear", "broken"]
    one.answered("dear", True, 0.2)
    one.sent("dear")
    assert one.at_work == ["dear", "broken"]
    one.answered("dear", True, 0.3)
    one.answered("", True, 0.4)
    assert one.at_work == []
