"""HTTP/2 server connections on a transport: reading, flushing, time limits, draining.

A connection begins as HTTP/1.1 (`server.ServerConnection`). When its first bytes are HTTP/2's preface, it is offered to
the server's `on_http2` hook, which may hand it over to a subclass of `H2ServerConnection`; a port whose handler does so
takes both versions. The subclass handles the streams through the hooks of `oriel_wire.h2.hooks`.

Time limits, judged by the server's sweep four times a second:

* A connection without a stream ends after `idle_timeout_s`, with GOAWAY. A client is asked to leave, and its streams
  go on, when its connection is older than `max_age_s`.
* A header block, or another frame that brings no data, has to be whole within `head_timeout_s`.
* A client that does not acknowledge our settings within SETTINGS_S is cut: until then it may use a table for headers.
* A stream whose client leaves its window closed for `write_stall_s` is reset, and a client that does not read its
  connection for so long is cut. So is one, at once, behind whose unread answers another UNREAD_BYTES have gathered:
  data waits while a client does not read, but heads and trailers are written.
* A client that has been silent for `keepalive_s` while streams are open is sent a PING, and cut if nothing comes from
  it within `pong_s`.

How long a request may take to arrive is its handler's limit.

Bytes that a connection keeps beyond the size of a head count on `max_kept_bytes` of the server, for all connections and
both versions together: DATA that was not consumed, what is incomplete, and what a client that does not read has yet to
read. While the budget is used up, such a connection is read no further; after `write_stall_s` it ends with
ENHANCE_YOUR_CALM.

After a pause of the loop (`pulse`) a request counts as old as the latest bytes of its connection. It is not begun if
its client has left, or has reset its stream in the same bytes. Frames that gathered during the pause are no flood, and
nobody is cut for the pause before what he sent was read (`listener`).

When the server drains, its next sweep tells the client to leave (`drain` of the codec). The connection ends when the
client has acknowledged that and its last stream has ended, or, without a stream, when the server closes what is idle.
"""

import asyncio
from collections import deque
from contextlib import suppress
from math import inf
from random import random
from time import monotonic
from typing import Final

from mypy_extensions import mypyc_attr

from oriel_wire.engine.h2_transport import H2Transport
from oriel_wire.engine.kernel import arrival, closed_behind_unread
from oriel_wire.engine.limits import SETTINGS_S
from oriel_wire.engine.listener import HttpServer
from oriel_wire.h2.frames import CANCEL, DEFAULT_WINDOW, ENHANCE_YOUR_CALM, NO_ERROR
from oriel_wire.h2.limits import H2Limits
from oriel_wire.h2.streams import Stream

LINGER_S: Final = 1.0
UNREAD_BYTES: Final = 1024 * 1024
_ALIVE: Final = b"oriel-up"


@mypyc_attr(allow_interpreted_subclasses=True)
class H2ServerConnection(H2Transport):
    """One client connection; the module's docstring describes its limits.

    arrived_s: arrival of the bytes being handled, monotonic. late_s: seconds that they lay unread, because the loop
    did not poll. due: the time when an idle connection ends; it orders those that are closed to make room.
    """

    __slots__ = (
        "_full_s",
        "_goes_on",
        "_heard_s",
        "_kept",
        "_lingering",
        "_most_unread",
        "_opened_s",
        "_pauses",
        "_pinged_s",
        "_pulse",
        "_retires_s",
        "_roomy",
        "_stalled_s",
        "_swept_id",
        "_unwanted_bytes",
        "arrived_s",
        "due",
        "late_s",
        "peer",
        "peer_name",
        "server",
    )

    def __init__(self, server: HttpServer, limits: H2Limits) -> None:
        super().__init__(server.loop, client=False, limits=limits, memo=server.fields)
        self.server = server
        self.peer = self.peer_name = ""
        self.arrived_s = self.late_s = self.due = 0.0
        self._pulse = server.pulse
        self._pauses = server.pulse.pauses  # pauses of the loop that this connection has been excused for
        self._lingering: deque[tuple[Stream, float]] = deque()
        self._stalled_s = self._pinged_s = 0.0
        self._opened_s = self._heard_s = 0.0
        self._most_unread = 0  # bytes in the transport for which a client that does not read is cut
        self._swept_id = 0  # last stream that the sweep has seen
        self._retires_s = inf
        self._kept = 0  # bytes that the server counts
        self._roomy = max(DEFAULT_WINDOW, limits.connection_window_bytes) - server.limits.max_head_bytes
        self._goes_on = False  # frames that were read are handled over several turns; nothing is read meanwhile
        self._unwanted_bytes = 0
        self._full_s = 0.0  # since when the budget of the server is used up and nothing is read

    # The transport ---------------------------------------------------------------------------------------------

    def take_over(self, transport: asyncio.Transport, peer: str, peer_name: str, data: bytes) -> None:
        """Begin on a connection whose first bytes are `data`."""
        self.transport = transport
        self.peer, self.peer_name = peer, peer_name
        self._opened_s = self._heard_s = now = monotonic()
        self._retires_s = now + self.limits.max_age_s * (0.9 + 0.2 * random())
        self.due = now + self.server.limits.idle_timeout_s
        self.server.connections.add(self)
        transport.set_protocol(self)  # type: ignore[arg-type]  # it has a protocol's methods, and another base
        self.open()
        self.data_received(data)

    def data_received(self, data: bytes) -> None:
        """Handle what was read; b"" goes on with what an earlier turn of the loop has left."""
        now = monotonic()
        if data:
            before_s = self._heard_s
            self.arrived_s = self._heard_s = now
            self.late_s = 0.0
            if now >= self._pulse.fresh_until and not self._judge_age(data, now, before_s):
                return
        self.receive(data, now)
        if self.out:
            self._write()
        if self._later and not self._goes_on:
            self._goes_on = True
            self.transport.pause_reading()
            self._loop.call_soon(self._go_on)
        if self._rest is not None or self._block or self._kept or self._window + self._credit < self._roomy:
            self._count_kept()

    def _go_on(self) -> None:
        """Handle more of what was read, now that other connections have had their turn."""
        self._goes_on = False
        self.data_received(b"")
        if not self._goes_on:
            self._read_on()

    def _judge_age(self, data: bytes, now: float, before_s: float) -> bool:
        """Correct the arrival time of the data just read, after a pause of the loop.

        Returns False if its sender has left.

        before_s: the time of the read before.
        """
        if (found := arrival(self.transport)) is not None and found.gone:
            self.evict()
            return False
        pulse = self._pulse
        self.late_s = pulse.shared_age_s(found, now, before_s)
        self.arrived_s -= self.late_s
        if self._pauses != pulse.pauses:
            self._pauses = pulse.pauses
            self.excuse(pulse.paused_s)
        if self.late_s > 0.0:
            self.note_resets(data)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        server = self.server
        server.connections.discard(self)
        server.kept_bytes -= self._kept
        self._kept = 0
        self.closed = True
        self.out = []
        self._lingering.clear()
        self._reset_all(CANCEL)
        if server.draining:
            server.note_empty()

    def pause_writing(self) -> None:
        self._stalled_s = monotonic()
        self._most_unread = self.transport.get_write_buffer_size() + UNREAD_BYTES
        self.pause()
        self._count_kept()

    def resume_writing(self) -> None:
        self._stalled_s = 0.0
        super().resume_writing()

    # The byte budget -------------------------------------------------------------------------------------------

    def _count_kept(self) -> None:
        """Put what this connection keeps on the server's budget, and read no further while that is used up."""
        server = self.server
        size = self.kept_bytes
        if self._stalled_s:
            size += self.transport.get_write_buffer_size()
        if size <= server.limits.max_head_bytes or self.closed:
            size = 0
        if size == self._kept:
            return
        server.kept_bytes += size - self._kept
        self._kept = size
        if size and server.kept_bytes > server.limits.max_kept_bytes and not self._full_s:
            self._full_s = monotonic()
            self.transport.pause_reading()

    def _read_on(self) -> None:
        """Read again, unless the budget is used up, or what was read is not handled yet."""
        if not self._full_s and not self._goes_on and not self.transport.is_closing():
            self.transport.resume_reading()

    # Hooks of the codec ----------------------------------------------------------------------------------------

    def _write(self) -> None:
        super()._write()
        if self._stalled_s:
            if self.transport.get_write_buffer_size() > self._most_unread:
                self.transport.abort()
            self._count_kept()

    def _reset_all(self, code: int) -> None:
        for stream in self._end_streams():
            self.on_reset(stream, code)

    def _hang_up(self) -> None:
        """Send what is queued and nothing more, and close.

        Bytes that the client still sends are read and dropped for a moment where the transport can close one direction:
        otherwise the kernel would answer it by a reset, for which some clients drop what they have not read yet.
        """
        if self.out:
            self._write()
        self.closed = True
        self._count_kept()
        if self._full_s:
            self._full_s = 0.0
            self._read_on()
        transport = self.transport
        if transport.is_closing() or not transport.can_write_eof():
            transport.close()
        else:
            with suppress(OSError):  # the client has left
                transport.write_eof()
        unread = transport.get_write_buffer_size()
        self.due = monotonic() + (self.server.limits.write_stall_s if unread else LINGER_S)

    def connection_error(self, code: int, message: str) -> None:
        self._reset_all(code)
        self._hang_up()

    def on_stream_error(self, stream: Stream, code: int, message: str) -> None:
        self.on_reset(stream, code)

    def on_drained(self) -> None:
        """The client knows that we leave, and its last stream has ended."""
        self._hang_up()

    # For subclasses --------------------------------------------------------------------------------------------

    @property
    def departed(self) -> bool:
        """Return whether the client has closed behind unread bytes, according to the kernel (Linux only)."""
        return monotonic() >= self._pulse.fresh_until and closed_behind_unread(self.transport)

    def unwanted(self, size: int) -> None:
        """Count bytes of an unauthenticated sender: the header list of a request that was refused, or of its body.

        After `drain_bytes` / 2 on one connection the client is asked to leave it, and after as many again it is cut.
        """
        self._unwanted_bytes += size
        most = self.server.limits.drain_bytes
        if 2 * self._unwanted_bytes > most:
            self.drain()
            if self._unwanted_bytes > most:
                self._cut("too many requests of an unknown sender")

    def _cut(self, why: str) -> None:
        if not self.closed:
            self._fail(ENHANCE_YOUR_CALM, why)

    def linger(self, stream: Stream) -> None:
        """Reset a stream whose answer is complete and whose client still sends, if it has not ended in LINGER_S.

        At once, it would make some clients drop the answer's trailers, which they have not read yet. `on_reset` is
        not called for that.
        """
        self._lingering.append((stream, monotonic()))

    # For the server --------------------------------------------------------------------------------------------

    @property
    def under_way(self) -> int:
        """Requests that have begun and are not answered."""
        return len(self.streams)

    @property
    def idle(self) -> bool:
        """Return whether no request is under way."""
        return not self.streams

    @property
    def waits_for_head(self) -> bool:
        """Return whether no request of this client is under way."""
        return not self.streams

    def evict(self) -> None:
        """Close this connection to make room for another client."""
        if not self._stalled_s and not self.closed:
            self.goaway(NO_ERROR, self.last_id)  # streams that the client has just opened were not executed
            self._flush()
        self.transport.abort()

    def close_if_idle(self) -> None:
        """Close a connection without a request, as the server drains."""
        if self.streams:
            self.drain()
        elif not self.closed:
            self.goaway(NO_ERROR, self.last_id)
            self._hang_up()

    def sweep(self, now: float) -> None:
        """Judge the time limits."""
        limits = self.server.limits
        if self.closed:
            if now >= self.due:
                self.transport.abort()
            return
        if self.server.draining or now > self._retires_s:
            self.drain()
        if (self._kept or self._full_s or self.unfinished_since) and self._gathers(now):
            return
        lingering = self._lingering
        while lingering and now - lingering[0][1] > LINGER_S:
            self.send_reset(lingering.popleft()[0], NO_ERROR)
        if self.streams or self.last_id != self._swept_id:
            self._swept_id = self.last_id
            self.due = now + limits.idle_timeout_s
        if self._stalled_s and now - self._stalled_s > limits.write_stall_s:
            self.transport.abort()
        elif not self.settings_acknowledged and now - self._opened_s > SETTINGS_S:
            self.transport.abort()
        elif self.streams:
            for stream in self.stalled(now, limits.write_stall_s):
                if not stream.closed:  # the end of another stream may have closed it
                    self.send_reset(stream, CANCEL)
                    self.on_reset(stream, CANCEL)
            if now - self._heard_s > self.limits.keepalive_s:
                if self._pinged_s < self._heard_s:
                    self._pinged_s = now
                    self.ping(_ALIVE)
                elif now - self._pinged_s > self.limits.pong_s:
                    self.transport.abort()
        elif now >= self.due:
            self.close_if_idle()

    def _gathers(self, now: float) -> bool:
        """Judge what is incomplete, unread or not consumed. True: the connection has ended."""
        limits = self.server.limits
        began_s = self.unfinished_since
        if began_s and now - began_s > limits.head_timeout_s:
            self._cut("a header block or frame did not arrive in time")
            return True
        if self._kept:
            self._count_kept()
        if self._full_s:
            if not self._kept or self.server.kept_bytes <= limits.max_kept_bytes:
                self._full_s = 0.0
                self._read_on()
            elif now - self._full_s > limits.write_stall_s:
                self._cut("too many bytes are unread or not taken")
                return True
        return False
