"""Reads a generated text: what the model thought, what it says, and which tools it calls. Pure.

Thoughts are between `<think>` and `</think>`. A call is JSON with `name` and `arguments` (or `parameters`) between
`<tool_call>` and `</tool_call>` (Hermes, Qwen), or the whole answer is such an object (Llama) or a list of them
(Mistral). JSON that names no offered tool is text. The result does not depend on how the text was split.
"""

from collections.abc import Collection
from typing import Any, Literal, NamedTuple

import msgspec

Kind = Literal["content", "reasoning", "call", "arguments"]
THINK = "<think>"
_KINDS: dict[str, Kind] = {THINK: "reasoning", "</think>": "content", "<tool_call>": "call", "</tool_call>": "content"}
_ENDS = {"reasoning": "</think>", "call": "</tool_call>"}
_encode = msgspec.json.Encoder().encode


class Part(NamedTuple):
    """A piece of an answer. A "call" has the name of its tool and its arguments; "arguments" are more of the last."""

    kind: Kind
    text: str
    name: str = ""


class Reader:
    """Reads one answer.

    tools: names of the tools that may be called. forced: the tool whose arguments the whole text is; "*" if it is a
    call of any.
    thinks: the answer may have thoughts. in_thought: the prompt has begun one.
    """

    __slots__ = ("_fresh", "_held", "_kind", "_marks", "_tools", "_whole")

    def __init__(
        self, *, tools: Collection[str] = (), forced: str = "", thinks: bool = False, in_thought: bool = False
    ) -> None:
        self._tools = tools
        self._held = ""
        self._fresh = in_thought
        self._kind: Kind = "reasoning" if in_thought else "content"
        self._marks = ([THINK] if thinks else []) + (["<tool_call>"] if tools else [])
        self._whole = forced or ("?" if tools else "")

    def is_plain(self, text: str) -> bool:
        """Return whether `feed` returns this text as it is, in one part."""
        if self._held or self._whole or self._fresh or self._kind == "call":
            return False
        return "<" not in text or not (self._marks or self._kind == "reasoning")  # every mark begins with it

    def feed(self, text: str, *, last: bool = False) -> list[Part]:
        """Add text and return what is known now. last: no more text comes."""
        if self.is_plain(text):
            return [Part(self._kind, text)] if text else []
        self._held += text
        if self._whole:
            return self._feed_whole(last)
        return self._feed_marked(last)

    def _feed_whole(self, last: bool) -> list[Part]:
        """Read an answer that is a call as a whole, or may be one."""
        begins = self._held.lstrip()[:1]
        if self._whole not in "?*":
            text, self._held = self._held, ""
            first = [Part("call", "", self._whole)] if not self._fresh else []
            self._fresh = True
            return [*first, Part("arguments", text)] if text or first else []
        if self._whole == "?" and begins and begins not in "{[":
            self._whole = ""
            return self._feed_marked(last)
        if not last:
            return []
        text, self._held = self._held, ""
        return calls_of(text, self._tools) or ([Part("content", text)] if text else [])

    def _feed_marked(self, last: bool) -> list[Part]:
        parts: list[Part] = []
        while self._held:
            marks = self._marks if self._kind == "content" else [_ENDS[self._kind]]
            found = [(at, mark) for mark in marks if (at := self._held.find(mark)) >= 0]
            at, mark = min(found, default=(-1, ""))
            if not mark:
                if self._kind == "call" and not last:
                    break
                at = len(self._held) - (0 if last else max((beginning(self._held, each) for each in marks), default=0))
            text, self._held = self._held[:at], self._held[at + len(mark) :]
            if self._kind == "call":
                parts += calls_of(text, self._tools) or [Part("content", f"<tool_call>{text}{mark}")]
            else:
                text = text.lstrip() if self._fresh else text
                self._fresh = self._fresh and not text
                if text:
                    parts.append(Part(self._kind, text))
            if not mark:
                break
            self._kind, self._fresh = _KINDS[mark], True
        return parts


def calls_of(text: str, tools: Collection[str]) -> list[Part]:
    """Return the calls that this JSON is; none if it is anything else."""
    try:
        value: Any = msgspec.json.decode(text.strip().removeprefix("[TOOL_CALLS]"))
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return []
    calls = []
    for each in value if isinstance(value, list) else [value]:
        if not isinstance(each, dict) or each.get("name") not in [*tools]:  # a set has no place for a list
            return []
        given = each.get("arguments", each.get("parameters", {}))
        calls.append(Part("call", given if isinstance(given, str) else _encode(given).decode(), each["name"]))
    return calls


def beginning(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` that begins `mark` but is not all of it."""
    return next((n for n in range(min(len(text), len(mark) - 1), 0, -1) if mark.startswith(text[-n:])), 0)
