"""The tests that every `Discovery` has to pass. The tests of a plug-in subclass `DiscoverySuite` and define `made`."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Sequence

import pytest

from oriel_wire.discovery.discovery import MAX_ADDRESSES, Address, Discovery, DiscoveryFailed


class DiscoverySuite(ABC):
    """Subclasses define `made(addresses, fails=...)`: a discovery that finds these addresses, or whose source fails."""

    changes = True  # False for a discovery with a fixed answer

    @abstractmethod
    def made(self, addresses: Sequence[Address], *, fails: bool = False) -> Discovery: ...

    async def test_it_finds_each_address_once_and_sorted(self) -> None:
        found = await self.made([("127.0.0.2", 80), ("127.0.0.1", 80), ("127.0.0.2", 80)]).lookup()
        assert found == (("127.0.0.1", 80), ("127.0.0.2", 80))
        assert isinstance(found, tuple) and all(isinstance(host, str) and isinstance(port, int) for host, port in found)

    async def test_the_same_source_gives_the_same_answer(self) -> None:
        discovery = self.made([("127.0.0.1", 80), ("127.0.0.2", 80)])
        assert await discovery.lookup() == await discovery.lookup()

    async def test_a_flood_of_addresses_is_bounded(self) -> None:
        many = [(f"10.{n >> 16 & 255}.{n >> 8 & 255}.{n & 255}", 80) for n in range(MAX_ADDRESSES + 100)]
        assert len(await self.made(many).lookup()) == MAX_ADDRESSES

    async def test_it_says_when_to_ask_again(self) -> None:
        every_s = self.made([("127.0.0.1", 80)]).every_s
        assert every_s > 0.0 if self.changes else every_s == 0.0

    async def test_it_can_be_cancelled(self) -> None:
        task = asyncio.ensure_future(self.made([("127.0.0.1", 80)]).lookup())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


class FailingDiscoverySuite(DiscoverySuite):
    """Further tests for a `Discovery` whose source may be away."""

    async def test_a_failure_is_a_discovery_failed_with_a_sentence(self) -> None:
        with pytest.raises(DiscoveryFailed) as failed:
            await self.made([("127.0.0.1", 80)], fails=True).lookup()
        assert 0 < len(str(failed.value)) <= 500
