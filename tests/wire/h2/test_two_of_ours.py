"""A client and a server connection of ours, talking to one another."""

import pytest

from oriel_wire.h2.frames import (
    CANCEL,
    DATA,
    END_HEADERS,
    END_STREAM,
    FRAME_SIZE_ERROR,
    HEADERS,
    INITIAL_WINDOW_SIZE,
    MAX_ID,
    NO_ERROR,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    settings,
)
from oriel_wire.h2.limits import H2Limits

from .recorders import ANSWER, REQUEST, TRAILERS, Recorder, block, client, exchange, frames_of, server


def pair(**limits: int) -> tuple[Recorder, Recorder]:
    """A client and a server that have exchanged their settings."""
    one, other = Recorder(client=True, **limits), Recorder(**limits)
    exchange(one, other)
    assert one.settings_acknowledged and other.settings_acknowledged
    return one, other


def test_an_interim_answer_comes_before_the_answer() -> None:
    one, other = pair()
    call = one.start(end=True)
    exchange(one, other)
    other.send_headers(other.seen[1], block([(b":status", b"103")]), False)
    other.send_headers(other.seen[1], block(ANSWER), True)
    exchange(one, other)
    assert call.fields == ANSWER and call.ended


def test_trailers_wait_for_data_that_waits() -> None:
    one, other = pair(stream_window_bytes=1000)
    one.consumes = False
    call = one.start(end=True)
    exchange(one, other)
    served = other.seen[call.id]
    other.send_headers(served, block(ANSWER), False)
    assert not other.send_data(served, b"a" * 2500, False)
    other.send_headers(served, block(TRAILERS), True)
    exchange(one, other)
    assert len(call.body) == 1000 and call.trailers_received is None
    assert other.stalled(5.0, 1.0) == [] and other.stalled(6.5, 1.0) == [served] and served.stalled_since == 5.0
    one.consumed(call, 1000)
    exchange(one, other)
    assert len(call.body) == 2000 and served.stalled_since == 0.0
    one.consumed(call, 1000)
    exchange(one, other)
    assert len(call.body) == 2500 and call.trailers_received == TRAILERS and not other.streams
    assert served.rooms == 1  # what waited has left


def test_room_is_reported_once_what_was_kept_is_sent() -> None:
    one, other = pair(stream_window_bytes=1000)
    other.consumes = False
    call = one.start()
    assert not one.send_data(call, b"a" * 1500, False)
    exchange(one, other)
    assert call.rooms == 0
    other.consumed(other.seen[1], 1000)
    exchange(one, other)
    assert call.rooms == 1 and len(other.seen[1].body) == 1500
    assert one.send_data(call, b"", True)
    exchange(one, other)
    assert other.seen[1].ended


def test_a_full_connection_serves_its_streams_in_turns() -> None:
    one, other = pair(connection_window_bytes=65535, stream_window_bytes=65535, send_frame_bytes=1000)
    other.consumes = False
    filler, *calls = [one.start() for _ in range(4)]
    one.send_data(filler, b"f" * 65535, False)
    for call in calls:
        assert not one.send_data(call, b"c" * 3000, False)
    exchange(one, other)
    other.consumed(other.seen[filler.id], 65535)
    other.receive(b"", 0.0)
    one.receive(other.taken(), 0.0)
    order = [each.stream_id for each in one.frames() if each.kind == DATA]
    assert order == [3, 5, 7] * 3 and all(call.rooms == 1 for call in calls)


def test_a_full_transport_keeps_data() -> None:
    one, other = pair()
    call = one.start()
    one.pause()
    assert not one.send_data(call, b"a" * 10, True)
    exchange(one, other)
    assert not other.seen[1].body
    one.resume()
    exchange(one, other)
    assert other.seen[1].body == b"a" * 10 and other.seen[1].ended


def test_data_in_pieces_goes_out_in_few_frames() -> None:
    one, other = pair(connection_window_bytes=65535, stream_window_bytes=5000, send_frame_bytes=2000)
    other.consumes = False
    call = one.start()
    pieces = [b"a" * 300, memoryview(b"b" * 2500), b"c" * 100, b"d" * 3100]
    assert not one.send_pieces(call, pieces, True)
    sent = one.taken()
    assert [len(each.payload) for each in frames_of(sent) if each.kind == DATA] == [2000, 2000, 1000]
    other.receive(sent, 0.0)
    assert not other.seen[1].ended
    other.consumed(other.seen[1], 5000)
    exchange(one, other)
    assert other.seen[1].body == b"".join(pieces) and other.seen[1].ended and call.rooms == 1


def test_data_is_passed_on_before_its_frame_is_whole() -> None:
    whole = frame(DATA, END_STREAM, 1, b"abcdefgh")
    for count, come in ((9, b""), (11, b"ab"), (16, b"abcdefg")):
        made = server(consumes=False)
        made.receive(frame(HEADERS, END_HEADERS, 1, block(REQUEST)) + whole[:count], 0.0)
        call = made.seen[1]
        assert (bytes(call.body), call.ended, call.held_bytes, made.kept_bytes) == (come, False, len(come), len(come))
        made.receive(whole[count:], 0.0)
        assert (bytes(call.body), call.ended, call.held_bytes) == (b"abcdefgh", True, 8)


def test_the_rest_of_a_frame_whose_stream_was_reset_is_dropped_and_its_window_returns() -> None:
    made = server(connection_window_bytes=65535, consumes=False)
    made.receive(frame(HEADERS, END_HEADERS, 1, block(REQUEST)) + frame(DATA, 0, 1, bytes(60_000))[:20_009], 0.0)
    made.send_reset(made.seen[1], CANCEL)
    assert made.kept_bytes == 0
    made.taken()
    made.receive(bytes(40_000) + frame(HEADERS, END_HEADERS, 3, block(REQUEST)), 0.0)
    assert made.failed is None and made.kept_bytes == 0 and len(made.seen[1].body) == 20_000 and 3 in made.streams
    assert [(each.kind, each.stream_id, each.number) for each in made.frames()] == [(WINDOW_UPDATE, 0, 60_000)]


@pytest.mark.parametrize("kind", [HEADERS, SETTINGS, 0x77])
def test_a_frame_that_has_to_be_kept_is_small(kind: int) -> None:
    most = H2Limits().max_kept_frame_bytes
    made = server(max_block_bytes=1 << 20)
    made.receive(frame(kind, 0, int(kind == HEADERS), bytes(most))[:100], 0.0)
    assert made.failed is None
    made = server(max_block_bytes=1 << 20)
    made.receive(frame(kind, 0, int(kind == HEADERS), bytes(most + 6))[:100], 0.0)
    assert made.failed is not None and made.failed[0] == FRAME_SIZE_ERROR


def test_an_end_without_data_needs_neither_window_nor_transport() -> None:
    """It was not queued for the transport if the stream's window was used up, and was never sent."""
    one, other = pair(stream_window_bytes=1000)
    other.consumes = False
    call = one.start()
    assert one.send_data(call, b"a" * 1000, False)
    one.pause()
    assert one.send_data(call, b"", True)
    one.resume()
    exchange(one, other)
    assert other.seen[1].ended and len(other.seen[1].body) == 1000


def test_an_end_without_data_is_sent_while_the_window_is_below_zero() -> None:
    """It was written as a frame of a negative length, which raised."""
    one, other = pair(stream_window_bytes=1000)
    other.consumes = False
    call = one.start()
    assert one.send_data(call, b"a" * 600, False)
    one.receive(settings({INITIAL_WINDOW_SIZE: 100}), 0.0)
    assert call.send_window == -500
    assert one.send_data(call, b"", True)
    exchange(one, other)
    assert other.seen[1].ended and other.failed is None


def test_a_window_is_widened_to_a_known_length() -> None:
    one, other = pair(stream_window_bytes=1000)
    other.consumes = False
    call = one.start()
    exchange(one, other)
    other.widen(other.seen[1], 5000)
    exchange(one, other)
    assert one.send_data(call, b"a" * 5000, True)
    exchange(one, other)
    assert len(other.seen[1].body) == 5000


def test_credit_returns_when_half_a_window_is_consumed() -> None:
    made = server(stream_window_bytes=1000)
    peer = client()
    peer.peer_window = 1000
    call = peer.start()
    peer.send_data(call, b"a" * 900, False)
    made.consumes = False
    made.receive(peer.taken(), 0.0)
    stream = made.seen[1]
    made.consumed(stream, 499)
    assert made.frames() == []
    made.consumed(stream, 1)
    assert [(each.kind, each.stream_id, each.number) for each in made.frames()] == [(WINDOW_UPDATE, 1, 500)]


@pytest.mark.parametrize("by_peer", [False, True])
def test_a_reset_returns_what_was_not_consumed(by_peer: bool) -> None:
    one, other = pair(connection_window_bytes=65535)
    other.consumes = False
    call = one.start()
    one.send_data(call, b"a" * 40000, False)
    exchange(one, other)
    served = other.seen[1]
    if by_peer:
        one.send_reset(call, CANCEL)
    else:
        other.send_reset(served, CANCEL)
    exchange(one, other)
    assert (served if by_peer else call).reset == CANCEL
    assert not one.streams and not other.streams and one.send_window == 65535
    other.consumed(served, 40000)  # too late, and harmless
    assert not other.out


def test_a_drain_loses_no_call_that_was_on_its_way() -> None:
    one, other = pair()
    first = one.start(end=True)
    exchange(one, other)
    other.drain()
    crossing = one.start(end=True)  # before it has seen the drain
    on_its_way = one.taken()
    one.receive(other.taken(), 0.0)
    assert one.goaways == [(MAX_ID, NO_ERROR, b"")] and not one.can_open()
    other.receive(on_its_way, 0.0)
    exchange(one, other)
    assert one.goaways[1:] == [(crossing.id, NO_ERROR, b"")] and other.drained == 0
    for call in (first, crossing):
        other.send_headers(other.seen[call.id], block(ANSWER), True)
    exchange(one, other)
    assert first.fields == crossing.fields == ANSWER and other.drained == 1 and one.failed is None


def test_an_idle_connection_drains_at_once() -> None:
    one, other = pair()
    other.drain()
    exchange(one, other)
    assert other.drained == 1


def test_a_client_opens_as_many_streams_as_its_server_takes() -> None:
    one, _ = pair(max_streams=2)
    calls = [one.start(end=True) for _ in range(2)]
    assert not one.can_open()
    one.send_reset(calls[0], CANCEL)
    assert one.can_open()


def test_a_large_header_block_is_split() -> None:
    one, other = pair(max_frame_bytes=16384)
    fields = [*REQUEST, *[(b"x-%d" % i, b"v" * 100) for i in range(100)]]
    one.peer_frame_bytes = 1000
    one.start(fields, end=True)
    assert len(one.out) == 1
    exchange(one, other)
    assert other.seen[1].fields == fields and other.seen[1].ended


def test_header_lists_that_are_too_large_concern_their_stream() -> None:
    one, other = pair(max_block_bytes=40000)
    call = one.start([*REQUEST, *[(b"x-%d" % i, b"v" * 1000) for i in range(20)]], end=True)
    after = one.start(end=True)
    exchange(one, other)
    assert call.fields == [(b":status", b"431")] and other.failed is None
    assert other.seen[after.id].fields == REQUEST


def test_header_lists_with_too_many_fields_concern_their_stream() -> None:
    one, other = pair(max_fields=7)
    call = one.start([*REQUEST, *[(b"x-%d" % i, b"v") for i in range(3)]], end=True)
    after = one.start([*REQUEST, (b"x-1", b"v"), (b"x-2", b"v")], end=True)
    exchange(one, other)
    assert call.fields == [(b":status", b"431")] and other.failed is None
    assert len(other.seen[after.id].fields or ()) == 7


def test_writes_are_asked_for_once_outside_receive() -> None:
    one, other = pair()
    before = one.writes
    call = one.start()
    one.send_data(call, b"a", True)
    assert one.writes == before + 1
    one.ping(b"12345678")
    assert one.writes == before + 1
    before = other.writes
    exchange(one, other)
    assert other.writes == before


def test_nothing_is_sent_on_a_stream_that_was_reset() -> None:
    one, other = pair()
    call = one.start()
    exchange(one, other)
    other.send_reset(other.seen[1], CANCEL)
    exchange(one, other)
    assert one.send_data(call, b"a", True)
    one.send_headers(call, block(TRAILERS), True)
    one.send_reset(call, CANCEL)
    assert not one.out and [each.kind for each in one.frames()] == []


def test_an_answer_of_a_head_request_has_a_length_and_no_body() -> None:
    one, other = pair()
    call = one.start([(b":method", b"HEAD"), *REQUEST[1:4]], end=True)
    call.head_only = True
    exchange(one, other)
    other.send_headers(other.seen[1], block([(b":status", b"200"), (b"content-length", b"5")]), True)
    exchange(one, other)
    assert call.error is None and call.ended


def test_the_first_block_ends_the_peers_table() -> None:
    made = client()
    made.start()
    (sent,) = made.frames()
    assert sent.kind == HEADERS and sent.payload[:1] == b"\x20"
    made.start()
    (sent,) = made.frames()
    assert sent.payload[:1] != b"\x20"
