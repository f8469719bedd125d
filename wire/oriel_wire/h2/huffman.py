"""The Huffman code of RFC 7541, appendix B: a decoder that takes a byte per step.

The code is canonical: symbols in the order of their code's length, then of their value, get consecutive codes; so the
lengths say everything. A state is an inner node of the code's tree. A row of the automaton has, for each byte, the
state that follows and the symbols completed on the way (two at most, as the shortest code has five bits). A row is
made when its state is first reached: all 256 take 65,536 steps, of which ordinary headers need few.

EOS leads to a state that is never left and where no string may end. A string may end after at most seven bits of a
started symbol, all ones.
"""

from typing import Final

_EOS: Final = 256
_FAILED: Final = 256  # the state after EOS: the tree has 256 inner nodes, so no node has this number
_LENGTHS: Final = bytes.fromhex(
    "0d171c1c1c1c1c1c1c181e1c1c1e1c1c1c1c1c1c1c1c1e1c1c1c1c1c1c1c1c1c060a0a0c0d06080b0a0a080b08060606"
    "0505050606060606060607080f060c0a0d06070707070707070707070707070707070707070707070807080d130d0e06"
    "0f05060506050606060507070606060506070605050607070707070f0b0e0d1c14161414161616171617171717171817"
    "181816171817171717151617161717181615141616171715171616181516171715151615171617171416161617161617"
    "1a1a1413161716191a1a1a1b1b1a181913151a1b1b1a1b1815151a1a1c1b1b1b14181415161515171616191918181a17"
    "1a1b1a1a1b1b1b1b1b1c1b1b1b1b1b1a1e"
)  # lengths in bits of the symbols 0-255 and EOS


def _tree() -> list[int]:
    """The inner nodes: child `2 * node + bit` is another node, or ~symbol."""
    children = [0, 0]
    code = 0
    last = 0
    for symbol in sorted(range(257), key=lambda each: (_LENGTHS[each], each)):
        length = _LENGTHS[symbol]
        code <<= length - last
        last = length
        node = 0
        for bit in range(length - 1, 0, -1):
            at = 2 * node + (code >> bit & 1)
            if children[at] == 0:
                children[at] = len(children) // 2
                children += (0, 0)
            node = children[at]
        children[2 * node + (code & 1)] = ~symbol
        code += 1
    return children


def _endings() -> frozenset[int]:
    """The states in which a string may end: none to seven ones into a symbol."""
    node = 0
    found = {0}
    for _ in range(7):
        node = _CHILDREN[2 * node + 1]
        found.add(node)
    return frozenset(found)


_CHILDREN: Final = _tree()
_ENDINGS: Final = _endings()
# For each state, empty as long as it was not reached: the states that follow, and the symbols completed.
_NEXT: Final[list[list[int]]] = [[] for _ in range(257)]
_COMPLETED: Final[list[list[bytes]]] = [[] for _ in range(257)]
_PAIRS: Final[dict[bytes, bytes]] = {}  # most states complete the same symbols: one object for equal ones


def _row(state: int) -> list[int]:
    """Fill the rows of `state`."""
    following = _NEXT[state]
    completed = _COMPLETED[state]
    for byte in range(256):
        node = state
        symbols: list[int] = []
        for bit in range(7, -1, -1):
            if node == _FAILED:
                break
            node = _CHILDREN[2 * node + (byte >> bit & 1)]
            if node < 0:
                if ~node == _EOS:
                    node = _FAILED
                else:
                    symbols.append(~node)
                    node = 0
        done = bytes(symbols)
        completed.append(_PAIRS.setdefault(done, done))
        following.append(node)
    return following


def decode(data: bytes) -> bytes | None:
    """The string that `data` encodes, at most 8/5 as long; None if it has EOS or is not padded as it has to be."""
    rows = _NEXT
    completed = _COMPLETED
    state = 0
    parts = []
    for byte in data:
        row = rows[state] or _row(state)
        parts.append(completed[state][byte])
        state = row[byte]
    return b"".join(parts) if state in _ENDINGS else None
