"""Protects ports that only this machine may use from pages in a browser of this machine.

A page can send requests to loopback addresses, and reads the answers too if it lets its own name resolve to one. Then
the `Host` is that name. A request that it may only send says where it comes from (`Origin`). A gateway passes on the
`Origin` of its own pages' calls, together with the tier, a header that no page may send elsewhere without a preflight.
"""

import re
from collections.abc import Callable
from ipaddress import ip_address

from oriel_wire.context import TIER

_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:]*)(?::[0-9]{1,5})?\Z")


def is_loopback(host: str) -> bool:
    """Return whether an address or a name stands for this machine only."""
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def page_refusal(get: Callable[[str], str | None]) -> str:
    """Return why a request to a loopback address is refused; "" if it is none of a page from elsewhere.

    get: returns the value of a header by its lower-case name.
    """
    host, origin = get("host"), get("origin")
    match = None if host is None else _HOST.match(host)
    if host is not None and (match is None or not is_loopback(match[1])):
        return "this port serves this machine only, and the Host is no loopback address: use one, such as 127.0.0.1"
    own = origin is None or origin in (f"http://{host}", f"https://{host}")
    if not own and get(TIER) is None:
        return "this port serves this machine only, and no pages of other sites: send the request from a program"
    return ""
