"""A call without a client of its own: the same queue, permits, endpoints and deadline, and an answer for somebody else.

It is not counted as a request and not traced: whoever it works for is. It comes from no address: those it works for may
be several.
"""

from oriel_gateway.call import Call
from oriel_gateway.core import Gateway
from oriel_gateway.errors import Outcome
from oriel_gateway.pools import PoolGate
from oriel_gateway.targets import Target
from oriel_gateway.tracing import Mark
from oriel_policies.documents import Tenant
from oriel_wire.h1 import RequestHead

__all__ = ["DetachedCall"]


class DetachedCall(Call):
    """See the module's head. Subclasses say what becomes of the answer: `response`, `response_data`, `refuse`."""

    def __init__(
        self,
        gateway: Gateway,
        gate: PoolGate,
        head: RequestHead,
        tenant: Tenant,
        target: Target,
        mark: Mark,
        received_s: float,
        deadline: float,
        lines: bytes | None = None,
    ) -> None:
        super().__init__(gateway, None, gate, head, tenant, target, mark, received_s, deadline, lines)
        gateway.routing.detached[self] = None

    def client_writable(self, writable: bool) -> None:
        """Nobody pushes back."""

    def _count(self, outcome: Outcome, now: float, error: str) -> None:
        """Not a request of its own; but this is where every end passes."""
        self._gateway.routing.detached.pop(self, None)
