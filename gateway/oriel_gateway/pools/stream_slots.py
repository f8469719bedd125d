"""Stream slots: a streaming call holds a pool permit until its first answer byte, then one of the pool's `max_streams`.

A permit stands for a call that a server has not begun to answer. A streaming call, which may go on for minutes, would
keep it from others: it is a gRPC stream, an HTTP answer without a length, or any answer whose client has stopped
reading.

- A gRPC stream acquires its slot before its first message is sent. If none is free, a stream of a less urgent tier, or
  of the tenant that has most above its share, is displaced by the rule of `oriel_policies.waiting.shares`; if there is
  none of these, the new stream is refused.
- Any other stream is recognised by its answer. It takes a free slot, or keeps its permit until one is free. If its
  client does not read for `MOST_UNREAD_S` meanwhile, it displaces another stream by the same rule, or else it ends.

A stream is charged for the time in which a server is at work for it and its client reads, divided by the calls at the
servers. The server of a gRPC stream is at work from a message to its answer, and between the answers of a model that
sends several.
"""

import asyncio
from time import monotonic
from typing import Final, Protocol

from oriel_policies.waiting.admission import Admission
from oriel_policies.waiting.shares import Holding, Shares

__all__ = ["MOST_UNREAD_S", "StreamSlot", "StreamSlots"]

MOST_UNREAD_S: Final = 1.0


class Streaming(Protocol):
    """A streaming call, the payload of its `Holding`."""

    def displaced(self) -> None:
        """Another stream has taken the slot: end the call."""

    def release_permit_for_slot(self, now: float) -> None:
        """The call has a slot now: release its permit."""

    def unread(self) -> None:
        """The client does not read, and there is no slot for the call: end it."""


class StreamSlots:
    """The slots of one pool. Single writer: the loop.

    working: streams with a slot for which a server is at work now.
    most_unread_s: seconds for which a client without a slot may leave its answer unread.
    """

    def __init__(self, admission: Admission, count: int) -> None:
        self._admission = admission
        self._keeping: dict[StreamSlot, None] = {}  # streams that keep their permits, the oldest first
        self.shares = Shares(count)
        self.working = 0
        self.most_unread_s = MOST_UNREAD_S

    @property
    def at_servers(self) -> int:
        """Return the number of calls that share the servers now, at least 1."""
        return (self._admission.inflight + self.working) or 1

    def resize(self, count: int, now: float) -> None:
        """Change the number of slots to `count`. Streams that exceed it continue until they end."""
        self.shares.bound = count
        self.hand_out(now)

    def hand_out(self, now: float) -> None:
        """Give free slots to the streams that keep their permits."""
        while self._keeping and self.shares.held < self.shares.bound:
            stream = next(iter(self._keeping))
            stream.acquire_free(now)

    def keep(self, stream: "StreamSlot") -> None:
        """Remember a stream that keeps its permit until a slot is free."""
        self._keeping[stream] = None

    def forget(self, stream: "StreamSlot") -> None:
        """Forget a stream that got a slot or is over."""
        self._keeping.pop(stream, None)


class StreamSlot:
    """One stream's slot, and the time that its server worked. `release` it once.

    has_slot: True once the call has released its permit and holds a slot in its place.
    paused: True while the client has stopped reading.
    worked_s: seconds in which a server was at work for the stream. share_s: these divided by the calls at the servers.
    """

    def __init__(self, slots: StreamSlots, call: Streaming, holding: Holding) -> None:
        self._slots = slots
        self._call = call
        self._holding = holding
        holding.payload = call
        self._busy = False
        self._since_s = 0.0  # until when time was counted
        self._timer: asyncio.TimerHandle | None = None
        self.has_slot = False
        self.paused = False
        self.worked_s = self.share_s = 0.0

    def reserve(self) -> bool:
        """Acquire a slot, displacing other streams if necessary. Return True if the stream has one now."""
        if self._holding.held:
            return True
        displaced = self._slots.shares.acquire(self._holding, 1)
        for each in displaced or ():
            each.payload.displaced()
        return displaced is not None

    def begin_answer(self, now: float) -> None:
        """The answer has begun: exchange the permit for a slot, or keep it until one is free."""
        if not self.has_slot:
            self._slots.keep(self)
            self.acquire_free(now)

    def acquire_free(self, now: float) -> None:
        """Exchange the permit for the reserved slot or a free one. Change nothing if there is none."""
        shares = self._slots.shares
        if not self._holding.held:
            if shares.held >= shares.bound:
                return
            shares.acquire(self._holding, 1)
        self._slots.forget(self)
        self._cancel_timer()
        self.has_slot = True
        self._slots.working += self.working
        self._call.release_permit_for_slot(now)

    # The time that is charged ----------------------------------------------------------------------------------

    def begin_work(self, permit_s: float) -> None:
        """The first message is sent, perhaps once more: the server is at work since the call got its permit."""
        self._since_s = permit_s
        self._set(True, self.paused)

    def message_sent(self, now: float) -> None:
        """A further message was sent: the server is at work from now on."""
        if not self._busy:
            self._since_s = now
            self._set(True, self.paused)

    def note_answer(self, now: float, more: bool) -> None:
        """The server has answered. more: True if messages are unanswered."""
        self._count(now)
        self._set(more, self.paused)

    def pause(self, now: float) -> None:
        """The client has stopped reading."""
        if self.paused:
            return
        if self._busy:
            self._count(now)
        self._set(self._busy, True)
        self.begin_answer(now)
        if not self.has_slot:
            self._timer = asyncio.get_running_loop().call_later(self._slots.most_unread_s, self._stayed_paused)

    def _stayed_paused(self) -> None:
        """The client has not read for too long to keep the permit: displace others for a slot, or end the call."""
        self._timer = None
        if self.reserve():
            self.acquire_free(monotonic())
        else:
            self._call.unread()

    def resume(self, now: float) -> None:
        """The client reads on."""
        self._cancel_timer()
        self._since_s = now
        self._set(self._busy, False)

    def release(self, now: float) -> None:
        """The call is over: release the slot. A permit that was kept is the call's to release."""
        if self._busy:
            self._count(now)
        self._set(False, False)
        self._cancel_timer()
        self._slots.forget(self)
        self._slots.shares.release(self._holding)
        self._holding.payload = None
        self._slots.hand_out(now)

    @property
    def working(self) -> int:
        """Return 1 while a server is at work for the stream and its client reads, else 0."""
        return 1 if self._busy and not self.paused else 0

    def _set(self, busy: bool, paused: bool) -> None:
        before = self.working
        self._busy, self.paused = busy, paused
        if self.has_slot:
            self._slots.working += self.working - before

    def _count(self, now: float) -> None:
        if not self.paused:
            worked_s = now - self._since_s
            self.worked_s += worked_s
            self.share_s += worked_s / self._slots.at_servers
        self._since_s = now

    def _cancel_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
