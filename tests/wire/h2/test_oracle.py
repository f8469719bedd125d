"""Random conversations with the `h2` library, in both roles: what one side sends, the other side has received.

Bytes arrive in pieces of any size, windows are small and credit returns late, until all bodies are there.
"""

from collections.abc import Callable
from typing import Any

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from oriel_wire.h2.hpack import Field

from .recorders import ANSWER, REQUEST, TRAILERS, Recorded, block
from .recorders import Recorder as Recording

SMALL = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])


class Recorder(Recording):
    """One that takes windows of single bytes for no flood."""

    def __init__(self, **options: Any) -> None:
        super().__init__(control_burst=1 << 30, reset_burst=1 << 30, **options)


class Library:
    """The library's connection, with what came on each stream."""

    def __init__(self, *, client: bool, window: int, frame_bytes: int) -> None:
        config = h2.config.H2Configuration(client_side=client, header_encoding=False)
        self.connection = h2.connection.H2Connection(config)
        values = {
            h2.settings.SettingCodes.INITIAL_WINDOW_SIZE: window,
            h2.settings.SettingCodes.MAX_FRAME_SIZE: frame_bytes,
        }
        self.connection.local_settings = h2.settings.Settings(client=client, initial_values=values)
        self.connection.initiate_connection()
        self.fields: dict[int, list[Field]] = {}
        self.bodies: dict[int, bytearray] = {}
        self.trailers: dict[int, list[Field]] = {}
        self.ended: set[int] = set()
        self.held: list[tuple[int, int]] = []  # bytes to acknowledge, stream
        self.to_send: dict[int, tuple[bytearray, list[Field] | None]] = {}
        self.resets: dict[int, int] = {}

    def receive(self, data: bytes) -> None:
        for event in self.connection.receive_data(data):
            match event:
                case h2.events.RequestReceived() | h2.events.ResponseReceived():
                    self.fields[event.stream_id] = [(bytes(n), bytes(v)) for n, v in event.headers]
                    self.bodies[event.stream_id] = bytearray()
                case h2.events.DataReceived():
                    self.bodies[event.stream_id] += event.data
                    self.held.append((event.flow_controlled_length, event.stream_id))
                case h2.events.TrailersReceived():
                    self.trailers[event.stream_id] = [(bytes(n), bytes(v)) for n, v in event.headers]
                case h2.events.StreamEnded():
                    self.ended.add(event.stream_id)
                case h2.events.StreamReset():
                    self.resets[event.stream_id] = event.error_code
                    self.to_send.pop(event.stream_id, None)

    def acknowledge(self) -> None:
        held, self.held = self.held, []
        for size, stream_id in held:
            if size:
                self.connection.acknowledge_received_data(size, stream_id)

    def send(self, pad: int | None) -> bool:
        """Send as much as the windows allow. False if nothing could be sent."""
        moved = False
        for stream_id, (body, trailers) in list(self.to_send.items()):
            room = self.connection.local_flow_control_window(stream_id)
            most = min(len(body), room - (pad + 1 if pad is not None else 0), self.connection.max_outbound_frame_size)
            if pad is not None:
                most = min(most, self.connection.max_outbound_frame_size - pad - 1)
            if most <= 0 and body:
                continue
            moved = True
            if body:
                self.connection.send_data(stream_id, bytes(body[:most]), pad_length=pad)
                del body[:most]
            if not body:
                del self.to_send[stream_id]
                if trailers is not None:
                    self.connection.send_headers(stream_id, trailers, end_stream=True)
                else:
                    self.connection.end_stream(stream_id)
        return moved


Draw = Callable[[st.SearchStrategy[Any]], Any]


class Talk:
    """Two sides and the bytes between them, delivered in pieces."""

    def __init__(self, ours: Recording, theirs: Library, draw: Draw) -> None:
        self.ours = ours
        self.theirs = theirs
        self._draw = draw
        self._step = draw(st.sampled_from((1, 3, 9, 10, 50, 1000, 1 << 20)))
        # Padding needs room as well.
        self._pad = draw(st.sampled_from((None, None, 0, 5))) if ours.limits.stream_window_bytes >= 100 else None

    def carry(self) -> bool:
        """Carry what both have to send, in pieces. False if there was nothing."""
        to_theirs, to_ours = self.ours.taken(), self.theirs.connection.data_to_send()
        step = max(self._step, (len(to_theirs) + len(to_ours)) // 500)
        for start in range(0, len(to_theirs), step):
            self.theirs.receive(to_theirs[start : start + step])
        for start in range(0, len(to_ours), step):
            self.ours.receive(to_ours[start : start + step], 0.0)
        assert self.ours.failed is None
        return bool(to_theirs or to_ours)

    def finish(self) -> None:
        """Carry everything and return credit until both are silent."""
        for _ in range(20_000):
            moved = self.theirs.send(self._pad)
            moved |= self.carry()
            if not moved:
                self.theirs.acknowledge()
                for stream in self.ours.seen.values():
                    if stream.held_bytes:
                        self.ours.consumed(stream, stream.held_bytes)
                if not self.ours.out and not self.theirs.connection._data_to_send:
                    return
        raise AssertionError("it does not end")


windows = st.sampled_from((1, 2, 10, 100, 1000, 65535, 100_000))
bodies = st.one_of(
    st.binary(max_size=20), st.integers(0, 1000).map(lambda n: bytes(range(256)) * (n // 256) + b"x" * n)
)
calls = st.lists(st.tuples(bodies, bodies, st.booleans(), st.booleans()), min_size=1, max_size=6)


@SMALL
@given(data=st.data(), window=windows, their_window=windows, calls=calls)
def test_our_server_serves_their_client(data: st.DataObject, window: int, their_window: int, calls: Any) -> None:
    ours = Recorder(consumes=data.draw(st.booleans()), stream_window_bytes=window, connection_window_bytes=65535)
    theirs = Library(client=True, window=their_window, frame_bytes=data.draw(st.sampled_from((16384, 40000))))
    talk = Talk(ours, theirs, data.draw)
    for body, _, trailers, _ in calls:
        stream_id = theirs.connection.get_next_available_stream_id()
        theirs.connection.send_headers(stream_id, REQUEST)
        theirs.to_send[stream_id] = bytearray(body), TRAILERS if trailers else None
        if data.draw(st.booleans()):
            talk.carry()
    talk.finish()
    for (stream_id, stream), (body, answer, trailers, with_trailers) in zip(ours.seen.items(), calls, strict=True):
        assert (stream.fields, bytes(stream.body), stream.ended) == (REQUEST, body, True), stream_id
        assert stream.trailers_received == (TRAILERS if trailers else None)
        ours.send_headers(stream, block(ANSWER), False)
        if data.draw(st.booleans()):
            talk.carry()
        cut = data.draw(st.integers(0, len(answer)))
        ours.send_data(stream, answer[:cut], False)
        ours.send_data(stream, answer[cut:], not with_trailers)
        if with_trailers:
            ours.send_headers(stream, block(TRAILERS), True)
    talk.finish()
    assert not ours.streams and len(theirs.ended) == len(calls)
    for stream_id, (_, answer, _, with_trailers) in zip(ours.seen, calls, strict=True):
        assert theirs.fields[stream_id] == ANSWER and bytes(theirs.bodies[stream_id]) == answer
        assert (stream_id in theirs.trailers) == with_trailers


@SMALL
@given(data=st.data(), window=windows, their_window=windows, calls=calls)
def test_our_client_calls_their_server(data: st.DataObject, window: int, their_window: int, calls: Any) -> None:
    ours = Recorder(
        client=True,
        consumes=data.draw(st.booleans()),
        stream_window_bytes=window,
        connection_window_bytes=data.draw(st.sampled_from((65535, 1 << 20))),
    )
    theirs = Library(client=False, window=their_window, frame_bytes=data.draw(st.sampled_from((16384, 40000))))
    talk = Talk(ours, theirs, data.draw)
    talk.carry()  # the library enforces its window from the begin, not from our acknowledgement
    opened: list[Recorded] = []
    for body, _, trailers, _ in calls:
        stream = ours.start()
        opened.append(stream)
        cut = data.draw(st.integers(0, len(body)))
        ours.send_data(stream, body[:cut], False)
        ours.send_data(stream, body[cut:], not trailers)
        if trailers:
            ours.send_headers(stream, block(TRAILERS), True)
        if data.draw(st.booleans()):
            talk.carry()
    talk.finish()
    for stream, (body, answer, trailers, with_trailers) in zip(opened, calls, strict=True):
        assert theirs.fields[stream.id] == REQUEST and bytes(theirs.bodies[stream.id]) == body
        assert stream.id in theirs.ended and (stream.id in theirs.trailers) == trailers
        theirs.connection.send_headers(stream.id, ANSWER)
        theirs.to_send[stream.id] = bytearray(answer), TRAILERS if with_trailers else None
    talk.finish()
    assert not ours.streams
    for stream, (_, answer, _, with_trailers) in zip(opened, calls, strict=True):
        assert (stream.fields, bytes(stream.body), stream.ended) == (ANSWER, answer, True)
        assert stream.trailers_received == (TRAILERS if with_trailers else None)


@SMALL
@given(data=st.data(), calls=calls)
def test_resets_at_any_time_leave_both_sides_able_to_talk(data: st.DataObject, calls: Any) -> None:
    ours = Recorder(connection_window_bytes=65535)
    theirs = Library(client=True, window=100, frame_bytes=16384)
    talk = Talk(ours, theirs, data.draw)
    for body, answer, _, _ in calls:
        stream_id = theirs.connection.get_next_available_stream_id()
        theirs.connection.send_headers(stream_id, REQUEST)
        theirs.to_send[stream_id] = bytearray(body), None
        theirs.send(None)
        if data.draw(st.booleans()):
            theirs.connection.reset_stream(stream_id, 8)
            theirs.to_send.pop(stream_id, None)
            theirs.held = [each for each in theirs.held if each[1] != stream_id]
        talk.carry()
        stream = ours.seen.get(stream_id)
        if stream is not None and stream.reset is None:
            ours.send_headers(stream, block(ANSWER), False)
            ours.send_data(stream, answer, False)
            if data.draw(st.booleans()):
                ours.send_reset(stream, 8)
            else:
                ours.send_data(stream, b"", True)
    theirs.acknowledge = lambda: _acknowledge_open(theirs)  # type: ignore[method-assign]
    talk.finish()
    assert not ours.streams and ours.failed is None
    assert theirs.connection.outbound_flow_control_window + ours._credit == 65535


def _acknowledge_open(theirs: Library) -> None:
    held, theirs.held = theirs.held, []
    for size, stream_id in held:
        try:
            theirs.connection.acknowledge_received_data(size, stream_id)
        except h2.exceptions.StreamClosedError:
            pass
