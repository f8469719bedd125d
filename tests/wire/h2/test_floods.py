"""Floods end with ENHANCE_YOUR_CALM after a known number of frames, and useful work pays for what a busy peer sends."""

from collections.abc import Callable, Iterator

import pytest

from oriel_wire.h2.frames import (
    ACK,
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    ENHANCE_YOUR_CALM,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PRIORITY,
    REFUSED_STREAM,
    RST_STREAM,
    SETTINGS,
    frame,
    settings,
    window_update,
)

from .recorders import ANSWER, REQUEST, Recorder, block, client, exchange, server
from .violations import DONE, OPEN, request

BURST = 64


def frames_until_failure(made: Recorder, data: Callable[[int], bytes], now: float = 0.0, most: int = 10_000) -> int:
    """How many pieces of data are taken before the connection ends."""
    for count in range(most):
        made.receive(data(count), now)
        made.taken()
        if made.failed is not None:
            assert made.failed[0] == ENHANCE_YOUR_CALM
            return count
    return most


def flooded(**limits: float) -> Recorder:
    made = server(control_burst=BURST + 2, reset_burst=BURST, **limits)  # two were paid by its settings
    made.receive(OPEN, 0.0)
    return made


@pytest.mark.parametrize(
    "data",
    [
        frame(PING, 0, 0, bytes(8)),
        frame(PING, ACK, 0, bytes(8)),
        frame(SETTINGS, 0, 0),
        frame(SETTINGS, ACK, 0),
        frame(PRIORITY, 0, 7, bytes(4) + b"\x10"),
        frame(DATA, 0, 1),
        frame(DATA, PADDED, 1, b"\x02ab"),
        window_update(0, 1),
        window_update(1, 1),
        frame(0x16, 0, 0),
    ],
    ids=["ping", "pong", "settings", "ack", "priority", "empty data", "padding", "window", "stream window", "unknown"],
)
def test_frames_without_content(data: bytes) -> None:
    assert frames_until_failure(flooded(), lambda _: data) == BURST


def test_each_setting_counts() -> None:
    data = settings(dict.fromkeys(range(20, 27), 1))
    assert frames_until_failure(flooded(), lambda _: data) == BURST // 8


def test_time_refills_the_bucket() -> None:
    made = flooded(controls_per_s=10.0)
    ping = frame(PING, 0, 0, bytes(8))
    for _ in range(BURST):
        made.receive(ping, 0.0)
    assert frames_until_failure(made, lambda _: ping, now=1.0) == 10


def test_payload_in_either_direction_pays_for_window_updates() -> None:
    """A client that returns credit for each piece of a long answer is no flood."""
    made = flooded(controls_per_s=0.0)
    stream = made.seen[1]
    made.send_headers(stream, block(ANSWER), False)
    for _ in range(20 * BURST):
        assert made.send_data(stream, bytes(1024), False)
        made.receive(window_update(1, 1024) + window_update(0, 1024), 0.0)
    assert made.failed is None


def test_windows_opened_byte_by_byte_are_a_flood() -> None:
    made = flooded(controls_per_s=0.0)
    made.receive(settings({4: 0}), 0.0)
    made.send_headers(made.seen[1], block(ANSWER), False)
    assert not made.send_data(made.seen[1], bytes(1 << 20), True)
    assert frames_until_failure(made, lambda _: window_update(1, 1)) <= BURST


def opened_and_reset(age_s: float, made: Recorder) -> Iterator[None]:
    for count in range(10_000):
        made.receive(request(REQUEST, stream_id=2 * count + 3), count * 1.0)
        made.receive(frame(RST_STREAM, 0, 2 * count + 3, bytes(4)), count * 1.0 + age_s)
        made.taken()
        yield


@pytest.mark.parametrize("cut", [1, 100, 10**6])
def test_one_turn_begins_a_bounded_number_of_requests(cut: int) -> None:
    """A read of many requests held up the clients of all other connections until they were answered."""
    made = server(requests_per_turn=5, max_streams=50)
    data = b"".join([request(REQUEST, stream_id=2 * i + 1) for i in range(23)]) + frame(PING, 0, 0, bytes(8))
    for start in range(0, len(data), cut):
        made.receive(data[start : start + cut], 0.0)
    turns = 1
    while made.unhandled:
        assert len(made.seen) == 5 * turns or cut < len(data)
        assert made.kept_bytes > 0
        made.receive(b"", 0.0)
        turns += 1
    assert len(made.seen) == 23 and [each.kind for each in made.frames()] == [PING]
    assert turns == 5 or cut < len(data)
    assert made.kept_bytes == 0 and made.failed is None


def test_streams_reset_as_soon_as_they_begin() -> None:
    made = flooded(resets_per_s=0.0)
    pieces = [request(REQUEST, stream_id=2 * i + 3) + frame(RST_STREAM, 0, 2 * i + 3, bytes(4)) for i in range(200)]
    assert frames_until_failure(made, lambda count: pieces[count]) == BURST


def test_calls_cancelled_after_a_while_are_no_flood() -> None:
    made = flooded(resets_per_s=0.0, rapid_reset_s=0.1)
    resets = opened_and_reset(0.2, made)
    for _ in range(4 * BURST):
        next(resets)
    assert made.failed is None


def test_answered_calls_pay_for_cancelled_ones() -> None:
    """A client that hedges cancels half of its calls at once."""
    made = flooded(resets_per_s=0.0)
    for count in range(4 * BURST):
        first, second = 4 * count + 3, 4 * count + 5
        made.receive(request(REQUEST, stream_id=first) + request(REQUEST, stream_id=second), 0.0)
        made.receive(frame(RST_STREAM, 0, second, bytes(4)), 0.0)
        made.send_headers(made.seen[first], block(ANSWER), True)
        made.taken()
    assert made.failed is None


@pytest.mark.parametrize(
    "bad",
    [
        lambda i: window_update(i, 0),
        lambda i: frame(PRIORITY, 0, i, bytes(4)),
        lambda i: frame(DATA, 0, i, b"a"),
        lambda i: frame(HEADERS, END_HEADERS | END_STREAM, i, block([(b":path", b"/")])),
    ],
    ids=["window", "priority", "data", "trailers"],
)
def test_streams_that_we_are_made_to_reset(bad: Callable[[int], bytes]) -> None:
    made = flooded(resets_per_s=0.0)
    pieces = [request(REQUEST, stream_id=2 * i + 3) + bad(2 * i + 3) for i in range(200)]
    assert frames_until_failure(made, lambda count: pieces[count]) == BURST


def test_what_gathered_while_nothing_was_read_is_no_flood_up_to_a_bound() -> None:
    """A client may have reset each of its streams `rapid_reset_s` after its begin: 4 in a tenth of a second."""
    made = flooded(resets_per_s=0.0, controls_per_s=0.0, max_streams=4)
    made.excuse(10.0)
    pieces = [request(REQUEST, stream_id=2 * i + 3) + frame(RST_STREAM, 0, 2 * i + 3, bytes(4)) for i in range(999)]
    assert frames_until_failure(made, lambda count: pieces[count]) == 400 + BURST
    made = flooded(controls_per_s=5.0, max_streams=4)
    for _ in range(2):  # the second pause adds nothing to what the first one allowed
        made.excuse(10.0)
    assert frames_until_failure(made, lambda _: frame(PING, 0, 0, bytes(8))) == 4 * 400 + 50 + BURST + 2


def test_malformed_requests() -> None:
    made = flooded(resets_per_s=0.0)
    malformed = [request([(b":path", b"/")], stream_id=2 * i + 3) for i in range(200)]
    assert frames_until_failure(made, lambda count: malformed[count]) == BURST


def test_streams_above_the_limit_are_refused_and_then_too_many() -> None:
    made = flooded(max_streams=1, resets_per_s=0.0)
    made.taken()
    made.receive(request(REQUEST, stream_id=3), 0.0)
    assert [(each.kind, each.stream_id, each.number) for each in made.frames()] == [(RST_STREAM, 3, REFUSED_STREAM)]
    assert list(made.seen) == [1]
    assert frames_until_failure(made, lambda i: request(REQUEST, stream_id=2 * i + 5)) == BURST - 1


def test_late_frames() -> None:
    made = flooded(controls_per_s=0.0)
    made.send_reset(made.seen[1], 8)
    assert frames_until_failure(made, lambda _: frame(DATA, 0, 1, b"a")) == BURST
    made = flooded(controls_per_s=0.0)
    made.send_reset(made.seen[1], 8)
    assert frames_until_failure(made, lambda _: DONE) == BURST


def test_interim_answers() -> None:
    made = client(control_burst=BURST + 2)
    made.start(end=True)
    data = frame(HEADERS, END_HEADERS, 1, block([(b":status", b"103")]))
    assert frames_until_failure(made, lambda _: data) == BURST


@pytest.mark.parametrize(
    ("size", "count"),
    [(0, 33), (1, 33), (16384, 8), (40000, 4)],
)
def test_continuations_without_end(size: int, count: int) -> None:
    made = flooded()
    made.receive(frame(HEADERS, 0, 3, bytes(16)), 0.0)
    piece = frame(CONTINUATION, 0, 3, bytes(size))
    assert frames_until_failure(made, lambda _: piece) == count - 1
    assert list(made.seen) == [1]


def test_a_header_block_that_is_too_large_concerns_its_stream() -> None:
    """It ended the connection, and with it the calls of others that a proxy had put on it."""
    made = flooded(max_block_bytes=1000)
    assert made.decoder.stateless
    large = b"\xff" * 1001
    made.receive(frame(HEADERS, 5, 3, large) + request(REQUEST, stream_id=5), 0.0)
    made.receive(frame(HEADERS, 0, 7, large) + frame(CONTINUATION, 0, 7, large), 1.0)
    assert made.kept_bytes < 3000 and made.unfinished_since == 1.0
    made.receive(frame(CONTINUATION, 4, 7, large) + request(REQUEST, stream_id=9), 0.0)
    assert made.failed is None and list(made.seen) == [1, 3, 5, 7, 9]
    assert [made.seen[number].fields for number in (3, 7)] == [[], []] and made.seen[9].fields == REQUEST
    assert frames_until_failure(made, lambda _: frame(HEADERS, 5, 11, b"\xff" * 4001)) == 0


def test_a_header_block_that_is_too_large_ends_a_connection_whose_table_depends_on_it() -> None:
    made = server(max_block_bytes=1000)
    made.receive(frame(HEADERS, 5, 1, b"\x82" * 1001), 0.0)
    assert made.failed is not None
    made = server(max_block_bytes=1000)
    made.receive(frame(SETTINGS, 1, 0) + frame(HEADERS, 5, 1, b"\x20" + b"\xff" * 1000), 0.0)
    assert made.failed is None and made.seen[1].fields == [], "it gives its table up with this block"


def test_replies_that_are_never_read() -> None:
    made = flooded(max_unread_replies=10)
    made.pause()
    assert frames_until_failure(made, lambda _: frame(PING, 0, 0, bytes(8))) == 10
    made = flooded(max_unread_replies=10)
    for _ in range(5):
        made.pause()
        for _ in range(10):
            made.receive(frame(PING, 0, 0, bytes(8)), 0.0)
        made.resume()
    assert made.failed is None


def test_streams_that_were_reset_are_not_remembered_for_ever() -> None:
    made = server()
    for i in range(5000):
        made.receive(request(REQUEST, stream_id=2 * i + 1), float(i))
        made.send_reset(made.seen.pop(2 * i + 1), 8)
        made.taken()
    assert made.failed is None and not made.streams
    assert len(made._resets) <= 512


def test_a_stream_that_waited_for_the_connection_is_forgotten_with_its_reset() -> None:
    """The queue for the connection's window kept streams that the client had reset."""
    made = server(reset_burst=10_000)
    made.send_window = 0
    for i in range(500):
        made.receive(request(REQUEST, stream_id=2 * i + 1), 0.0)
        stream = made.seen[2 * i + 1]
        made.send_headers(stream, block(ANSWER), False)
        assert not made.send_data(stream, b"a", True)
        made.receive(frame(RST_STREAM, 0, 2 * i + 1, bytes(4)), 0.0)
    assert not made._waiting and not made.streams


def test_a_busy_connection_is_no_flood() -> None:
    one, other = Recorder(client=True), Recorder()
    for _ in range(5000):
        call = one.start()
        one.send_data(call, b"a" * 100, True)
        one.ping(bytes(8))
        exchange(one, other)
        other.send_headers(other.seen[call.id], block(ANSWER), True)
        exchange(one, other)
    assert one.failed is None and other.failed is None and call.fields == ANSWER
    assert all(each.kind != GOAWAY for each in other.frames())
