"""Forms, event streams and targets that never end, or come byte by byte, take steps by their bytes."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from oriel_gateway.errors import Refused
from oriel_gateway.identity.named_models import judge_body
from oriel_gateway.routing.target_cache import TargetCache
from oriel_gateway.shared.answer_tokens import AnswerTokens
from oriel_policies.documents import compile_documents

from ..steps import linear
from .stack import documents

SIZES = 1000, 2000, 4000
PART = b'--b\r\ncontent-disposition: form-data; name="%b"\r\n\r\n'
FORMS: dict[str, Callable[[int], bytes]] = {
    "data without end": lambda size: PART % b"file" + b"\r\n--" * size,
    "nearly ends": lambda size: PART % b"file" + b"\r\n--a" * size,
    "parts without end": lambda size: (PART % b"x" + b"y\r\n") * size,
    "head without end": lambda size: b"--b\r\n" + b"content-disposition: form-data\r\n" * size,
    "names": lambda size: b'--b\r\ncontent-disposition: form-data; name="' + b'\\"' * size,
    "line ends": lambda size: b"--b" + b"\r\n" * size,
}


@pytest.mark.parametrize("kind", FORMS)
def test_a_form(kind: str) -> None:
    head: Any = SimpleNamespace(sent_on=lambda: [("content-type", "multipart/form-data; boundary=b")])

    def work(size: int) -> None:
        with pytest.raises(Refused):
            judge_body(head, "form", FORMS[kind](size), SimpleNamespace())  # type: ignore[arg-type]

    linear(work, SIZES, copies=False)


@pytest.mark.parametrize("text", [b"x", b"\n", b"data: ", b'"usage"', b'"usage":', b'"usage":{', b"\\"])
@pytest.mark.parametrize("piece", [1, 10_000])
def test_the_tokens_of_an_event_stream(text: bytes, piece: int) -> None:
    head: Any = SimpleNamespace(status=200, used="", get={"content-type": "text/event-stream"}.get)

    def work(size: int) -> None:
        tokens = AnswerTokens(0)
        tokens.answer_began(head, 0)
        data = text * size
        for at in range(0, len(data), piece):
            tokens.feed(data[at : at + piece])
        tokens.answer_complete()

    linear(work, SIZES)


@pytest.mark.parametrize("part", ["%41", "%", "/", "a", "/v1", "?", "&model=", "/versions/1"])
@pytest.mark.parametrize("start", ["", "/v2/models/m/infer?", "/v2/models/", "/v1/services/", "/v1/models/"])
def test_a_target(start: str, part: str) -> None:
    snapshot = compile_documents(documents([1]))
    cache, tenant = TargetCache(snapshot), next(iter(snapshot.tenants.values()))

    def work(size: int) -> None:
        path, _, query = (start + part * size).partition("?")
        try:
            cache.of_line(tenant, b"", "POST", path, query)
        except Refused:
            pass

    linear(work, SIZES)
