"""Judges peers: their names, those whose headers are honoured, and pages in a browser of this machine.

A page can send requests to loopback addresses, and reads the answers too if it lets its own name resolve to one. Then
the `Host` is that name. A request that it may only send says where it comes from (`Origin`). A gateway passes on the
`Origin` of its own pages' calls, together with the tier, a header that no page may send elsewhere without a preflight.
"""

import asyncio
import ipaddress
import re
import ssl
from collections.abc import Callable, Sequence
from functools import lru_cache

from oriel_wire.context import TIER
from oriel_wire.errors import StartFailed

_MEMO = 4096
_HOST_CHARACTERS = 64  # more than an address in brackets and a port have
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:]*)(?::[0-9]{1,5})?\Z")


class TrustedPeers:
    """A set of addresses and networks; results are cached per address. Raises StartFailed for anything else."""

    def __init__(self, networks: Sequence[str]) -> None:
        try:
            self._networks = [ipaddress.ip_network(each, strict=False) for each in networks]
        except ValueError as error:
            raise StartFailed(f"--trusted-peer: {error}") from error
        self._known: dict[str, bool] = {}

    def __contains__(self, peer: str) -> bool:
        found = self._known.get(peer)
        if found is None:
            found = self._judge(peer)
            if len(self._known) < _MEMO:
                self._known[peer] = found
        return found

    def _judge(self, peer: str) -> bool:
        try:
            address = ipaddress.ip_address(peer.partition("%")[0])
        except ValueError:
            return False
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        return any(address in network for network in self._networks)


def negotiated_http2(transport: asyncio.BaseTransport) -> bool:
    """Return whether the handshake of a TLS connection has chosen HTTP/2 (RFC 7301)."""
    connection: ssl.SSLObject = transport.get_extra_info("ssl_object")
    return connection.selected_alpn_protocol() == "h2"


def peer_names(transport: asyncio.BaseTransport) -> tuple[str, str]:
    """The peer's address, and a name of its connection that is unique among open ones."""
    peer = transport.get_extra_info("peername")
    if not isinstance(peer, tuple):
        return "unix", f"unix {id(transport)}"
    return str(peer[0]), f"{peer[0]} {peer[1]}"


def is_loopback(host: str) -> bool:
    """Return whether an address or a name stands for this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


@lru_cache(256)
def _names_loopback(host: str) -> bool:
    match = _HOST.match(host)
    return match is not None and is_loopback(match[1])


def page_refusal(get: Callable[[str], str | None]) -> str:
    """Return why a request to a loopback address is refused; "" if it is none of a page from elsewhere.

    get: returns the value of a header by its lower-case name.
    """
    host, origin = get("host"), get("origin")
    if host is not None and (len(host) > _HOST_CHARACTERS or not _names_loopback(host)):
        return "this port serves this machine only: use a loopback address such as 127.0.0.1 as Host"
    own = origin is None or origin in (f"http://{host}", f"https://{host}")
    if not own and get(TIER) is None:
        return "this port does not serve pages of other sites: send the request from a program on this machine"
    return ""
