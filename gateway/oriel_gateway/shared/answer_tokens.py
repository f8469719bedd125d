"""Counts the tokens of answers of the OpenAI API while they pass. Nothing of them is kept but their last bytes.

A server reports what an answer used in `usage`, near the end of the JSON or in one of the last events of a stream. If
it reports none, the tokens are estimated: of a stream, an event is taken for a token; of other answers, four bytes are.
"""

from json import JSONDecoder
from typing import Any, Final

from oriel_policies.bounds.tokens import MAX_TOKENS, prompt_tokens
from oriel_wire.context import parse_cost
from oriel_wire.h1.response import ResponseHead

TAIL_BYTES: Final = 16 * 1024
MAX_KEYS: Final = 64  # the most keys `usage` in these bytes
_KEY: Final = '"usage"'
_EVENT: Final = b"\ndata:"
_IN: Final = ("prompt_tokens", "input_tokens")
_OUT: Final = ("completion_tokens", "output_tokens")
_raw_decode: Final = JSONDecoder().raw_decode


class AnswerTokens:
    """The tokens of one call. prompt: the estimate for its request, which counts until the answer says more.

    tokens_in, tokens_out: the numbers of tokens used so far. reported: True if the server reported these numbers.
    """

    __slots__ = ("_bytes", "_edge", "_events", "_read", "_tail", "reported", "tokens_in", "tokens_out")

    def __init__(self, prompt: int) -> None:
        self.tokens_in = prompt
        self.tokens_out = 0
        self.reported = False
        self._read = False
        self._bytes = 0
        self._events: int | None = None  # events counted so far; None unless the answer is a stream of events
        self._edge = b"\n"
        self._tail = b""

    def total(self) -> int:
        """Return the tokens of prompt and answer; 0 if the answer is an error or was not made for this call."""
        return self.tokens_in + self.tokens_out

    def none(self) -> None:
        """No tokens are used for this call: another call's answer is its own, or it failed."""
        self.tokens_in = self.tokens_out = 0

    def answer_began(self, head: ResponseHead, prompt: int) -> None:
        """The head of the answer is here."""
        if head.status >= 400:
            self.none()
            return
        self.tokens_in = prompt
        if self._take(head.used):
            return
        self._read = (head.get("content-encoding") or "identity").lower() == "identity"
        if (head.get("content-type") or "").lower().startswith("text/event-stream"):
            self._events = 0

    def feed(self, data: bytes) -> None:
        """Take some bytes of the answer."""
        if not self._read:
            return
        self._bytes += len(data)
        if self._events is not None:
            joined = self._edge + data
            self._events += joined.count(_EVENT)
            self._edge = joined[1 - len(_EVENT) :]
            self.tokens_out = max(0, self._events - 1)  # the last one is [DONE]
        else:
            self.tokens_out = prompt_tokens(self._bytes)
        self._tail = bytes(data[-TAIL_BYTES:]) if len(data) >= TAIL_BYTES else (self._tail + data)[-TAIL_BYTES:]

    def _take(self, used: str) -> bool:
        """Return whether a server has reported tokens with the cost of the call; then they are the call's."""
        cost = parse_cost(used) if used else None
        if cost is None or not cost.tokens_in + cost.tokens_out:
            return False
        self.tokens_in, self.tokens_out, self.reported = cost.tokens_in, cost.tokens_out, True
        return True

    def answer_complete(self, used: str = "") -> None:
        """The answer is complete. used: the usage that its server has reported, see `oriel_wire.context.parse_cost`."""
        if self._take(used):
            pass
        elif self._read and (found := _usage(self._tail.decode("utf-8", "replace"))) is not None:
            self.tokens_in, self.tokens_out = found
            self.reported = True
        self._read, self._tail = False, b""


def _usage(text: str) -> tuple[int, int] | None:
    """Return the tokens of the prompt and of the answer by the largest `usage` of a text; None if it has none.

    The key in a text of the answer is written with backslashes, so that it is not taken for one. A server repeats parts
    of the request, such as the schemas of tools: what a client has written there can only make its call dearer. After
    MAX_KEYS of them nothing is believed.
    """
    at, keys = len(text), 0
    found: tuple[int, int] | None = None
    while (at := text.rfind(_KEY, 0, at)) >= 0:
        rest = text[at + len(_KEY) :].lstrip()
        if (at and text[at - 1] == "\\") or rest[:1] != ":":
            continue
        if (keys := keys + 1) > MAX_KEYS:
            return None
        try:
            usage: Any = _raw_decode(rest[1:].lstrip())[0]
        except (ValueError, RecursionError):
            continue
        both = _reported(usage) if isinstance(usage, dict) else None
        if both is not None and (found is None or sum(both) > sum(found)):
            found = both
    return found


def _reported(usage: dict[str, Any]) -> tuple[int, int] | None:
    """Return the tokens of one `usage`. If its total is more than its parts, the answer had the rest."""
    tokens_in, tokens_out, total = _count(usage, _IN), _count(usage, _OUT), _count(usage, ("total_tokens",))
    if tokens_in is None or (tokens_out is None and total is None and any(name in usage for name in _OUT)):
        return None
    return tokens_in, max(tokens_out or 0, (total or 0) - tokens_in)


def _count(usage: dict[str, Any], names: tuple[str, ...]) -> int | None:
    for name in names:
        value = usage.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS:
            return value
    return None
