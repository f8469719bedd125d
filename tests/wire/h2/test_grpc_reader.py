"""Messages out of the DATA of a call: however it is cut, bounded, and in memory of their own length."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_wire.errors import BadMessage, TooLarge
from oriel_wire.h2 import grpc_reader
from oriel_wire.h2.grpc import PREFIX_BYTES, prefix
from oriel_wire.h2.grpc_reader import MessageReader

MESSAGES = st.lists(st.tuples(st.booleans(), st.binary(max_size=60)), max_size=8)


def written(messages: list[tuple[bool, bytes]]) -> bytes:
    return b"".join(bytes([compressed]) + prefix(len(data))[1:] + data for compressed, data in messages)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    ends = sorted({cut % (len(data) + 1) for cut in cuts} | {len(data)})
    return [data[start:end] for start, end in zip([0, *ends], ends, strict=False)]


@given(MESSAGES, st.lists(st.integers(min_value=0, max_value=600), max_size=12), st.integers(1, 64), st.booleans())
def test_messages_are_the_same_however_they_are_cut(
    messages: list[tuple[bool, bytes]], cuts: list[int], first: int, views: bool
) -> None:
    data = written(messages)
    found: list[tuple[bool, bytes]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grpc_reader, "FIRST_BYTES", first)
        reader = MessageReader(60)
        for piece in pieces(data, cuts):
            reader.feed(memoryview(piece) if views else piece)
            while (message := reader.next()) is not None:
                found.append((reader.compressed, bytes(message)))
    assert found == messages
    assert reader.empty and reader.taken_bytes == len(data) and not reader.missing_bytes


@given(st.binary(max_size=200), st.lists(st.integers(min_value=0, max_value=200), max_size=6))
def test_what_is_read_is_never_more_than_what_came(data: bytes, cuts: list[int]) -> None:
    reader = MessageReader(1 << 20)
    came = 0
    try:
        for piece in pieces(data, cuts):
            reader.feed(piece)
            came += len(piece)
            while reader.next() is not None:
                pass
            assert reader.taken_bytes <= came
    except BadMessage:
        return


def test_a_message_that_comes_in_pieces_has_memory_of_its_length() -> None:
    reader = MessageReader(100)
    reader.feed(prefix(10) + b"01234")
    assert reader.next() is None and reader.missing_bytes == 5
    reader.feed(b"56789rest")
    message = reader.next()
    assert isinstance(message, memoryview) and message.readonly
    assert bytes(message) == b"0123456789" and len(memoryview(message.obj)) == 10
    assert not reader.empty


def test_a_message_that_comes_in_one_piece_is_a_part_of_it() -> None:
    data = prefix(4) + b"1234" + prefix(2) + b"56"
    reader = MessageReader(100)
    reader.feed(data)
    first, second = reader.next(), reader.next()
    assert isinstance(first, memoryview) and isinstance(second, memoryview)
    assert first.obj is data and second.obj is data


def test_a_prefix_alone_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_reader, "FIRST_BYTES", 8)
    reader = MessageReader(1 << 30)
    reader.feed(prefix(1 << 30) + b"1")
    assert reader.next() is None
    assert reader._memory is not None and len(reader._memory) == 8


def test_a_message_beyond_the_limit_is_refused_by_its_prefix() -> None:
    reader = MessageReader(10)
    reader.feed(prefix(10) + b"1234567890" + prefix(11))
    assert reader.next() == b"1234567890"
    with pytest.raises(TooLarge, match=r"11 vs\. 10"):
        reader.next()


def test_a_prefix_with_another_flag_is_none() -> None:
    reader = MessageReader(10)
    reader.feed(b"\2" + bytes(PREFIX_BYTES - 1))
    with pytest.raises(BadMessage):
        reader.next()
