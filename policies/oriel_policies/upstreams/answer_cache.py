"""A cache of answers: bounded in bytes, evicting the least recently used, each entry with its own time to live.

Every entry has an owner: a tenant, or "" for entries that all tenants share. An owner may use at most `owner_share` of
the bytes. Beyond that its own oldest entry is evicted, so that no tenant can evict the entries of others.
"""

from collections import OrderedDict
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Entry(Generic[T]):
    value: T
    owner: str
    size_bytes: int
    stored_s: float
    until_s: float


class AnswerCache(Generic[T]):
    """Values by key. max_bytes: bound over all entries; 0 keeps nothing. Single writer; times are monotonic seconds."""

    def __init__(self, *, max_bytes: int, owner_share: float = 0.25) -> None:
        self.max_bytes = max_bytes
        self.owner_bytes = int(max_bytes * owner_share)
        self.size_bytes = 0
        self.evicted = 0
        self._entries: OrderedDict[bytes, _Entry[T]] = OrderedDict()
        self._owners: dict[str, OrderedDict[bytes, None]] = {}
        self._owner_bytes: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes, now: float) -> tuple[T, float] | None:
        """The value and its age in seconds, or None if there is none or it has expired."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        if now >= entry.until_s:
            self._drop(key, entry)
            return None
        self._entries.move_to_end(key)
        self._owners[entry.owner].move_to_end(key)
        return entry.value, now - entry.stored_s

    def put(self, key: bytes, owner: str, value: T, size_bytes: int, now: float, ttl_s: float) -> bool:
        """Store a value, replacing an older one. False if it is larger than its owner's share."""
        before = self._entries.get(key)
        if before is not None:
            self._drop(key, before)
        if size_bytes > self.owner_bytes or ttl_s <= 0.0:
            return False
        own = self._owners.setdefault(owner, OrderedDict())
        while self._owner_bytes.get(owner, 0) + size_bytes > self.owner_bytes:
            self._evict(next(iter(own)))
        while self.size_bytes + size_bytes > self.max_bytes:
            self._evict(next(iter(self._entries)))
        self._entries[key] = _Entry(value, owner, size_bytes, now, now + ttl_s)
        self._owners.setdefault(owner, own)[key] = None
        self._owner_bytes[owner] = self._owner_bytes.get(owner, 0) + size_bytes
        self.size_bytes += size_bytes
        return True

    def drop(self, owner: str, most: int) -> bool:
        """Remove up to `most` entries of an owner; return whether it has more."""
        for key in list(islice(self._owners.get(owner, ()), most)):
            self._drop(key, self._entries[key])
        return owner in self._owners

    def clear(self) -> None:
        """Remove all entries."""
        self._entries.clear()
        self._owners.clear()
        self._owner_bytes.clear()
        self.size_bytes = 0

    def _evict(self, key: bytes) -> None:
        self.evicted += 1
        self._drop(key, self._entries[key])

    def _drop(self, key: bytes, entry: _Entry[T]) -> None:
        del self._entries[key]
        self.size_bytes -= entry.size_bytes
        own = self._owners[entry.owner]
        del own[key]
        self._owner_bytes[entry.owner] -= entry.size_bytes
        if not own:
            del self._owners[entry.owner]
            del self._owner_bytes[entry.owner]
