"""Mistakes of beginners: the error says what to do, and other services keep running."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from oriel_logic import Models, service
from oriel_logic.testing import Client, FakeModels, spec
from oriel_logic.workers.work import described

MODELS = FakeModels(
    {"digits": {"label": [[7]]}},
    specs=[spec("digits", inputs={"image": ("FP32", [-1, 64])}, outputs={"label": ("INT64", [-1, 1])})],
)


def answer(handler: Any, **body: Any) -> httpx.Response:
    return Client(service(handler), models=MODELS, raise_errors=False).post(**(body or {"json": {"text": "a"}}))


async def exits(text: str) -> str:
    raise SystemExit(3)


async def exits_while_it_streams(text: str) -> AsyncIterator[str]:
    yield text
    raise SystemExit(3)


def test_a_handler_that_exits_fails_its_own_request_only() -> None:
    assert answer(exits).json()["error"]["reason"] == "handler_failed"
    assert "handler_failed" in answer(exits_while_it_streams).text
    assert answer(exits).status_code == 500, "the loop goes on"


async def forgets(text: str, models: Models) -> Any:
    return models.infer("digits", {"image": [[0.0] * 64]})


def test_a_missing_await_is_named() -> None:
    with pytest.raises(Exception, match="is an `await` missing") as failed:
        Client(service(forgets), models=MODELS).post(json={"text": "a"})
    assert isinstance(failed.value, TypeError)


@dataclass
class Verdict:
    label: str


async def misspells(text: str) -> Verdict:
    return {"lable": text}  # type: ignore[return-value]


def test_an_answer_that_is_not_as_declared_fails_the_test_of_its_author() -> None:
    with pytest.raises(
        TypeError, match="misspells: the answer is not the declared Verdict.* missing required field `label`"
    ):
        Client(service(misspells)).post(json={"text": "a"})


def test_a_traceback_from_a_worker_begins_where_the_handler_does() -> None:
    ours = {"__name__": "oriel_logic.workers.some", "fails": fails}
    exec("def ours(): fails()", ours)
    try:
        ours["ours"]()
    except ZeroDivisionError as error:
        line, trace = described(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
    assert line == "ZeroDivisionError: of the handler"
    assert "in fails" in trace and "in ours" not in trace


def fails() -> None:
    raise ZeroDivisionError("of the handler")
