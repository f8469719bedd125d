"""Answers of completions and chat, whole or as server-sent events (WHATWG HTML, 9.2), and errors in that API's form."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from oriel_logic.errors import DeadlineExceeded, LogicError, ParameterWrong
from oriel_logic.openai.schema import Usage
from oriel_logic.openai.sequence import Delta, Finish
from oriel_logic.server.replies import Reply, retry_after, status_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The form of one kind of answers.

    kind, chunk_kind: `object` of whole answers and of their events.
    prefix: of ids.
    content: returns the fields of a choice for its whole text.
    added: returns the fields of a choice for a further piece of text.
    opening: the fields of a choice in the event before its first text; None if there is no such event.
    """

    kind: str
    chunk_kind: str
    prefix: str
    content: Callable[[str], dict[str, Any]]
    added: Callable[[str], dict[str, Any]]
    opening: Mapping[str, Any] | None = None


def _text(text: str) -> dict[str, Any]:
    return {"text": text}


COMPLETION = Form(kind="text_completion", chunk_kind="text_completion", prefix="cmpl", content=_text, added=_text)
CHAT = Form(
    kind="chat.completion",
    chunk_kind="chat.completion.chunk",
    prefix="chatcmpl",
    content=lambda text: {"message": {"role": "assistant", "content": text, "refusal": None}},
    added=lambda text: {"delta": {"content": text} if text else {}},
    opening={"delta": {"role": "assistant", "content": ""}},
)


class Answer:
    """One answer in a form. Its methods give plain values for JSON; `created` is in Unix seconds."""

    def __init__(self, form: Form, request_id: str, model: str, created: int) -> None:
        self._form = form
        self._facts: dict[str, Any] = {"id": f"{form.prefix}-{request_id}", "created": created, "model": model}

    def whole(self, texts: Sequence[str], finishes: Sequence[Finish | None], usage: Usage) -> dict[str, Any]:
        choices = [
            {"index": index, **self._form.content(text), "logprobs": None, "finish_reason": finish}
            for index, (text, finish) in enumerate(zip(texts, finishes, strict=True))
        ]
        return {**self._facts, "object": self._form.kind, "choices": choices, "usage": usage}

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the event before the first text of a choice, None if there is none."""
        opening = self._form.opening
        return None if opening is None else self._chunk(index, opening, None)

    def chunk(self, delta: Delta) -> dict[str, Any]:
        return self._chunk(delta.index, self._form.added(delta.text), delta.finish)

    def last(self, usage: Usage) -> dict[str, Any]:
        """Return the event after the last text, for `stream_options.include_usage`."""
        return {**self._facts, "object": self._form.chunk_kind, "choices": [], "usage": usage}

    def _chunk(self, index: int, content: Mapping[str, Any], finish: Finish | None) -> dict[str, Any]:
        choice = {"index": index, **content, "logprobs": None, "finish_reason": finish}
        return {**self._facts, "object": self._form.chunk_kind, "choices": [choice]}


def written(value: dict[str, Any]) -> bytes:
    return msgspec.json.encode(value)


def error_facts(error: LogicError, request_id: str) -> dict[str, Any]:
    """Return `{"error": ...}` with that API's four fields and ours."""
    status = status_of(error)
    kind = "rate_limit_error" if status == 429 else "invalid_request_error" if status < 500 else "server_error"
    param, code = (error.param, error.code) if isinstance(error, ParameterWrong) else (None, None)
    facts = {
        "message": error.message,
        "type": kind,
        "param": param,
        "code": code or ("model_not_found" if status == 404 else error.outcome.value),
        "reason": error.outcome.value,
        "request_id": request_id,
    }
    if isinstance(error, DeadlineExceeded):
        facts["stage"] = error.stage
    return {"error": facts}


def openai_error(error: LogicError, request_id: str) -> Reply:
    body = msgspec.json.encode(error_facts(error, request_id))
    return Reply(status=status_of(error), body=body, headers=retry_after(error))


EVENT_STREAM = "text/event-stream"
DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def event(value: object) -> bytes:
    """Write `value` as one event. JSON has no raw line ends, so it is one line."""
    return b"data: " + _encode(value) + b"\n\n"
