"""The conformance rules of `Discovery`, for the logic server's own."""

import socket
from collections.abc import Sequence
from typing import Any

import pytest

from oriel_logic.discovery import (
    MAX_ADDRESSES,
    Address,
    Discovery,
    DiscoveryFailed,
    DnsDiscovery,
    ScriptedDiscovery,
    StaticDiscovery,
)


def dns(addresses: Sequence[Address], error: Exception | None = None) -> DnsDiscovery:
    async def resolve(host: str, port: int) -> Sequence[tuple[Any, ...]]:
        if error is not None:
            raise error
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", address) for address in addresses]

    return DnsDiscovery("pods.svc", 80, resolve=resolve)


@pytest.mark.parametrize("make", [dns, StaticDiscovery, ScriptedDiscovery])
async def test_each_address_once_sorted_and_bounded(make: Any) -> None:
    discovery: Discovery = make([("127.0.0.2", 80), ("127.0.0.1", 80), ("127.0.0.2", 80)])
    assert await discovery.lookup() == (("127.0.0.1", 80), ("127.0.0.2", 80))
    many = [(f"10.0.{n >> 8}.{n & 255}", 80) for n in range(MAX_ADDRESSES + 10)]
    assert len(await make(many).lookup()) == MAX_ADDRESSES


@pytest.mark.parametrize("error", [OSError("no such name"), TimeoutError(), UnicodeError("label too long"), None])
async def test_what_is_not_found_is_a_sentence(error: Exception | None) -> None:
    with pytest.raises(DiscoveryFailed, match=r"^pods\.svc "):
        await dns([], error).lookup()


async def test_localhost_is_really_resolved() -> None:
    assert ("127.0.0.1", 80) in await DnsDiscovery("localhost", 80).lookup()
