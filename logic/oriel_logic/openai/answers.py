"""Answers of completions and chat, whole or as server-sent events (WHATWG HTML, 9.2)."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import msgspec

from oriel_logic.openai.reading import Part
from oriel_logic.openai.schema import ChatRequest, Generation, Usage
from oriel_wire.context import CallContext

DONE = b"data: [DONE]\n\n"
LogProbs = list[dict[str, Any]]
encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Delta:
    """The addition of one answer of the model to choice `index`.

    logprobs: those of its new tokens, as the model gives them; None if they were not asked for.
    finish: why it was the last, "" if it was not.
    """

    index: int
    parts: Sequence[Part]
    logprobs: LogProbs | None = None
    finish: str = ""


class Answer:
    """One answer of chat, or of completions."""

    def __init__(self, request: Generation, call: CallContext, model: str) -> None:
        self._is_chat = isinstance(request, ChatRequest)
        self._tells_usage = request.stream_options is not None and bool(request.stream_options.include_usage)
        prefix, self._kind = ("chatcmpl", "chat.completion") if self._is_chat else ("cmpl", "text_completion")
        self._facts = {"id": f"{prefix}-{call.request_id}", "created": int(time.time()), "model": model}
        self._facts["service_tier"] = call.service_tier
        self._calls: dict[int, int] = {}  # tool calls by choice
        self._plain: dict[int, tuple[bytes, bytes]] = {}

    def whole(self, deltas: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        choices = []
        for index in sorted({each.index for each in deltas}):
            mine = [each for each in deltas if each.index == index]
            texts, calls = {"content": "", "reasoning": ""}, []
            for part in (part for each in mine for part in each.parts):
                if part.kind == "call":
                    calls.append(new_call(part))
                elif part.kind == "arguments":
                    calls[-1]["function"]["arguments"] += part.text
                else:
                    texts[part.kind] += part.text
            message: dict[str, Any] = {
                "role": "assistant",
                "content": texts["content"] or (None if calls else ""),
                "refusal": None,
            }
            message |= {"reasoning_content": texts["reasoning"]} if texts["reasoning"] else {}
            message |= {"tool_calls": calls} if calls else {}
            content: dict[str, Any] = {"message": message} if self._is_chat else {"text": texts["content"]}
            logprobs = None if mine[0].logprobs is None else [one for each in mine for one in each.logprobs or ()]
            choices.append(self._choice(index, content, logprobs, "tool_calls" if calls else mine[-1].finish))
        return {**self._facts, "object": self._kind, "choices": choices, "usage": usage}

    def events(self, delta: Delta) -> bytes:
        """Return the events of a delta. Clients read no text in the one that has the finish reason."""
        index, logprobs, pieces = delta.index, delta.logprobs, []
        if index not in self._calls:
            self._calls[index] = 0
            if self._is_chat:
                pieces.append(self._chunk(index, {"delta": {"role": "assistant", "content": ""}}))
        for part in delta.parts:
            if part.kind == "content" and logprobs is None:
                head, tail = self._plain.get(index) or self._cut(index)
                pieces.append(head + encode(part.text) + tail)
            else:
                pieces.append(self._chunk(index, self._added(index, part), logprobs))
                logprobs = None if logprobs is None else []
        if delta.finish:
            finish = "tool_calls" if self._calls[index] else delta.finish
            pieces.append(self._chunk(index, {"delta": {}} if self._is_chat else {"text": ""}, None, finish))
        return b"".join(pieces)

    def closing(self, usage: Usage) -> bytes:
        return (self._event({"choices": [], "usage": usage}) if self._tells_usage else b"") + DONE

    def _added(self, index: int, part: Part) -> dict[str, Any]:
        if not self._is_chat:
            return {"text": part.text}
        if part.kind in ("content", "reasoning"):
            return {"delta": {"content" if part.kind == "content" else "reasoning_content": part.text}}
        self._calls[index] += part.kind == "call"
        added = new_call(part) if part.kind == "call" else {"function": {"arguments": part.text}}
        return {"delta": {"tool_calls": [{"index": self._calls[index] - 1, **added}]}}

    def _cut(self, index: int) -> tuple[bytes, bytes]:
        """Return the bytes before and after the text in an event of plain text: the same for all of a choice."""
        mark = uuid4().hex
        head, _, tail = self._chunk(index, self._added(index, Part("content", mark))).partition(encode(mark))
        self._plain[index] = head, tail
        return head, tail

    def _chunk(self, index: int, content: dict[str, Any], logprobs: LogProbs | None = None, finish: str = "") -> bytes:
        more = {"usage": None} if self._tells_usage else {}
        return self._event({"choices": [self._choice(index, content, logprobs, finish)], **more})

    def _event(self, more: dict[str, Any]) -> bytes:
        kind = "chat.completion.chunk" if self._is_chat else self._kind
        return b"data: " + encode({**self._facts, "object": kind, **more}) + b"\n\n"

    def _choice(self, index: int, content: Mapping[str, Any], found: LogProbs | None, finish: str) -> dict[str, Any]:
        shown: dict[str, Any] | None = None
        if found is not None:
            tokens = [{"token": bytes(each["bytes"]).decode(errors="replace"), **each} for each in found]
            if self._is_chat:
                shown = {"content": [{**each, "top_logprobs": []} for each in tokens], "refusal": None}
            else:
                shown = {"tokens": [each["token"] for each in tokens], "top_logprobs": None, "text_offset": None}
                shown["token_logprobs"] = [each["logprob"] for each in tokens]
        return {"index": index, **content, "logprobs": shown, "finish_reason": finish or None}


def new_call(part: Part) -> dict[str, Any]:
    function = {"name": part.name, "arguments": part.text}
    return {"id": f"call_{uuid4().hex[:24]}", "type": "function", "function": function}
