"""Writes into the body of a request how urgent it is, in the words of the engine of its pool.

The number is written as the last member of the JSON object: Python's parsers, which the engines for language models
use, keep the last of equal members, so that the client's own is never in force. One that is found cheaply is taken out
as well, for parsers that refuse equal members. A text that does not end like an object gets a comma instead: no reader
takes the result for a request, in whatever encoding. Triton's parser keeps the first one; there the parameters are
written first.
"""

from time import time
from typing import Any, Final

import msgspec

from oriel_gateway.call.contracts import Call
from oriel_policies.upstreams.engines import ENGINES

__all__ = ["asking_for_usage", "for_engine"]

READ_BYTES: Final = 4 * 1024 * 1024  # the most bytes of JSON that are parsed
_SPACES: Final = b" \t\r\n"
_OWN: Final = b'"priority"'
_SPELLED: Final = b"\\u00"  # begins a letter in disguise, perhaps one of that name
_JSON_BYTES: Final = "inference-header-content-length"
_decode: Final = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def for_engine(call: Call, lines: bytes, now: float) -> tuple[list[Any], bytes, str]:
    """Return the body as the engine of the call's pool gets it, in pieces, its header `lines`, and a further one.

    lines: those of every request with this head. A call is due at the target of its tier, as in the pool's queue.
    """
    pool, target, body, tier = call.gate.pool, call.target, call.body(), call.tenant.tier
    engine = ENGINES[pool.engine]
    left_s = min(call.received_s + tier.target_s, call.deadline) - now
    if engine.priority is None:
        return [body], lines, ""
    if engine.speaks_openai:
        if target.name not in engine.bodies:
            return [body], lines, ""
        return _last(body, engine.priority(tier.band, left_s, time() + left_s)), lines, ""
    if not target.line.partition(b" HTTP/")[0].endswith(b"/infer"):
        return [body], lines, ""
    level = pool.triton_priorities.get(tier.name) or engine.priority(tier.band, left_s, 0.0)
    before = call.head.get(_JSON_BYTES) or ""
    size = min(int(before), len(body)) if before.isdecimal() and len(before) < 12 else len(body)
    if not size:  # raw bytes of one tensor
        return [body], lines, ""
    text = f'"priority":{level},"timeout":{max(1, int((call.deadline - now) * 1e6))}'.encode()
    start = _first(body[:size], text)
    if not before:
        return [start], lines, ""
    kept = [line for line in lines.split(b"\r\n") if not line.lower().startswith(_JSON_BYTES.encode())]
    return [start, memoryview(body)[size:]], b"\r\n".join(kept), f"{_JSON_BYTES}: {len(start)}\r\n"


def asking_for_usage(body: bytes) -> bytes | None:
    """Return a body that asks for the usage of its stream; None if it does so itself, or asks for no stream."""
    if b'"stream"' not in body or (fields := _read(body)) is None or bytes(fields.get("stream", b"")) != b"true":
        return None
    options = _read(bytes(fields.get("stream_options", b"{}"))) or {}
    if bytes(options.get("include_usage", b"")) == b"true":
        return None
    return msgspec.json.encode({**fields, "stream_options": {**options, "include_usage": True}})


def _read(body: bytes) -> dict[str, msgspec.Raw] | None:
    """Return the members of a JSON object; None if it is none, or too large to be read here."""
    try:
        return _decode(body) if len(body) <= READ_BYTES else None
    except (ValueError, RecursionError):
        return None


def _last(body: bytes, priority: str) -> list[Any]:
    if (_OWN in body or _SPELLED in body) and (fields := _read(body)) is not None and "priority" in fields:
        del fields["priority"]
        body = msgspec.json.encode(fields)
    end = len(body.rstrip(_SPACES)) - 1
    if body[end : end + 1] != b"}":
        return [body, b","]
    return [memoryview(body)[:end], f',"priority":{priority}}}'.encode()]


def _first(body: bytes, text: bytes) -> bytes:
    fields = _read(body)
    if fields is None:
        if len(body) > READ_BYTES and b'"parameters"' in body and _OWN not in body and _SPELLED not in body:
            return body
        return b'{"parameters":{%b},%b' % (text, body.lstrip(_SPACES)[1:])
    given = _read(bytes(fields.pop("parameters", b"{}"))) or {}
    others = {name: raw for name, raw in given.items() if name not in ("priority", "timeout")}
    inside = text + (b"," + msgspec.json.encode(others)[1:-1] if others else b"")
    rest = msgspec.json.encode(fields)
    return b'{"parameters":{%b}%b%b' % (inside, b"," if fields else b"", rest[1:])
