import json
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from types import coroutine
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_logic.bodies import lines as module
from oriel_logic.bodies.decoding import pairs
from oriel_logic.bodies.json import decode
from oriel_logic.bodies.lines import MAX_LINE_BYTES, error_event, event, items, line, lines
from oriel_logic.errors import InputTooLarge, Refused

from ...steps import linear

VALUES = st.lists(
    st.recursive(st.integers() | st.text(max_size=8), lambda inner: st.lists(inner, max_size=3)), max_size=6
)


async def cut(body: bytes, size: int = 1 << 20) -> AsyncIterator[bytes]:
    for start in range(0, len(body), size):
        yield body[start : start + size]


async def all_of(body: bytes, *, size: int = 1 << 20, events: bool = False, limit: int = 1 << 20) -> list[Any]:
    return [each async for each in items(cut(body, size), json.loads, events=events, limit_bytes=limit)]


@given(VALUES, st.integers(1, 9), st.booleans())
async def test_however_it_is_cut_the_values_are_the_same(values: list[Any], size: int, events: bool) -> None:
    frame = event if events else line
    body = b"".join(frame(json.dumps(each).encode()) for each in values)
    assert await all_of(body, size=size, events=events) == values


@given(st.text(max_size=30))
async def test_text_of_several_lines_is_one_event(text: str) -> None:
    frame = event(text.encode())
    assert frame.endswith(b"\n\n") and b"\n\n" not in frame[:-2] + b"x"
    wanted = text.replace("\r\n", "\n").replace("\r", "\n")
    found = [each async for each in module.texts_of_events(lines(cut(frame), limit_bytes=1000))]
    assert found == [wanted.encode()]


async def test_blank_lines_comments_and_other_fields_are_skipped() -> None:
    assert await all_of(b'\n1\r\n  \n{"a":2}') == [1, {"a": 2}]
    assert await all_of(b": hi\n\nid: 7\nevent: x\ndata: 1\n\ndata:[2,\ndata:3]\n\ndata: 9", events=True) == [1, [2, 3]]


@given(VALUES, st.integers(1, 9), st.lists(st.sampled_from(["\n", "\r\n", "\r"]), min_size=1), st.booleans())
async def test_events_may_end_their_lines_in_every_way_of_the_standard(
    values: list[Any], size: int, ends: list[str], has_mark: bool
) -> None:
    text = "\ufeff" if has_mark else ""
    for place, value in enumerate(values):
        end = ends[place % len(ends)]
        text += f"data: {json.dumps(value)}{end}{end}"
    assert await all_of(text.encode(), size=size, events=True) == values


async def test_a_line_and_all_of_them_are_bounded() -> None:
    text, much = "x" * (MAX_LINE_BYTES - 2), 8 * MAX_LINE_BYTES
    assert await all_of(f'"{text}"\n'.encode() * 3, limit=much) == [text] * 3
    for body in (f'"{text}x"\n'.encode(), b"x" * (MAX_LINE_BYTES + 1)):
        with pytest.raises(InputTooLarge, match="a line of a stream"):
            await all_of(body, limit=much)
    with pytest.raises(InputTooLarge, match="a line of a stream"):
        await all_of(f"data: {text[::2]}\n".encode() * 3, events=True, limit=much)
    with pytest.raises(InputTooLarge, match="larger than the 5 bytes"):
        await all_of(b"1\n1\n1\n", limit=5)


async def test_a_bad_item_is_named_by_its_place() -> None:
    class Item(msgspec.Struct):
        price: float

    decoder = msgspec.json.Decoder(Item)
    body = b'{"price": 1}\n{"price": "x"}\n'
    found = items(cut(body), lambda text: decode(text, decoder), events=False, limit_bytes=1000)
    assert (await anext(found)).price == 1.0
    with pytest.raises(Refused, match="item 1 of the stream: Expected `float`, got `str`") as refused:
        await anext(found)
    assert refused.value.field == "$[1].price"


def test_an_error_is_an_event_of_its_own_name() -> None:
    assert error_event(b'{"error":{}}') == b'event: error\ndata: {"error":{}}\n\n'


@pytest.mark.parametrize("events", [False, True])
@pytest.mark.parametrize("begin", [b"", b"data: ", b"data: x\n", b"\r"])
def test_a_line_that_never_ends_takes_steps_by_its_bytes(events: bool, begin: bytes) -> None:
    """All of it was copied and searched again with each piece."""

    @coroutine
    def pause() -> Iterator[None]:
        yield

    async def pieces(body: bytes) -> AsyncIterator[bytes]:
        for at in range(len(body)):
            await pause()
            yield body[at : at + 1]

    async def read(size: int) -> None:
        async for _ in lines(pieces(begin + b"x" * size), limit_bytes=1 << 20, events=events):
            pass

    def work(size: int) -> None:
        reading = read(size)
        with suppress(StopIteration):
            while True:
                reading.send(None)

    linear(work, (1000, 2000, 4000), copies=True)


@pytest.mark.parametrize("text", ["a=1&", "a=1&b=2&", "%41", "a", "&", "="])
def test_a_query_takes_steps_by_its_length(text: str) -> None:
    def work(size: int) -> None:
        with suppress(Refused):  # of too many fields
            pairs(text * size)

    linear(work, (200, 400, 800))
