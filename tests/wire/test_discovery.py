"""The shipped discoveries, by the suite any plug-in can run, and DNS by what is special about it."""

import asyncio
import socket
from collections.abc import Sequence
from typing import Any

import pytest
from discovery_suite import DiscoverySuite, FailingDiscoverySuite
from scripted_discovery import ScriptedDiscovery

from oriel_wire.discovery.discovery import (
    Address,
    Discovery,
    DiscoveryFailed,
    DnsDiscovery,
    StaticDiscovery,
)


class TestStatic(DiscoverySuite):
    changes = False

    def made(self, addresses: Sequence[Address], *, fails: bool = False) -> Discovery:
        return StaticDiscovery(addresses)


class TestScripted(FailingDiscoverySuite):
    def made(self, addresses: Sequence[Address], *, fails: bool = False) -> Discovery:
        scripted = ScriptedDiscovery(addresses)
        scripted.error = DiscoveryFailed("the script says so") if fails else None
        return scripted


class TestDns(FailingDiscoverySuite):
    def made(self, addresses: Sequence[Address], *, fails: bool = False) -> Discovery:
        async def resolve(host: str, port: int) -> Sequence[tuple[Any, ...]]:
            if fails:
                raise socket.gaierror(socket.EAI_AGAIN, "temporary failure")
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in addresses]

        return DnsDiscovery("pods.example", 80, resolve=resolve)


async def test_a_name_is_really_looked_up() -> None:
    assert ("127.0.0.1", 4711) in await DnsDiscovery("localhost", 4711).lookup()


async def test_a_name_server_that_does_not_answer_is_not_waited_for() -> None:
    async def never(host: str, port: int) -> Sequence[tuple[Any, ...]]:
        await asyncio.Event().wait()
        return []

    with pytest.raises(DiscoveryFailed, match="within"):
        await DnsDiscovery("pods.example", 80, timeout_s=0.01, resolve=never).lookup()


@pytest.mark.parametrize("error", [OSError("no such name"), TimeoutError(), UnicodeError("label too long")])
async def test_a_name_that_cannot_be_resolved_is_reported_by_name(error: Exception) -> None:
    async def failing(host: str, port: int) -> Sequence[tuple[Any, ...]]:
        raise error

    with pytest.raises(DiscoveryFailed, match=r"^pods\.example "):
        await DnsDiscovery("pods.example", 80, resolve=failing).lookup()


async def test_a_name_without_addresses_is_a_failure_and_takes_nothing_away() -> None:
    async def nothing(host: str, port: int) -> Sequence[tuple[Any, ...]]:
        return []

    with pytest.raises(DiscoveryFailed, match="no addresses"):
        await DnsDiscovery("pods.example", 80, resolve=nothing).lookup()
