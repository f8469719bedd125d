"""Look-up of the routes for a name: the first one that fits decides. The cost does not grow with their number.

A route without `*` is found by its name, one with `*` by the text before it; of what is found so, the order of the
documents decides. A route with header conditions may or may not fit a call, so the result is a list: the routes with
conditions, in order, and at the end one without.
"""

from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache

from oriel_policies.documents import Route
from oriel_policies.documents.promises import fits

_REMEMBERED = 16384


class _Patterns:
    """Routes of one kind by their pattern."""

    def __init__(self) -> None:
        self.exact: dict[str, list[tuple[int, Route]]] = {}
        self._by_prefix: dict[str, list[tuple[int, Route, str]]] = {}
        self._lengths: list[int] = []

    def add(self, order: int, pattern: str, route: Route) -> None:
        prefix, star, _ = pattern.partition("*")
        if not star:
            self.exact.setdefault(pattern, []).append((order, route))
            return
        self._by_prefix.setdefault(prefix, []).append((order, route, pattern))
        self._lengths = sorted({len(prefix) for prefix in self._by_prefix})

    def fitting(self, name: str) -> list[Route]:
        found = list(self.exact.get(name, ()))
        for length in self._lengths:
            if length > len(name):
                break
            for order, route, pattern in self._by_prefix.get(name[:length], ()):
                if fits(pattern, name):
                    found.append((order, route))
        found.sort(key=lambda entry: entry[0])
        return [route for _, route in found]


class RouteTable:
    """The routes of one snapshot. Remembers the last answers."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self._models = _Patterns()
        self._services = _Patterns()
        self._found = lru_cache(maxsize=_REMEMBERED)(_find)  # no method: a table that refers to itself stays in memory
        for order, route in enumerate(routes):
            if route.model is not None:
                self._models.add(order, route.model, route)
            elif route.service is not None:
                self._services.add(order, route.service, route)

    @property
    def service_names(self) -> Collection[str]:
        """Services that a route names without `*`."""
        return self._services.exact.keys()

    def for_model(self, name: str, version: str = "", tier: str = "") -> tuple[Route, ...]:
        """Routes that may fit, in order; all but the last have header conditions. version: "" if the call names
        none. tier: of the tenant; "" for one of no tier, who gets no route that is for some.
        """
        return self._found(self._models, name, version, tier)

    def for_service(self, name: str, tier: str = "") -> tuple[Route, ...]:
        """The same for a service."""
        return self._found(self._services, name, "", tier)


def _find(patterns: _Patterns, name: str, version: str, tier: str) -> tuple[Route, ...]:
    fitting = [r for r in patterns.fitting(name) if r.version in (None, version)]
    return _until_unconditional([r for r in fitting if not r.for_tiers or tier in r.for_tiers])


def _until_unconditional(routes: Sequence[Route]) -> tuple[Route, ...]:
    for index, route in enumerate(routes):
        if not route.headers:
            return tuple(routes[: index + 1])
    return tuple(routes)
