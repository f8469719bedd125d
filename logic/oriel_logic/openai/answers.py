"""Answers of completions and chat, whole or as server-sent events (WHATWG HTML, 9.2), and errors in that API's form."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from oriel_logic.openai.schema import Usage
from oriel_logic.openai.sequence import Delta, Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The form of one kind of answers.

    kind, chunk_kind: `object` of whole answers and of their events.
    prefix: the beginning of ids.
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
    """One answer in a form. Its methods give plain values for JSON; `created` is in Unix seconds.

    tells_usage: the client asked for `stream_options.include_usage`, so each chunk has `usage`.
    """

    def __init__(self, form: Form, request_id: str, model: str, created: int) -> None:
        self.tells_usage = False
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

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the events of a piece of text and of the end of its choice: clients read no text at the end."""
        added = self._form.added
        found = [self._chunk(delta.index, added(delta.text), None)] if delta.text else []
        return [*found, self._chunk(delta.index, added(""), delta.finish)] if delta.finish else found

    def last(self, usage: Usage) -> dict[str, Any]:
        """Return the event after the last text, for `stream_options.include_usage`."""
        return {**self._facts, "object": self._form.chunk_kind, "choices": [], "usage": usage}

    def _chunk(self, index: int, content: Mapping[str, Any], finish: Finish | None) -> dict[str, Any]:
        choice = {"index": index, **content, "logprobs": None, "finish_reason": finish}
        usage = {"usage": None} if self.tells_usage else {}
        return {**self._facts, "object": self._form.chunk_kind, "choices": [choice], **usage}


def written(value: dict[str, Any]) -> bytes:
    return msgspec.json.encode(value)


EVENT_STREAM = "text/event-stream"
DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def event(value: object) -> bytes:
    """Write `value` as one event. JSON has no raw line ends, so it is one line."""
    return b"data: " + _encode(value) + b"\n\n"
