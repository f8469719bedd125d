"""A model of an engine's prefix cache: which beginnings of prompts it has computed and still holds.

Engines reuse whole blocks of tokens whose beginning is the same, and forget those that were used least recently.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from itertools import takewhile


class PrefixCache:
    """The blocks that are cached. block_tokens: tokens of a block. blocks: most blocks."""

    def __init__(self, block_tokens: int, blocks: int) -> None:
        self._block_tokens = block_tokens
        self._blocks = blocks
        self._cached: OrderedDict[int, None] = OrderedDict()

    def known(self, ids: Sequence[int]) -> int:
        """Return the tokens at the beginning of `ids` that are cached; never all of them, because the last token of a
        prompt is computed in any case.
        """
        found = list(takewhile(self._cached.__contains__, self._chain(ids)))
        for block in found:
            self._cached.move_to_end(block)
        return min(len(found) * self._block_tokens, len(ids) - 1)

    def keep(self, ids: Sequence[int]) -> None:
        """Record that all of `ids` have been computed."""
        for block in self._chain(ids):
            self._cached[block] = None
            self._cached.move_to_end(block)
        while len(self._cached) > self._blocks:
            self._cached.popitem(last=False)

    def _chain(self, ids: Sequence[int]) -> Iterator[int]:
        """Return a number for each whole block that stands for the block and all before it."""
        chain = 0
        for at in range(0, len(ids) - self._block_tokens + 1, self._block_tokens):
            chain = hash((chain, tuple(ids[at : at + self._block_tokens])))
            yield chain
