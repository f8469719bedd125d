"""Every violation of the tables in `violations` is answered with its error, however its bytes are split."""

import pytest

from oriel_wire.h2.frames import (
    CODES,
    DATA,
    GOAWAY,
    HEADERS,
    PADDED,
    PING,
    PREFACE,
    PROTOCOL_ERROR,
    RST_STREAM,
    SETTINGS,
    SETTINGS_ACK,
    STREAM_CLOSED,
    WINDOW_UPDATE,
    frame,
    window_update,
)

from .recorders import ANSWER, REQUEST, Recorder, block, client, frames_of, server
from .violations import DONE, OF_SERVERS, ON_CONNECTION, ON_STREAM, OPEN, Violation, request


def judge(made: Recorder, violation: Violation, step: int) -> None:
    sent = b""
    for start in range(0, len(violation.data), step):
        made.receive(violation.data[start : start + step], 0.0)
        sent += made.taken()
    answers = [each for each in frames_of(sent) if each.kind in (GOAWAY, RST_STREAM)]
    assert len(answers) == 1, answers
    (answer,) = answers
    if violation.stream_id:
        assert (answer.kind, answer.stream_id, CODES[answer.number]) == (
            RST_STREAM,
            violation.stream_id,
            CODES[violation.code],
        )
        assert made.failed is None and violation.stream_id not in made.streams
        stream = made.seen.get(violation.stream_id)
        assert stream is None or stream.reset is not None or (stream.error and stream.error[0] == violation.code)
    else:
        assert answer.kind == GOAWAY and CODES[int.from_bytes(answer.payload[4:8], "big")] == CODES[violation.code]
        assert made.failed is not None and made.failed[0] == violation.code and made.closed
        made.receive(OPEN, 0.0)
        assert not made.out


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
@pytest.mark.parametrize("violation", [*ON_CONNECTION, *ON_STREAM], ids=lambda each: each.name)
def test_of_a_client(violation: Violation, step: int) -> None:
    judge(server(consumes=False), violation, max(step, len(violation.data) // 1000))


@pytest.mark.parametrize("step", [1, 7, 1 << 20])
@pytest.mark.parametrize("violation", OF_SERVERS, ids=lambda each: each.name)
def test_of_a_server(violation: Violation, step: int) -> None:
    made = client()
    call = made.start()
    made.taken()
    judge(made, violation, step)
    assert made.failed is not None or call.closed


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        PREFACE[:-1] + b"x",
        PREFACE + frame(PING, 0, 0, bytes(8)),
        PREFACE + SETTINGS_ACK,
        PREFACE + OPEN,
    ],
)
def test_a_connection_begins_with_the_preface_and_settings(data: bytes) -> None:
    for step in (1, len(data)):
        made = Recorder()
        for start in range(0, len(data), step):
            made.receive(data[start : start + step], 0.0)
        assert made.failed is not None and made.failed[0] == PROTOCOL_ERROR


def test_a_server_begins_with_settings() -> None:
    made = Recorder(client=True)
    made.receive(frame(PING, 0, 0, bytes(8)), 0.0)
    assert made.failed is not None and made.failed[0] == PROTOCOL_ERROR


def test_more_data_than_the_connections_window_ends_it() -> None:
    made = server(connection_window_bytes=65535, stream_window_bytes=1 << 20)
    made.consumes = False
    made.receive(OPEN + frame(DATA, 0, 1, bytes(65535)), 0.0)
    assert made.failed is None
    made.receive(frame(DATA, 0, 1, b"a"), 0.0)
    assert made.failed is not None and made.failed[0] == 3


def test_padding_counts_on_the_windows_and_returns_at_once() -> None:
    made = server(stream_window_bytes=100, connection_window_bytes=65535)
    made.consumes = False
    made.receive(OPEN + frame(DATA, PADDED, 1, b"\x3cab" + bytes(60)), 0.0)
    assert bytes(made.seen[1].body) == b"ab" and made.seen[1].held_bytes == 2
    assert [(each.kind, each.stream_id, each.number) for each in made.frames()] == [(WINDOW_UPDATE, 1, 61)]


def test_frames_of_a_stream_that_is_gone_and_that_may_be_late_are_ignored() -> None:
    made = server()
    made.receive(DONE, 0.0)
    made.send_headers(made.seen[1], block(ANSWER), True)
    made.taken()
    made.receive(window_update(1, 0) + window_update(1, 5) + frame(RST_STREAM, 0, 1, bytes(4)), 0.0)
    assert made.frames() == [] and made.failed is None


def test_headers_on_a_stream_that_ended_end_the_connection() -> None:
    made = server()
    made.receive(DONE, 0.0)
    made.send_headers(made.seen[1], block(ANSWER), True)
    made.receive(DONE, 0.0)
    assert made.failed is not None and made.failed[0] == STREAM_CLOSED


def test_unknown_frames_settings_and_flags_are_ignored() -> None:
    made = server()
    made.receive(frame(0x16, 0xFF, 7, b"abc") + frame(SETTINGS, 0xFE, 0, b"\xff\xffabcd"), 0.0)
    made.receive(frame(HEADERS, 0x05 | 0xD2, 1, block(REQUEST)), 0.0)
    assert made.failed is None and made.seen[1].fields == REQUEST


def test_the_reserved_bits_are_ignored() -> None:
    made = server()
    made.receive(frame(HEADERS, 5, 0x80000001, block(REQUEST)) + frame(WINDOW_UPDATE, 0, 1 << 31, b"\x80\0\0\1"), 0.0)
    assert made.failed is None and made.seen[1].fields == REQUEST and made.send_window == 65536


def test_a_dynamic_table_stays_in_step_over_streams_that_are_swallowed() -> None:
    """A block of a refused or a reset stream was skipped, and the next reference to the table found nothing."""
    made = Recorder(max_streams=1)
    made.receive(PREFACE + frame(SETTINGS, 0, 0) + OPEN, 0.0)
    made.send_reset(made.seen[1], 8)
    indexed = b"\x40\x01a\x01b"  # with incremental indexing
    made.receive(frame(HEADERS, 5, 1, indexed), 0.0)
    made.receive(frame(HEADERS, 5, 3, block(REQUEST) + b"\xbe"), 0.0)
    assert made.failed is None and made.seen[3].fields == [*REQUEST, (b"a", b"b")]
    made.send_reset(made.seen[3], 8)
    # The block that begins with the update to a table of 0 is swallowed as well.
    made.receive(SETTINGS_ACK + frame(HEADERS, 5, 3, b"\x20"), 0.0)
    made.receive(request(REQUEST, stream_id=5), 0.0)
    assert made.failed is None and made.seen[5].fields == REQUEST
