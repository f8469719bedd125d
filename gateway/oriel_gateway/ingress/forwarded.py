"""Decide which statements about the client count: `X-Forwarded-For`, `-Proto`, `-Host`, `Forwarded` (RFC 7239).

Each proxy appends the address it was called from, so a list is true from its right end as far as its proxies are
trusted: the client is the last address that is not one of `trusted_proxies`. Such headers of any other sender are
dropped, and without `trusted_proxies` the gateway passes none of them on. A proxy that writes one of the two lists
leaves the other to its clients: where they name different clients, only the proxy itself is known.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

from oriel_wire.h1.request import RequestHead

MAX_HOPS = 64
Networks = tuple[IPv4Network | IPv6Network, ...]
_PAIR = r'[A-Za-z0-9!#$%&\'*+.^_`|~-]+=(?:[^\s";,\\]*|"(?:[^"\\]|\\.)*")'
_ELEMENT = re.compile(rf"[ \t]*{_PAIR}(?:[ \t]*;[ \t]*{_PAIR})*;?[ \t]*")
_FOR = re.compile(r'(?:^|;)[ \t]*for=(?:"([^"]*)"|([^";,]*))', re.IGNORECASE)
_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[0-9.]+)(?::[0-9]{1,5})?\Z")
_HOST = re.compile(r"(?:[A-Za-z0-9._~-]{1,255}|\[[0-9A-Fa-f:.]{2,45}\])(?::[0-9]{1,5})?\Z")


def forwarded_for(head: RequestHead, peer: str, *, secure: bool, networks: Networks) -> tuple[str, str]:
    """Return the client's address and the header lines for the next hop, each with its CRLF.

    peer: the address that has connected.
    secure: True if it connected over TLS.
    An address is in its usual spelling, without a port.
    """
    peer = _parsed(peer) or peer
    passed: dict[str, list[str]] = {}
    others: list[str] = []
    if _trusted(peer, networks):
        for field in head.forwarded or ():
            if field.name in ("x-forwarded-for", "x-forwarded-proto", "x-forwarded-host", "forwarded"):
                passed.setdefault(field.name, []).append(field.value)
            else:
                others.append(f"{field.name}: {field.value}")
    listed = ",".join(passed.get("x-forwarded-for", ()))
    elements = _elements(passed.get("forwarded", ()))
    described = ", ".join(elements)
    by_list = _client([each.strip() for each in listed.rsplit(",", MAX_HOPS)[-MAX_HOPS:]], peer, networks)
    by_description = _client([_named(each) for each in elements], peer, networks)
    found = [by_list] if listed else []
    found += [by_description] if any(passed.get("forwarded", ())) else []
    client = found[0] if found and all(address == found[0] for address in found) else peer
    proto = _one(passed.get("x-forwarded-proto"), {"http", "https"}) or ("https" if secure else "http")
    given_host = passed.get("x-forwarded-host", [""])
    host = given_host[0] if len(given_host) == 1 and _HOST.match(given_host[0]) else head.host
    node = f'"[{peer}]"' if ":" in peer else peer
    here = f'for={node};host="{host}";proto={proto}' if _HOST.match(host) else f"for={node};proto={proto}"
    lines = [
        f"x-forwarded-for: {listed}, {peer}" if listed else f"x-forwarded-for: {peer}",
        f"x-forwarded-proto: {proto}",
        *([f"x-forwarded-host: {host}"] if _HOST.match(host) else []),
        f"forwarded: {described}, {here}" if described else f"forwarded: {here}",
        *others,
    ]
    return client, "".join([f"{line}\r\n" for line in lines])


def _client(chain: Sequence[str], peer: str, networks: Networks) -> str:
    """Walk the list from the right for as long as the sender of the entry is trusted."""
    address = peer
    for entry in reversed(chain):
        if not _trusted(address, networks):
            break
        named = _parsed(entry)
        if named is None:
            break
        address = named
    return address


def _elements(lines: Sequence[str]) -> list[str]:
    """Return the last elements of a `Forwarded`, up to the first that is none.

    A quote that a client leaves open in its part must not hide what a proxy appends, so each element is the shortest
    piece behind a comma that is a whole element.
    """
    found: list[str] = []
    for line in reversed(lines):
        element = ""
        for piece in reversed(line.rsplit(",", MAX_HOPS)[-MAX_HOPS:]):
            element = f"{piece},{element}" if element else piece
            if _ELEMENT.fullmatch(element):
                found.append(element.strip())
                element = ""
            elif not element.strip():
                element = ""
        if element or len(found) >= MAX_HOPS:
            break
    return found[::-1]


def _named(element: str) -> str:
    match = _FOR.search(element)
    return (match[1] or match[2] or "").strip() if match else ""


def _parsed(text: str) -> str | None:
    """Return an address in its usual spelling; None for a name, `unknown` or nonsense."""
    match = _PORT.match(text)
    plain = match[1].strip("[]") if match else text
    if len(plain) > 45 or "%" in plain:  # a zone has a meaning on this machine only, and may be any text
        return None
    try:
        address: IPv4Address | IPv6Address = ip_address(plain)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address)


def _one(values: Sequence[str] | None, allowed: set[str]) -> str:
    return values[0].lower() if values and len(values) == 1 and values[0].lower() in allowed else ""


@lru_cache(maxsize=4096)
def _trusted(address: str, networks: Networks) -> bool:
    try:
        parsed = ip_address(address)
    except ValueError:
        return False
    return any(parsed in network for network in networks)
