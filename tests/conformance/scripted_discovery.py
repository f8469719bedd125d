"""A `Discovery` that answers what a test sets."""

from collections.abc import Sequence

from oriel_wire.discovery.discovery import MAX_ADDRESSES, Address, DiscoveryFailed


class ScriptedDiscovery:
    """Answers with `addresses`, or raises `error` while that is set."""

    def __init__(self, addresses: Sequence[Address] = (), *, every_s: float = 0.01) -> None:
        self.addresses = tuple(addresses)
        self.error: DiscoveryFailed | None = None
        self.every_s = every_s
        self.lookups = 0

    async def lookup(self) -> tuple[Address, ...]:
        self.lookups += 1
        if self.error is not None:
            raise self.error
        return tuple(sorted(set(self.addresses)))[:MAX_ADDRESSES]
