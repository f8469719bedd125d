"""How deep a JSON text is nested, found without parsing it."""

import numpy as np

from oriel_wire.errors import BadMessage

__all__ = ["MAX_DEPTH", "check_depth"]

MAX_DEPTH = 64


def check_depth(body: bytes, length: int | None = None) -> None:
    """Raise BadMessage if the first `length` bytes (all by default) nest lists and objects deeper than MAX_DEPTH.

    Exact for valid JSON; of other texts it only promises to be fast: their parser refuses them. Text without more
    opening brackets than that, which is nearly all, is counted and nothing else.
    """
    end = len(body) if length is None else length
    if body.count(b"[", 0, end) + body.count(b"{", 0, end) <= MAX_DEPTH:
        return
    text = body[:end]
    if b"\\" in text:
        # Left to right a run of backslashes pairs up from its start: what remains before a quote escapes it.
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    codes = np.frombuffer(text, np.uint8)
    within = np.logical_xor.accumulate(codes == 0x22)
    folded = codes & 0xDF  # [ and { differ in one bit, so do ] and }
    steps = (folded == 0x5B).astype(np.int8)
    steps -= folded == 0x5D
    steps[within] = 0
    if int(np.cumsum(steps, dtype=np.int32).max(initial=0)) > MAX_DEPTH:
        raise BadMessage(f"the JSON part is nested deeper than {MAX_DEPTH} levels")
