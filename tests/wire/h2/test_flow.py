"""Whatever happens to the windows and the transport on the way, everything that was sent arrives, in order and once."""

from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from oriel_wire.h2.frames import INITIAL_WINDOW_SIZE, settings

from .recorders import TRAILERS, Recorded, Recorder, block, exchange

STREAMS = 2
STEP = st.one_of(
    st.tuples(st.just("send"), st.integers(0, STREAMS - 1), st.sampled_from([0, 1, 600, 1000, 9000])),
    st.tuples(st.sampled_from(["end", "end with data", "trailers"]), st.integers(0, STREAMS - 1), st.just(0)),
    st.tuples(st.just("consume"), st.integers(0, STREAMS - 1), st.integers(1, 70_000)),
    st.tuples(st.just("settings"), st.just(0), st.sampled_from([0, 1, 500, 1000])),
    st.tuples(st.sampled_from(["pause", "resume", "carry"]), st.just(0), st.just(0)),
)


def consume(receiver: Recorder, stream: Recorded, size: int) -> None:
    if size := min(size, stream.held_bytes):
        receiver.consumed(stream, size)


@examples(max_examples=200)
@given(st.lists(STEP, min_size=10, max_size=40), st.sampled_from([65_535, 200_000]))
def test_everything_arrives_once_there_is_room(steps: list[tuple[str, int, int]], connection_bytes: int) -> None:
    sender = Recorder(client=True)
    receiver = Recorder(stream_window_bytes=1000, connection_window_bytes=connection_bytes, consumes=False)
    exchange(sender, receiver)
    calls = [sender.start() for _ in range(STREAMS)]
    exchange(sender, receiver)
    sent = [bytearray() for _ in calls]
    ended: set[int] = set()
    for name, index, size in steps:
        call = calls[index]
        if name == "send" and index not in ended:
            piece = bytes([len(sent[index]) % 251]) * size
            sent[index] += piece
            assert sender.send_data(call, piece, False) is (call.pending is None)
        elif name in ("end", "end with data", "trailers") and index not in ended:
            ended.add(index)
            if name == "trailers":
                sender.send_headers(call, block(TRAILERS), True)
            else:
                piece = b"" if name == "end" else b"last"
                sent[index] += piece
                sender.send_data(call, piece, True)
        elif name == "consume":
            consume(receiver, receiver.seen[call.id], size)
        elif name == "settings":
            sender.receive(settings({INITIAL_WINDOW_SIZE: size}), 0.0)
        elif name == "pause":
            sender.pause()
        elif name == "resume":
            sender.resume()
        elif name == "carry":
            exchange(sender, receiver)
    sender.receive(settings({INITIAL_WINDOW_SIZE: 1000}), 0.0)
    sender.resume()
    for index, call in enumerate(calls):
        if index not in ended:
            sender.send_data(call, b"", True)
    while True:
        exchange(sender, receiver)
        if not any(stream.held_bytes for stream in receiver.seen.values()):
            break
        for stream in receiver.seen.values():
            consume(receiver, stream, stream.held_bytes)
    assert sender.failed is None and receiver.failed is None
    for call, wanted in zip(calls, sent, strict=True):
        stream = receiver.seen[call.id]
        assert bytes(stream.body) == bytes(wanted) and stream.ended and call.pending is None
    assert not sender._waiting


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["", "pause", "resume", "settings"]),
            st.sampled_from([0, 1, 900, 1000, 1001, 20_000, 70_000]),
            st.sampled_from([b"", b"t", b"t" * 20_000, None]),
            st.sampled_from([10, 17_000]),
        ),
        max_size=8,
    )
)
def test_a_whole_message_is_sent_as_its_parts_are(steps: list[tuple[str, int, bytes | None, int]]) -> None:
    at_once, in_parts = Recorder(client=True), Recorder(client=True)
    for number, (event, size, trailers, head_bytes) in enumerate(steps):
        head, data = b"h" * head_bytes, bytes(size)
        for sender in (at_once, in_parts):
            if event == "settings":
                sender.receive(settings({INITIAL_WINDOW_SIZE: 1000 if number % 2 else 100_000}), 0.0)
            elif event:
                getattr(sender, event)()
            stream = Recorded()
            if sender is at_once:
                sender.send_whole(stream, head, data, trailers)
            else:
                sender.send_headers(stream, head, False)
                sender.send_data(stream, data, trailers is None)
                if trailers is not None:
                    sender.send_headers(stream, trailers, True)
        assert b"".join(at_once.out) == b"".join(in_parts.out)
        for name in ("send_window", "useful_bytes", "finished", "writes", "_next_id"):
            assert getattr(at_once, name) == getattr(in_parts, name), name
        found = [
            [(s.id, s.sending, s.send_window, s.pending) for s in each.streams.values()] for each in (at_once, in_parts)
        ]
        assert found[0] == found[1]
