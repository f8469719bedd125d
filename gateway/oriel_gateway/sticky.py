"""Equal keys meet the same endpoint, as long as it is there; then all its keys meet their next one."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from oriel_policies.assignment import Rendezvous

if TYPE_CHECKING:
    from oriel_gateway.pools import PoolGate
    from oriel_wire.engine.upstream import Endpoint

__all__ = ["StickyChoice"]


class StickyChoice:
    """The endpoints of one pool by name; made anew when they change."""

    def __init__(self) -> None:
        self._ring = Rendezvous(())
        self._of: tuple[Endpoint, ...] = ()

    def pick(self, gate: "PoolGate", key: str, tried: "Sequence[Endpoint]") -> "Endpoint | None":
        """The endpoint of `key` among those that were not tried; None when all were."""
        endpoints = gate.endpoints
        if len(endpoints) != len(self._of) or any(a is not b for a, b in zip(endpoints, self._of, strict=True)):
            self._of = tuple(endpoints)
            self._ring = Rendezvous([f"{endpoint.host}:{endpoint.port}" for endpoint in endpoints])
        barred = [index for index, endpoint in enumerate(self._of) if endpoint in tried] if tried else ()
        found = self._ring.first(key, barred)
        return None if found is None else self._of[found]
