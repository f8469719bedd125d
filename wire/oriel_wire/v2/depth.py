"""How deep a JSON text is nested, found without parsing it."""

import numpy as np

from oriel_wire.errors import BadMessage

__all__ = ["MAX_DEPTH", "check_depth"]

MAX_DEPTH = 64
_PIECE = 1 << 18  # bytes looked at in one go: what is made of them stays in the cache


def check_depth(text: bytes) -> None:
    """Raise BadMessage if the text nests lists and objects deeper than MAX_DEPTH.

    Exact for valid JSON; of other texts it only promises to be fast: their parser refuses them. Text without more
    opening brackets than that, which is nearly all, is counted and nothing else.
    """
    if text.count(b"[") + text.count(b"{") <= MAX_DEPTH:
        return
    if b"\\" in text:
        # Left to right a run of backslashes pairs up from its start: what remains before a quote escapes it.
        text = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    level, quoted = 0, False
    for start in range(0, len(text), _PIECE):
        codes = np.frombuffer(text, np.uint8, min(_PIECE, len(text) - start), start)
        folded = codes & 0xDF  # [ and { differ in one bit, so do ] and }
        steps = (folded == 0x5B).view(np.int8)
        steps -= (folded == 0x5D).view(np.int8)
        quotes = codes == 0x22
        if quoted or quotes.any():
            within = np.logical_xor.accumulate(quotes)
            if quoted:
                np.logical_not(within, out=within)
            steps[within] = 0
            quoted = bool(within[-1])
        levels = np.cumsum(steps, dtype=np.int32)
        if level + int(levels.max()) > MAX_DEPTH:
            raise BadMessage(f"the JSON part is nested deeper than {MAX_DEPTH} levels")
        level += int(levels[-1])
