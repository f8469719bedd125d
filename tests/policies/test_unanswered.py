"""Which models may be at work for a stream, judged by the messages and answers that were seen."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_policies.waiting.unanswered import MAX_MODELS, Unanswered


def test_only_an_answer_that_others_may_not_follow_finishes_a_message() -> None:
    one = Unanswered()
    one.sent("a")
    one.note_answer("a", False)
    assert one.models == {"a": 1}
    one.sent("a")
    one.note_answer("a", True)
    assert one.models == {"a": 1}
    one.note_answer("a", None)
    assert not one.models


def test_an_answer_without_a_name_takes_no_model_from_its_work() -> None:
    """An error, say: which of two models it is of cannot be known."""
    one = Unanswered()
    one.sent("dear")
    one.sent("broken")
    one.note_answer("", True)
    assert list(one.models) == ["dear", "broken"]
    one.note_answer("dear", True)
    one.sent("dear")
    assert set(one.models) == {"dear", "broken"}
    one.note_answer("dear", True)
    one.note_answer("", True)
    assert not one.models


def test_the_models_of_a_stream_that_are_distinguished_are_bounded() -> None:
    one = Unanswered()
    for n in range(MAX_MODELS * 3):
        one.sent(f"m{n}")
    assert len(one.models) == MAX_MODELS + 1 and sum(one.models.values()) == MAX_MODELS * 3


@settings(max_examples=100, deadline=None)
@given(
    st.booleans(),
    st.lists(
        st.tuples(st.sampled_from(["ask", "answer", "answer"]), st.sampled_from("abc"), st.integers(0, 3)), max_size=80
    ),
)
def test_models_at_work_are_those_with_unfinished_messages(
    marks_last: bool, operations: list[tuple[str, str, int]]
) -> None:
    """Before a server that marks the last answer, or one that answers each message once, in any order of models."""
    one = Unanswered()
    under_way: dict[str, list[int]] = {"a": [], "b": [], "c": []}
    for what, model, answers in operations:
        left = under_way[model]
        if what == "ask":
            one.sent(model)
            left.append(1 + answers if marks_last else 1)
        elif left:
            left[0] -= 1
            one.note_answer(model, left[0] == 0 if marks_last else None)
            if not left[0]:
                left.pop(0)
        assert one.models == {name: len(each) for name, each in under_way.items() if each}


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(st.booleans(), st.sampled_from(["a", "b", "", "other"]), st.sampled_from([None, True, False])),
        max_size=80,
    )
)
def test_any_server_leaves_the_counts_sound(operations: list[tuple[bool, str, Any]]) -> None:
    one = Unanswered()
    asked = 0
    for ask, model, final in operations:
        if ask:
            one.sent(model)
            asked += 1
        else:
            one.note_answer(model, final)
        assert all(count > 0 for count in one.models.values()) and sum(one.models.values()) <= asked
