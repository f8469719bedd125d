"""Finds the endpoint that has the beginning of a prompt in its prefix cache: the one that got such a prompt last. Pure.

A prompt is hashed up to each of BOUNDARIES, 64 KiB at most, with the name of its tenant: a tenant can neither find out
nor change where another's prompts go. The longest beginning that is known decides. The table forgets the beginnings
that were not used for the longest time.
"""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, Generic, TypeVar

E = TypeVar("E")
KEYS: Final = (b'"messages"', b'"prompt"', b'"input"')  # the member that holds the prompt
BOUNDARIES: Final = tuple(512 * size for size in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128))  # bytes
MOST: Final = 32_768


def beginnings(tenant: str, body: bytes) -> tuple[bytes, ...]:
    """Return the digests of the prompt in a body of the OpenAI API up to each boundary, the shortest first."""
    start = next((at for key in KEYS if (at := body.find(key)) >= 0), len(body))
    hashed, found, before = blake2b(tenant.encode(), digest_size=16), [], start
    for size in BOUNDARIES:
        if start + size > len(body):
            break
        hashed.update(body[before : start + size])
        before = start + size
        found.append(hashed.digest())
    return tuple(found)


class PrefixHomes(Generic[E]):
    """The endpoints of known beginnings. most: the number of beginnings that are kept."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._homes: OrderedDict[bytes, E] = OrderedDict()

    def find(self, digests: Sequence[bytes]) -> E | None:
        """Return the endpoint of the longest beginning that is known."""
        return next((self._homes[each] for each in reversed(digests) if each in self._homes), None)

    def note(self, digests: Sequence[bytes], endpoint: E) -> None:
        """Note that a prompt with these beginnings goes to `endpoint`."""
        for each in digests:
            self._homes[each] = endpoint
            self._homes.move_to_end(each)
        while len(self._homes) > self._most:
            self._homes.popitem(last=False)
