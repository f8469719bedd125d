"""The names of peers, and those whose headers about deadline, tier and tenant are honoured."""

import asyncio
import ipaddress
from collections.abc import Sequence

from oriel_wire.errors import StartFailed

_MEMO = 4096


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


def peer_names(transport: asyncio.BaseTransport) -> tuple[str, str]:
    """The peer's address, and a name of its connection that is unique among open ones."""
    peer = transport.get_extra_info("peername")
    if not isinstance(peer, tuple):
        return "unix", f"unix {id(transport)}"
    return str(peer[0]), f"{peer[0]} {peer[1]}"
