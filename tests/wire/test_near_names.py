"""Which name a misspelt one was meant to be."""

import pytest

from oriel_wire.near_names import MAX_KNOWN, did_you_mean, near_name


@pytest.mark.parametrize("typed", ["digist", "digit", "digitss", "dgits", "dihits", "Digits", "idgits"])
def test_one_typing_error_is_near(typed: str) -> None:
    assert near_name(typed, ["other", "digits"]) == "digits"
    assert did_you_mean(typed, ["digits"]) == ", did you mean 'digits'?"


def test_separators_and_case_do_not_count() -> None:
    assert near_name("My-Model.V2", ["my_model_v2"]) == "my_model_v2"


@pytest.mark.parametrize("typed", ["cat", "digital", "", "d", "stigid", "x" * 65, "digits"])
def test_anything_else_is_not(typed: str) -> None:
    assert near_name(typed, ["digits", "e", "x" * 66]) == "" and did_you_mean(typed, ["digits"]) == ""


def test_a_bounded_number_of_names_is_compared() -> None:
    asked: list[str] = []

    def names():  # type: ignore[no-untyped-def]
        for number in range(10 * MAX_KNOWN):
            asked.append(f"model-{number}")
            yield asked[-1]

    assert near_name("nothing", names()) == "" and len(asked) <= MAX_KNOWN + 1
