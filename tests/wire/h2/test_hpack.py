"""The HPACK codec against RFC 7541, the `hpack` library, and senders that mean harm."""

import gc
import tracemalloc

import hpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_wire.errors import HeaderListTooLarge, HpackError
from oriel_wire.h2.hpack import Decoder, FieldMemo, field_prefix, literal, malformed

from . import blocks
from .blocks import FIELDS, Field, indexed, reference, size_update


def raw(fields: object) -> list[Field]:
    return [(bytes(name), bytes(value)) for name, value in fields]  # type: ignore[attr-defined]


def counted(fields: list[Field]) -> int:
    return sum(len(name) + len(value) + 32 for name, value in fields)


# RFC 7541, appendix C ----------------------------------------------------------------------------------------------

REQUEST = [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"www.example.com")]
SECURE = [(b":method", b"GET"), (b":scheme", b"https"), (b":path", b"/index.html"), (b":authority", b"www.example.com")]
REQUESTS = [REQUEST, [*REQUEST, (b"cache-control", b"no-cache")], [*SECURE, (b"custom-key", b"custom-value")]]
FIRST_DATE, SECOND_DATE = b"Mon, 21 Oct 2013 20:13:21 GMT", b"Mon, 21 Oct 2013 20:13:22 GMT"
COOKIE = b"foo=ASDJKHQKBZXOQWEOPIUAXQWEOIU; max-age=3600; version=1"


def answer(status: bytes, date: bytes) -> list[Field]:
    return [
        (b":status", status),
        (b"cache-control", b"private"),
        (b"date", date),
        (b"location", b"https://www.example.com"),
    ]


ANSWERS = [
    answer(b"302", FIRST_DATE),
    answer(b"307", FIRST_DATE),
    [*answer(b"200", SECOND_DATE), (b"content-encoding", b"gzip"), (b"set-cookie", COOKIE)],
]


@pytest.mark.parametrize(
    ("table", "texts", "lists"),
    [
        ("C.2.1", ["400a637573746f6d2d6b65790d637573746f6d2d686561646572"], [[(b"custom-key", b"custom-header")]]),
        ("C.2.2", ["040c2f73616d706c652f70617468"], [[(b":path", b"/sample/path")]]),
        ("C.2.3", ["100870617373776f726406736563726574"], [[(b"password", b"secret")]]),
        ("C.2.4", ["82"], [[(b":method", b"GET")]]),
        (
            "C.3",
            [
                "828684410f7777772e6578616d706c652e636f6d",
                "828684be58086e6f2d6361636865",
                "828785bf400a637573746f6d2d6b65790c637573746f6d2d76616c7565",
            ],
            REQUESTS,
        ),
        (
            "C.4",
            [
                "828684418cf1e3c2e5f23a6ba0ab90f4ff",
                "828684be5886a8eb10649cbf",
                "828785bf408825a849e95ba97d7f8925a849e95bb8e8b4bf",
            ],
            REQUESTS,
        ),
        (
            "C.5",
            [
                "4803333032580770726976617465611d4d6f6e2c203231204f637420323031332032303a31333a323120474d546e17"
                "68747470733a2f2f7777772e6578616d706c652e636f6d",
                "4803333037c1c0bf",
                "88c1611d4d6f6e2c203231204f637420323031332032303a31333a323220474d54c05a04677a69707738666f6f3d41"
                "53444a4b48514b425a584f5157454f50495541585157454f49553b206d61782d6167653d333630303b207665727369"
                "6f6e3d31",
            ],
            ANSWERS,
        ),
        (
            "C.6",
            [
                "488264025885aec3771a4b6196d07abe941054d444a8200595040b8166e082a62d1bff6e919d29ad171863c78f0b97"
                "c8e9ae82ae43d3",
                "4883640effc1c0bf",
                "88c16196d07abe941054d444a8200595040b8166e084a62d1bffc05a839bd9ab77ad94e7821dd7f2e6c7b335dfdfcd"
                "5b3960d5af27087f3672c1ab270fb5291f9587316065c003ed4ee5b1063d5007",
            ],
            ANSWERS,
        ),
    ],
)  # fmt: skip
def test_the_examples_of_the_rfc(table: str, texts: list[str], lists: list[list[Field]]) -> None:
    decoder = Decoder(256 if table in ("C.5", "C.6") else 4096)
    for text, fields in zip(texts, lists, strict=True):
        assert decoder.decode(bytes.fromhex(text)) == fields
    if lists is ANSWERS:
        assert decoder.table() == [ANSWERS[2][5], ANSWERS[2][4], ANSWERS[2][2]]
    if lists is REQUESTS:
        assert decoder.table() == [REQUESTS[2][4], REQUESTS[1][4], REQUESTS[0][3]]


# The library as a judge --------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from([None, 0, 60, 200, 4096]), FIELDS, st.booleans()), max_size=8))
def test_what_the_library_encodes_comes_back(sequence: list[tuple[int | None, list[Field], bool]]) -> None:
    """Blocks with evictions, size updates, references and both codes of strings; the memo knows the earlier ones."""
    encoder, decoder = hpack.Encoder(), Decoder()
    for size, fields, compressed in sequence:
        if size is not None:
            encoder.header_table_size = size
        never = [hpack.NeverIndexedHeaderTuple(*each) if each[0] == b"cookie" else each for each in fields]
        assert decoder.decode(encoder.encode(never, huffman=compressed)) == fields
        assert decoder.table() == raw(encoder.header_table.dynamic_entries)
        assert (decoder.malformed == "") == all(malformed(*each) == "" for each in fields)
        decoder.memo.keep(decoder.fresh)


@given(st.lists(FIELDS, max_size=4))
def test_what_we_encode_the_library_decodes(lists: list[list[Field]]) -> None:
    decoder = hpack.Decoder()
    for fields in lists:
        assert raw(decoder.decode(b"".join(literal(*field) for field in fields), raw=True)) == fields
    assert not decoder.header_table.dynamic_entries


# Errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("block", "why"),
    [
        (b"\x80", "in no table"),
        (reference(62), "in no table"),
        (blocks.literal(62, b"v"), "in no table"),
        (b"\xff\x80\x80\x80\x80\x80\x00", "five further bytes"),
        (b"\x00\x7f\xff\xff\xff\xff\xff\x01", "five further bytes"),
        (b"\x82" + size_update(0), "follows a header field"),
        (size_update(4097), "exceeds what was allowed"),
        (b"\x00\x01a\x81\x18", "padding"),
        (b"\x00\x81\x18\x01a", "padding"),
        (b"\x00\x01a\x84\xff\xff\xff\xff", "EOS"),
        (b"\x00\x01a\xff\x05" + b"\xff" * 132, "EOS"),
    ],
)
def test_a_block_that_ends_the_connection(block: bytes, why: str) -> None:
    with pytest.raises(HpackError, match=why):
        Decoder().decode(block)


@pytest.mark.parametrize("kind", [0x00, 0x10, 0x40])
@pytest.mark.parametrize("name", [b"x-name", b"n" * 200, 4, 40])
@pytest.mark.parametrize("value", [b"", b"some value", b"v" * 200])
def test_a_block_that_is_cut(kind: int, name: bytes | int, value: bytes) -> None:
    """At every place, whether or not the memo knows the field."""
    whole = blocks.literal(name, value, kind=kind)
    memo = FieldMemo()
    first = Decoder(memo=memo)
    fields = first.decode(whole)
    memo.keep(first.fresh)
    assert Decoder(memo=memo).decode(whole) == fields
    for end in range(1, len(whole)):
        for known in (memo, None):
            with pytest.raises(HpackError, match="ends inside"):
                Decoder(memo=known).decode(whole[:end])


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        (b"content-type", b"application/grpc", True),
        (b"x-a", b"", True),
        (b"x-a", b"a\tb \xff", True),
        (b"te", b"trailers", True),
        (b"te", b"gzip", False),
        (b"connection", b"close", False),
        (b"transfer-encoding", b"", False),
        (b":unknown", b"a", False),
        (b"", b"a", False),
        (b"X-A", b"a", False),
        (b"x a", b"a", False),
        (b"x-a\n", b"a", False),
        (b"x-a", b"a\r\nb", False),
        (b"x-a", b"a\0", False),
        (b"x-a", b"\x7f", False),
        (b"x-a", b" a", False),
        (b"x-a", b"a\t", False),
    ],
)
def test_a_field_that_http2_does_not_allow_concerns_its_stream(name: bytes, value: bytes, allowed: bool) -> None:
    decoder = Decoder()
    for block in (blocks.literal(name, value), blocks.literal(name, value, kind=0x10), indexed(name, value), b"\xbe"):
        assert decoder.decode(block + b"\x88") == [(name, value), (b":status", b"200")]
        assert decoder.malformed == malformed(name, value)
        assert (decoder.malformed == "") == allowed
        decoder.memo.keep(decoder.fresh)
    assert decoder.decode(b"\x88") and decoder.malformed == ""


def test_an_entry_of_the_static_table_may_be_malformed() -> None:
    decoder = Decoder()
    assert decoder.decode(b"\x82\xb9\x82")[1] == (b"transfer-encoding", b"") and decoder.malformed


# The dynamic table -------------------------------------------------------------------------------------------------


def test_a_peer_that_never_shrinks_its_table_cannot_refer_to_what_we_no_longer_keep() -> None:
    """nginx enters fields of its first request into the table, and sends no size update on a connection it keeps."""
    decoder = Decoder()
    decoder.decode(indexed(b"a", b"b") + indexed(b"c", b"d"))
    decoder.allow_table(40)
    assert decoder.decode(b"\xbe") == [(b"c", b"d")]
    with pytest.raises(HpackError, match="in no table"):
        decoder.decode(b"\xbf")
    decoder.allow_table(0)
    assert decoder.decode(indexed(b"e", b"f")) == [(b"e", b"f")] and decoder.table() == []
    with pytest.raises(HpackError, match="in no table"):
        decoder.decode(b"\xbe")


def test_a_peer_that_shrinks_its_table_in_time() -> None:
    decoder = Decoder()
    decoder.decode(indexed(b"a", b"b") + indexed(b"c", b"d"))
    decoder.allow_table(40)
    assert decoder.decode(size_update(34) + b"\xbe") == [(b"c", b"d")]
    with pytest.raises(HpackError, match="exceeds"):
        decoder.decode(size_update(41))


def test_a_table_of_size_0_takes_literals_with_indexing_and_stays_empty() -> None:
    """gRPC's C core goes on sending them; and it may leave the size update out while the table is empty."""
    decoder = Decoder()
    decoder.allow_table(0)
    block = indexed(b"te", b"trailers") + indexed(31, b"application/grpc")
    assert (
        decoder.decode(block) == decoder.decode(block) == [(b"te", b"trailers"), (b"content-type", b"application/grpc")]
    )
    assert decoder.table() == []
    with pytest.raises(HpackError, match="in no table"):
        decoder.decode(b"\xbe")


def test_the_table_may_shrink_and_grow_between_two_blocks() -> None:
    decoder = Decoder()
    decoder.decode(indexed(b"a", b"b"))
    assert decoder.decode(size_update(0) + size_update(4096) + indexed(b"c", b"d")) == [(b"c", b"d")]
    assert decoder.table() == [(b"c", b"d")]


def test_a_name_may_come_from_the_entry_that_its_field_evicts() -> None:
    decoder = Decoder(40)
    assert decoder.decode(indexed(b"n", b"v") + indexed(62, b"longer")) == [(b"n", b"v"), (b"n", b"longer")]
    assert decoder.table() == [(b"n", b"longer")]


# Lists that are too large ------------------------------------------------------------------------------------------


def test_a_list_may_be_as_large_as_its_bound_and_no_larger() -> None:
    field = (b"x-name", b"v" * 100)
    for count, bound in ((1, 138), (5, 690)):
        for make in (blocks.literal, indexed):
            block = make(*field) * count
            assert Decoder(max_list_bytes=bound).decode(block) == [field] * count
            with pytest.raises(HeaderListTooLarge):
                Decoder(max_list_bytes=bound - 1).decode(block)
        block = indexed(*field) + b"\xbe" * (count - 1)
        assert Decoder(max_list_bytes=bound).decode(block) == [field] * count
        with pytest.raises(HeaderListTooLarge):
            Decoder(max_list_bytes=bound - 1).decode(block)


@given(st.lists(FIELDS, min_size=1, max_size=5), st.integers(0, 600), st.integers(0, 8))
def test_the_table_stays_in_step_past_lists_that_are_too_large(
    lists: list[list[Field]], most_bytes: int, most: int
) -> None:
    encoder, decoder = hpack.Encoder(), Decoder(max_list_bytes=most_bytes, max_fields=most, stop_factor=0)
    encoder.header_table_size = 300
    for fields in lists:
        block = encoder.encode(fields)
        if len(fields) > most or counted(fields) > most_bytes:
            with pytest.raises(HeaderListTooLarge):
                decoder.decode(block)
            assert decoder.fresh == []
        else:
            assert decoder.decode(block) == fields
        assert decoder.table() == raw(encoder.header_table.dynamic_entries)


def test_a_malformed_field_of_a_skipped_list_is_seen_when_it_is_named_again() -> None:
    decoder = Decoder(max_list_bytes=100)
    with pytest.raises(HeaderListTooLarge):
        decoder.decode(blocks.literal(b"a", b"b" * 200) + indexed(b"A", b"b"))
    assert decoder.decode(b"\xbe") == [(b"A", b"b")] and decoder.malformed


BOMBS = {
    "references": [indexed(b"x", b"v" * 3900), b"\xbe" * 12_000],
    "names": [indexed(b"n" * 3900, b"v"), blocks.literal(62, b"") * 6_000],
    "static entries": [b"", b"\x90" * 16_000],
    "insertions": [b"", indexed(b"x", b"v" * 120) * 200],
    "names inserted again": [indexed(b"n" * 3900, b"v"), indexed(62, b"") * 6_000],
    "one string": [b"", blocks.literal(b"x", b"v" * 30_000)],
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_header_bomb_makes_no_fields_and_ends_the_connection_where_a_stop_is_set(bomb: str) -> None:
    planted, block = BOMBS[bomb]
    decoder, stopping = Decoder(stop_factor=0), Decoder(max_list_bytes=4096, stop_factor=4)
    judge = hpack.Decoder(max_header_list_size=1 << 30)
    for each in (decoder, stopping):
        each.decode(planted)
    judge.decode(planted, raw=True)
    gc.collect()
    tracemalloc.start()
    try:
        with pytest.raises(HeaderListTooLarge):
            decoder.decode(block)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 128 * 1024, "16 KiB of list with their 128 fields, twice for the memo, and the table"
    with pytest.raises(HpackError, match="than a connection may send"):
        stopping.decode(block)
    judge.decode(block, raw=True)
    assert decoder.table() == raw(judge.header_table.dynamic_entries)
    assert decoder.decode(b"\x82") == [(b":method", b"GET")]


# The memo ----------------------------------------------------------------------------------------------------------


def test_what_differs_per_request_and_credentials_are_not_kept() -> None:
    names = [b"authorization", b"x-api-key", b"x_api_key", b"cookie", b"traceparent", b"tracestate", b"x-request-id"]
    fields = [(name, b"secret") for name in [*names, b"grpc-timeout", b"content-length"]]
    fields += [(b":path", b"/" + b"p" * 100), (b":path", b"/a?b=c"), (b"x-long", b"v" * 127)]
    decoder = Decoder()
    assert decoder.decode(b"".join(literal(*each) for each in fields)) == fields
    assert decoder.fresh == [] and decoder.malformed == ""
    assert decoder.decode(b"\x10\x0cx-own-secret\x06secret") and decoder.fresh == []
    decoder.decode(literal(b":path", b"/v2/models/m/infer") + literal(b"te", b"trailers"))
    assert [field for _, field in decoder.fresh] == [(b":path", b"/v2/models/m/infer"), (b"te", b"trailers")]


def test_connections_share_known_fields_once_they_are_kept() -> None:
    memo = FieldMemo()
    one, other = Decoder(memo=memo), Decoder(memo=memo)
    block = literal(b"te", b"trailers") + indexed(b"x-a", b"b")
    fields, fresh = one.decode(block), one.fresh
    assert len(fresh) == 2 and other.decode(block) == fields and other.fresh == fresh
    memo.keep(fresh)
    assert other.decode(block) == fields and other.fresh == []
    assert other.table() == [(b"x-a", b"b")] * 2


def test_the_memo_is_bounded() -> None:
    memo = FieldMemo(4)
    decoder = Decoder(memo=memo)
    for number in range(50):
        decoder.decode(literal(b"te", b"trailers") + literal(b"x-a", b"%d" % number))
        memo.keep(decoder.fresh)
        assert 0 < len(memo.fields) <= 4


# The encoder -------------------------------------------------------------------------------------------------------


def test_the_representations_that_are_chosen() -> None:
    assert literal(b":path", b"/a") == b"\x04\x02/a"
    assert literal(b"user-agent", b"u") == b"\x0f\x2b\x01u"
    assert literal(b"x-a", b"v" * 127) == b"\x00\x03x-a\x7f\x00" + b"v" * 127
    assert field_prefix(b"traceparent") == b"\x00\x0btraceparent"
    assert field_prefix(b"x-a") + b"\x01b" == literal(b"x-a", b"b")
