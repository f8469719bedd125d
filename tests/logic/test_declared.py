from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from oriel_logic.bodies.schemas import mismatch
from oriel_logic.services.definition import define

JSON = "application/json"


@dataclass
class Verdict:
    label: str
    score: float


async def typed(text: str) -> Verdict: ...
async def untyped(text: str): ...
async def a_list(text: str) -> list[int]: ...
async def anything(text: str) -> Any: ...


@dataclass
class WithArray:
    rows: np.ndarray


async def with_array(text: str) -> WithArray: ...


@pytest.mark.parametrize(
    ("handler", "body", "said"),
    [
        (typed, b'{"label": "a", "score": 1}', ""),
        (typed, b'{"lable": "a", "score": 1}', "missing required field `label`"),
        (typed, b'{"label": 1, "score": 1}', "Expected `str`, got `int` - at `$.label`"),
        (typed, b"null", "the answer is not the declared Verdict: Expected `object`, got `null`"),
        (a_list, b"[1, 2]", ""),
        (a_list, b'[1, "2"]', "Expected `int`, got `str`"),
        (untyped, b"null", ""),
        (anything, b"null", ""),
        (with_array, b'{"rows": [[1]]}', ""),
    ],
)
def test_what_is_declared_is_what_is_given(handler: Any, body: bytes, said: str) -> None:
    found = mismatch(define(handler).signature.output, JSON, body)
    assert said in found and bool(said) == bool(found)


def test_other_media_are_not_looked_into() -> None:
    assert mismatch(define(typed).signature.output, "text/plain", b"x") == ""
