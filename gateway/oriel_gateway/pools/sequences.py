"""Remembers at which endpoint each sequence lives: only the server that has its state may get its steps.

| what is known of its sequence | a step with START goes | any other step goes |
|---|---|---|
| its endpoint accepts connections | where its key's hash points | there, even if that leaves or is not ready |
| its endpoint was lost | where its key's hash points | nowhere: it is refused |
| nothing | where its key's hash points | where its key's hash points; the server judges it |

The hash depends on the key and on the usable endpoints alone (`StickyChoice`), so several gateways, and one that has
just started, agree as long as they see the same endpoints. The memory matters when those change.

A sequence is forgotten at its END, after `IDLE_S` without a step, or to make room for another one by the rule of
`oriel_policies.waiting.shares`. Single writer: the loop.

Tenants with the same id have sequences of their own, because our servers tell tenants apart. Triton does not: there an
id that is in use by another tenant is refused. A server is taken for such a one until it has reported a cost, which our
servers do for a gateway that they trust.
"""

from time import monotonic
from typing import Final

from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.pools.endpoint_state import EndpointState, HttpEndpoint, Reach
from oriel_policies.documents import Tenant
from oriel_policies.waiting.shares import Holding, Shares

IDLE_S: Final = 600.0
MOST: Final = 16_384  # sequences of one pool that are remembered


class Stick:
    """The tie of a call to the endpoint that its key chooses: of a session, or of a step of a sequence.

    key: equal keys choose equal endpoints. start, end: the step is the first one of its sequence, the last one.
    shown: model and id, as a server that does not know tenants tells sequences apart.
    home: the endpoint with the state of the sequence, None while that is not known; it was lost if `lost` is True.
    room: its place in the table; None for a session. used_s: the time when the step was sent, in monotonic seconds.
    """

    __slots__ = ("end", "home", "key", "lost", "room", "shown", "start", "used_s")

    def __init__(self, shown: str, tenant: Tenant | None = None, *, start: bool = False, end: bool = False) -> None:
        """tenant: the tenant of the sequence; None for a session."""
        self.shown = shown
        self.key = key = shown if tenant is None else f"{tenant.name}\0{shown}"
        self.room = None if tenant is None else Holding(tenant.tier.band, tenant.name, tenant.weight, key)
        self.start = start
        self.end = end
        self.home: HttpEndpoint | None = None
        self.lost = False
        self.used_s = 0.0

    @property
    def bound(self) -> HttpEndpoint | None:
        """Return the only endpoint that may get the step; None if any may."""
        return None if self.start else self.home


class Sequences:
    """The sequences of one pool over one protocol.

    most: how many of them are remembered.
    users: the latest step of each model and id, of whichever tenant; shared by the protocols of a pool.
    apart: the servers of the pool tell tenants apart.
    """

    def __init__(self, most: int = MOST) -> None:
        self._shares = Shares(most)
        self.users: dict[str, Stick] = {}
        self.apart = False
        self._latest: dict[str, Stick] = {}  # the latest step of each sequence, the oldest first

    def find(self, step: Stick, now: float) -> None:
        """Find the home of a step. Raises Refused: its sequence was lost, or another tenant uses its id."""
        self.expire(now)
        if self._is_foreign(step):
            why = "another tenant uses this sequence_id, and the servers do not know tenants: use another, random one"
            raise Refused(Outcome.INVALID_REQUEST, why)
        before = self._latest.get(step.key)
        if before is None or before.home is None or step.start:
            return
        before.lost = before.lost or before.home.reach is Reach.UNREACHABLE
        if before.lost:
            raise lost()
        step.home = before.home

    def place(self, step: Stick, endpoint: HttpEndpoint, now: float) -> bool:
        """Note that the sequence of a step lives at `endpoint`, to which the step is sent. False: it must not be sent,
        because another tenant has begun to use its id meanwhile.
        """
        if self._is_foreign(step):
            return False
        step.home, step.used_s = endpoint, now
        self.forget(step.key)
        displaced = None if step.room is None else self._shares.acquire(step.room, 1)
        if displaced is not None:
            self._latest[step.key] = self.users[step.shown] = step
            for each in displaced:
                self.forget(each.payload)
        return True

    def _is_foreign(self, step: Stick) -> bool:
        user = self.users.get(step.shown)
        return not self.apart and user is not None and user.key != step.key

    def forget(self, key: str) -> None:
        """Forget a sequence, if it is remembered."""
        step = self._latest.pop(key, None)
        if step is not None and step.room is not None:
            self._shares.release(step.room)
            if self.users.get(step.shown) is step:
                del self.users[step.shown]

    def expire(self, now: float) -> None:
        """Forget the sequences that have been idle for too long."""
        while self._latest and (oldest := next(iter(self._latest.values()))).used_s + IDLE_S <= now:
            self.forget(oldest.key)

    def homes(self) -> set[EndpointState | None]:
        """Return the endpoints at which sequences live."""
        self.expire(monotonic())
        return {step.home for step in self._latest.values()}


def lost() -> Refused:
    """Build the refusal of a step whose sequence's state is gone."""
    return Refused(
        Outcome.SEQUENCE_LOST, "the server with its state was lost: begin the sequence again (sequence_start)"
    )
