"""Answers of completions and chat, whole or as server-sent events (WHATWG HTML, 9.2), and errors in that API's form."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from oriel_logic.errors import DeadlineExceeded, LogicError, ParameterWrong
from oriel_logic.openai.schema import Usage
from oriel_logic.openai.sequence import Delta, Finish
from oriel_logic.server.replies import Reply, retry_after, status_of


class Form:
    """The form of answers. Its methods give plain values for JSON; `created` is in Unix seconds."""

    kind = ""
    chunk_kind = ""
    prefix = ""

    def __init__(self, request_id: str, model: str, created: int) -> None:
        self._facts: dict[str, Any] = {"id": f"{self.prefix}-{request_id}", "created": created, "model": model}

    def whole(self, texts: Sequence[str], finishes: Sequence[Finish | None], usage: Usage) -> dict[str, Any]:
        choices = [
            {"index": index, **self.content(text), "logprobs": None, "finish_reason": finish}
            for index, (text, finish) in enumerate(zip(texts, finishes, strict=True))
        ]
        return {**self._facts, "object": self.kind, "choices": choices, "usage": usage}

    def opening(self, index: int) -> dict[str, Any] | None:
        """Return the event before the first text of a choice, None if there is none."""
        return None

    def chunk(self, delta: Delta) -> dict[str, Any]:
        return self._chunk(delta.index, self.added(delta.text), delta.finish)

    def last(self, usage: Usage) -> dict[str, Any]:
        """Return the event after the last text, for `stream_options.include_usage`."""
        return {**self._facts, "object": self.chunk_kind, "choices": [], "usage": usage}

    def _chunk(self, index: int, content: dict[str, Any], finish: Finish | None) -> dict[str, Any]:
        choice = {"index": index, **content, "logprobs": None, "finish_reason": finish}
        return {**self._facts, "object": self.chunk_kind, "choices": [choice]}

    def content(self, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def added(self, text: str) -> dict[str, Any]:
        raise NotImplementedError


class CompletionForm(Form):
    kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    added = content


class ChatForm(Form):
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"
    prefix = "chatcmpl"

    def content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def added(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text} if text else {}}

    def opening(self, index: int) -> dict[str, Any] | None:
        return self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None)


class Primed:
    """An iterator whose first piece has been requested, so that an error before it can still be a plain error reply.

    Closing it closes the iterator inside, even if nothing was read.
    """

    def __init__(self, first: bytes, rest: AsyncIterator[bytes]) -> None:
        self._first: bytes | None = first
        self._rest = rest

    def __aiter__(self) -> "Primed":
        return self

    async def __anext__(self) -> bytes:
        first, self._first = self._first, None
        return await anext(self._rest) if first is None else first

    async def aclose(self) -> None:
        self._first = None
        close = getattr(self._rest, "aclose", None)
        if close is not None:
            await close()


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
