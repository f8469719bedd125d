"""`/v1/responses` on top of chat: its request as a chat, and its answer as items and events."""

import time
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import msgspec

from oriel_logic.errors import ParameterWrong
from oriel_logic.openai.answers import Delta, encode
from oriel_logic.openai.schema import ChatRequest, ResponseRequest, Usage, check_generation, wrong
from oriel_wire.context import CallContext
from oriel_wire.process.allowed import with_values

_NAMES = {"messages": "input", "response_format": "text", "reasoning_effort": "reasoning"}
_PARTS = frozenset({"input_text", "output_text", "text"})
# kind of a part of the answer -> prefix of its events, name of its text there
_EVENTS = {
    "content": ("response.output_text", "text"),
    "reasoning": ("response.reasoning_text", "text"),
    "call": ("response.function_call_arguments", "arguments"),
}


def chat_of(request: ResponseRequest) -> ChatRequest:
    """Return the chat that this request means. Raises ParameterWrong."""
    given: Any = request.input
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    messages: list[dict[str, Any]] = [{"role": "system", "content": request.instructions}]
    for index, item in enumerate(items):
        message = _message(item, f"input[{index}]")
        if message and message.get("tool_calls") and messages[-1]["role"] == "assistant":
            messages[-1].setdefault("tool_calls", []).extend(message["tool_calls"])
        elif message:
            messages.append(message)
    form, chosen = (request.text or {}).get("format"), request.tool_choice
    chat = {
        "model": request.model,
        "messages": messages[not request.instructions :],
        "max_completion_tokens": request.max_output_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "tools": [{"type": each.get("type"), "function": each} for each in request.tools or ()],
        "tool_choice": {"type": chosen.get("type"), "function": chosen} if isinstance(chosen, dict) else chosen,
        "response_format": {**form, "json_schema": {"schema": form.get("schema") or {}}}
        if isinstance(form, dict)
        else form,
        "reasoning_effort": (request.reasoning or {}).get("effort"),
        "stream": request.stream,
    }
    try:
        made = msgspec.convert(chat, ChatRequest)
        check_generation(made)
    except msgspec.ValidationError as error:
        found = wrong(with_values(error, ChatRequest))
        name = next((name for at, name in _NAMES.items() if str(found.param).startswith(at)), str(found.param))
        raise ParameterWrong(found.message, param=name, code=found.code) from error
    return made


def _message(item: dict[str, Any], where: str) -> dict[str, Any] | None:
    kind = item.get("type", "message")
    if kind == "reasoning":  # the model's earlier thoughts are not shown to it again
        return None
    if kind == "function_call":
        call = {"id": item.get("call_id"), "function": {"name": item.get("name"), "arguments": item.get("arguments")}}
        return {"role": "assistant", "tool_calls": [call]}
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": _text(item.get("output"), where)}
    if kind == "message":
        return {"role": item.get("role"), "content": _text(item.get("content"), where)}
    raise ParameterWrong(f"'{where}' is of type {str(kind)[:64]!r}, which is not served: send text", param=where)


def _text(content: Any, where: str) -> Any:
    if not isinstance(content, list):
        return content
    for part in content:
        if not isinstance(part, dict) or str(part.get("type")) not in _PARTS:
            raise ParameterWrong(f"'{where}' has a part that is not text: send text", param=where)
    return [{"type": "text", "text": part.get("text")} for part in content]


class ResponseAnswer:
    """One answer. Its events carry the whole of it again and again: an answer that is not streamed is the last one."""

    def __init__(self, request: ResponseRequest, call: CallContext, model: str) -> None:
        self._number = 0
        self._kind = ""
        self._text: list[str] = []
        self._output: list[dict[str, Any]] = []
        self._finish = ""
        self.response: dict[str, Any] = {
            "id": f"resp_{call.request_id}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "model": model,
            "service_tier": call.service_tier,
            "output": self._output,
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "store": False,
            "tool_choice": request.tool_choice or "auto",
            "tools": request.tools or [],
        }

    def events(self, delta: Delta) -> bytes:
        pieces = []
        if not self._number:
            pieces += [self._event(f"response.{each}", response=self.response) for each in ("created", "in_progress")]
        for part in delta.parts:
            kind = "call" if part.kind == "arguments" else part.kind
            if kind != self._kind or part.kind == "call":
                pieces += [*self._end(), *self._begin(kind, part.name)]
            if part.text:
                self._text.append(part.text)
                pieces.append(self._event(f"{_EVENTS[kind][0]}.delta", **self._place(), delta=part.text))
        self._finish = delta.finish or self._finish
        return b"".join(pieces)

    def closing(self, usage: Usage) -> bytes:
        pieces = self._end()
        is_cut = self._finish == "length"
        status = "incomplete" if is_cut else "completed"
        self.response |= {
            "status": status,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }
        return b"".join([*pieces, self._event(f"response.{status}", response=self.response)])

    def whole(self, deltas: Sequence[Delta], usage: Usage) -> dict[str, Any]:
        for each in deltas:
            self.events(each)
        self.closing(usage)
        return self.response

    def _begin(self, kind: str, name: str) -> list[bytes]:
        self._kind, self._text, number = kind, [], uuid4().hex[:24]
        item: dict[str, Any]
        if kind == "call":
            item = {
                "id": f"fc_{number}",
                "type": "function_call",
                "call_id": f"call_{number}",
                "name": name,
                "arguments": "",
            }
        elif kind == "reasoning":
            item = {"id": f"rs_{number}", "type": "reasoning", "summary": [], "content": []}
        else:
            item = {"id": f"msg_{number}", "type": "message", "role": "assistant", "content": []}
        item["status"] = "in_progress"
        self._output.append(item)
        pieces = [self._event("response.output_item.added", output_index=len(self._output) - 1, item=item)]
        if kind != "call":
            pieces.append(self._event("response.content_part.added", **self._place(), part=self._part("")))
        return pieces

    def _end(self) -> list[bytes]:
        """Return the events that complete the item that was begun last."""
        if not self._kind:
            return []
        item, text, place = self._output[-1], "".join(self._text), self._place()
        prefix, name = _EVENTS[self._kind]
        item["status"] = "incomplete" if self._finish == "length" else "completed"
        if self._kind == "call":
            item["arguments"] = text
            pieces = [self._event(f"{prefix}.done", **place, name=item["name"], **{name: text})]
        else:
            part = self._part(text)
            item["content"] = [part]
            pieces = [self._event(f"{prefix}.done", **place, **{name: text})]
            pieces.append(self._event("response.content_part.done", **place, part=part))
        self._kind = ""
        return [*pieces, self._event("response.output_item.done", output_index=len(self._output) - 1, item=item)]

    def _part(self, text: str) -> dict[str, Any]:
        kind = "reasoning_text" if self._kind == "reasoning" else "output_text"
        return {"type": kind, "text": text, "annotations": [], "logprobs": []}

    def _place(self) -> dict[str, Any]:
        place = {"item_id": self._output[-1]["id"], "output_index": len(self._output) - 1}
        return place if self._kind == "call" else {**place, "content_index": 0, "logprobs": []}

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._number += 1
        body = encode({"type": kind, "sequence_number": self._number - 1, **fields})
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), body)
