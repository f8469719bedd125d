"""Finds how deep a JSON text is nested, without parsing it."""

import numpy as np

from oriel_wire.errors import BadMessage

MAX_DEPTH = 100  # as Triton
_PIECE = 1 << 18  # bytes processed at a time, so that the intermediate arrays stay in the cache


def check_depth(text: bytes) -> None:
    """Raise BadMessage if the text nests lists and objects deeper than MAX_DEPTH.

    Exact for valid JSON; for other texts it is only fast, as the parser refuses them. Nearly all texts have no more
    opening brackets than that, so that counting them is enough.
    """
    if text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        return
    if b"\\" in text:
        # Left to right a run of backslashes pairs up from its start: what remains before a quote escapes it.
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    level, quoted = 0, False
    for start in range(0, len(text), _PIECE):
        codes = np.frombuffer(text, np.uint8, min(_PIECE, len(text) - start), start)
        masked = codes & 0xDF  # [ and { differ in one bit, so do ] and }
        steps = (masked == 0x5B).view(np.int8)
        steps -= (masked == 0x5D).view(np.int8)
        quotes = codes == 0x22
        if quoted or quotes.any():
            within = np.logical_xor.accumulate(quotes)
            if quoted:
                np.logical_not(within, out=within)
            steps[within] = 0
            quoted = bool(within[-1])
        levels = np.cumsum(steps, dtype=np.int32)
        if level + int(levels.max()) > MAX_DEPTH:
            raise BadMessage(f"JSON nesting depth exceeds maximum allowed limit ({MAX_DEPTH})")
        level += int(levels[-1])
