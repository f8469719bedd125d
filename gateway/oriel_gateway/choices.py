"""Targets that depend on more than a tenant and a request line: on headers, or on the side of a split.

Whatever does not depend on the single call is decided once, when the request line is first seen, and remembered in
the `Target`: among them a split by tenant. The rest is a `Choices` that the target carries.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from oriel_policies.assignment import Sides
from oriel_policies.documents import Route, Split

if TYPE_CHECKING:
    from oriel_gateway.targets import Target

__all__ = ["Choices", "Make", "first_target", "side_name"]

# A route and, where it has a split, a side of it, made into the target they stand for.
Make = Callable[[Route, Split | None], "Target"]


def side_name(side: Split | None) -> str:
    """How a side is called in answers, metrics and decisions; "" without a split."""
    if side is None:
        return ""
    return f"{side.pool}@{side.version}" if side.version else side.pool


def first_target(routes: Sequence[Route], make: Make, tenant: str) -> tuple["Target | None", "Choices | None"]:
    """The target that fits whatever the call's headers are, or else what has to be asked of each call.

    routes: as `RouteTable` gives them. Both None: nothing fits.
    """
    if not routes:
        return None, None
    route = routes[0]
    if route.headers or (route.split and route.split_by != "tenant"):
        return None, Choices(routes, make, tenant)
    return make(route, _side(route, tenant)), None


class Choices:
    """Routes of which the call decides, and what they come to; each is made when it is first chosen."""

    __slots__ = ("_made", "_make", "_routes", "_tenant")

    def __init__(self, routes: Sequence[Route], make: Make, tenant: str) -> None:
        self._routes = routes
        self._make = make
        self._tenant = tenant
        self._made: dict[tuple[Route, Split | None], Target] = {}

    def pick(self, header: Callable[[str], str | None], request_id: str) -> "Target | None":
        """header: lower-case name -> its first value in the call. None when no route fits."""
        for route in self._routes:
            if all(header(name) == value for name, value in route.headers):
                break
        else:
            return None
        side = None
        if route.split:
            by = route.split_by
            # Without the header there is nothing to stick to: the tenant is the next steadiest thing.
            side = _side(route, request_id if by == "request" else by != "tenant" and header(by) or self._tenant)
        target = self._made.get((route, side))
        if target is None:
            target = self._made[route, side] = self._make(route, side)
        return target


def _side(route: Route, key: str) -> Split | None:
    if not route.split:
        return None
    before, shares = 0.0, []
    for side in route.split:
        shares.append(side.until - before)
        before = side.until
    return route.split[Sides(route.name, [side_name(side) for side in route.split], shares).of(key)]
