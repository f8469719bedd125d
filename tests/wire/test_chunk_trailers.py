"""Trailers of chunked answers: what a server reports of an answer that it could not know at its head."""

from hypothesis import given
from hypothesis import strategies as st

from oriel_wire.h1.chunked import ChunkedDecoder, chunk, last_chunk
from oriel_wire.h1.response import read_cost

NAMES = st.sampled_from(["x-oriel-cost", "X-Oriel-Cost-Us", "x-other"])
VALUES = st.text("abc0123456789=; ", max_size=20).map(str.strip)


@given(st.lists(st.binary(min_size=1, max_size=9), max_size=4), st.lists(st.tuples(NAMES, VALUES)), st.data())
def test_trailers_are_read_however_the_bytes_come(
    pieces: list[bytes], fields: list[tuple[str, str]], data: st.DataObject
) -> None:
    lines = [f"{name}: {value}" for name, value in fields]
    whole = b"".join(map(chunk, pieces)) + last_chunk("".join([f"{line}\r\n" for line in lines])) + b"rest"
    decoder, found = ChunkedDecoder(), b""
    while whole and not decoder.done:
        size = data.draw(st.integers(1, len(whole)))
        found += b"".join(decoder.feed(whole[:size]))
        whole = whole[size:]
    assert (found, decoder.trailers) == (b"".join(pieces), [line.encode() for line in lines])
    assert decoder.rest + whole == b"rest"


def test_the_cost_is_read_and_nothing_else_is_believed() -> None:
    assert read_cost([b"X-Oriel-Cost-Us: 7", b"x-oriel-cost:dev=1;cpu=0;class=cpu", b"x: y"]) == (
        7,
        "dev=1;cpu=0;class=cpu",
    )
    assert read_cost([b"x-oriel-cost-us: -7"]) == read_cost([b"x-oriel-cost-us: 1" + b"0" * 16]) == (-1, "")
    assert read_cost([b"no colon", b"\xff\xfe: \x00"]) == (-1, "")
