"""Header blocks that are recognised by their shape, by the judgement of the decoder."""

import hpack
from hypothesis import given
from hypothesis import strategies as st

from oriel_wire.errors import HpackError
from oriel_wire.h2.block_shapes import BlockShape, learn
from oriel_wire.h2.connection import H2Connection
from oriel_wire.h2.frames import (
    END_HEADERS,
    END_STREAM,
    HEADERS,
    PREFACE,
    PROTOCOL_ERROR,
    RST_STREAM,
    SETTINGS_ACK,
    frame,
    settings,
)
from oriel_wire.h2.hpack import Decoder, FieldMemo, literal
from oriel_wire.h2.known_fields import Field
from oriel_wire.h2.limits import H2Limits
from oriel_wire.h2.streams import Stream

FIXED = [
    (b":method", b"POST"),
    (b":scheme", b"http"),
    (b":path", b"/a"),
    (b":authority", b"x"),
    (b"te", b"trailers"),
    (b"content-type", b"application/grpc"),
]
VARYING = [(b"authorization", b"Bearer k"), (b"grpc-timeout", b"5S"), (b"x-request-id", b"1"), (b"x-customer", b"1")]
VALUES = st.one_of(
    st.binary(max_size=140),
    st.text("abc019-", max_size=40).map(str.encode),
    st.sampled_from([b" a", b"a ", b"a\0", b""]),
)


def encoded(fields: list[Field], compressed: bool = False) -> bytes:
    """A block without a dynamic table: literals that are put into none, or are never indexed."""
    encoder = hpack.Encoder()
    encoder.header_table_size = 0
    encoder.encode([])  # the size update
    return encoder.encode(fields, huffman=compressed)


def stateless(memo: FieldMemo) -> Decoder:
    decoder = Decoder(memo=memo)
    decoder.allow_table(0)
    decoder.decode(b"")
    assert decoder.stateless
    return decoder


def taught(memo: FieldMemo, fields: list[Field], *, compressed: bool = False) -> BlockShape | None:
    """The shape of a block whose sender has sent the like before."""
    block, decoder = encoded(fields, compressed), stateless(memo)
    shape = learn(memo, block, decoder.decode(block))
    memo.keep(decoder.fresh)
    return shape


@given(st.permutations([*FIXED[4:], *VARYING]), st.lists(VALUES, min_size=4, max_size=4), st.booleans(), st.booleans())
def test_what_is_recognised_is_what_the_decoder_finds(
    order: list[Field], values: list[bytes], compressed: bool, taught_compressed: bool
) -> None:
    memo = FieldMemo()
    fields = [*FIXED[:4], *order]
    assert taught(memo, fields, compressed=taught_compressed) is None  # it is all new
    names = [name for name, _ in VARYING]
    shape = taught(memo, [(name, b"2" if name == b"x-customer" else value) for name, value in fields])
    if taught_compressed:
        shape = taught(memo, [(name, b"3" if name == b"x-customer" else value) for name, value in fields])
    assert shape is not None and sorted(shape.names) == sorted(names)
    changed = dict(zip(names, values, strict=True))
    fields = [(name, changed.get(name, value)) for name, value in fields]
    block = encoded(fields, compressed)
    decoder = stateless(memo)
    found = shape.read(block, 16_384)
    assert decoder.decode(block) == fields
    if found is None:
        plain = not compressed and encoded(fields) == block
        strange = decoder.malformed or any(not 0 < len(value) < 0x7F for value in values)
        assert strange or not plain
    else:
        assert decoder.malformed == "" and shape.fields_of(found) == fields


@given(st.data())
def test_no_damaged_block_is_recognised_as_something_else(data: st.DataObject) -> None:
    memo = FieldMemo()
    fields = [*FIXED, *VARYING[:3]]
    taught(memo, fields)
    shape = taught(memo, fields)
    assert shape is not None
    block = bytearray(encoded(fields))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(block) - 1))
        change = data.draw(st.sampled_from(["set", "cut", "insert", "end"]))
        if change == "set":
            block[at] = data.draw(st.integers(0, 255))
        elif change == "cut" and len(block) > 1:
            del block[at]
        elif change == "insert":
            block.insert(at, data.draw(st.integers(0, 255)))
        else:
            del block[max(at, 1) :]
    found = shape.read(bytes(block), 16_384)
    decoder = stateless(FieldMemo())
    try:
        wanted = decoder.decode(bytes(block))
    except HpackError:
        assert found is None
    else:
        assert found is None or (shape.fields_of(found) == wanted and decoder.malformed == "")


def test_fields_that_rules_look_at_do_not_vary_and_no_name_that_comes_twice() -> None:
    for more in (
        [(b"content-length", b"1")],
        [(b"host", b"x")],
        [(b"x-request-id", b"1"), (b"x-request-id", b"2")],
        [(b":path", b"/a?b")],
        [(b"grpc-encoding", b"gzip")],
    ):
        memo = FieldMemo()
        taught(memo, [*FIXED, *VARYING])
        assert taught(memo, [*FIXED, *VARYING]) is not None
        fields = [*FIXED[:2], *more, *FIXED[3:]] if more[0][0] == b":path" else [*FIXED, *more]
        assert taught(memo, fields) is None


def test_no_value_that_differs_is_kept_and_the_number_of_shapes_is_bounded() -> None:
    memo = FieldMemo()
    secret = b"Bearer the-secret"
    for number in range(memo.MAX_SHAPES + 10):
        fields = [*FIXED, (b"authorization", secret), (b"user-agent", b"agent-%d" % number)]
        taught(memo, fields)
        assert taught(memo, fields) is not None
    assert len(memo.shapes) == memo.MAX_SHAPES
    for key, shape in memo.shapes.items():
        assert secret not in b"".join(key)
        assert all(secret not in value for _, value in shape._fields)


class Server(H2Connection):
    """Trusts senders whose block has an `authorization`. seen: the fields of each request."""

    def __init__(self, memo: FieldMemo, limits: H2Limits) -> None:
        super().__init__(client=False, limits=limits, memo=memo)
        self.seen: list[list[Field]] = []
        self.recognised = 0
        self.large = 0

    def on_headers(self, stream: Stream, fields: list[Field], end: bool) -> None:
        self.seen.append(fields)
        if any(name == b"authorization" for name, _ in fields):
            self.trust_fields()

    def on_recognised(self, stream: Stream, shape: BlockShape, values: list[bytes], end: bool) -> None:
        self.recognised += 1
        super().on_recognised(stream, shape, values, end)

    def on_too_large(self, stream: Stream, end: bool) -> None:
        self.large += 1

    def connection_error(self, code: int, message: str) -> None:
        raise AssertionError(message)


def asked(server: Server, stream_id: int, block: bytes) -> None:
    server.receive(frame(HEADERS, END_HEADERS | END_STREAM, stream_id, block), 1.0)


def opened(memo: FieldMemo, limits: H2Limits | None = None) -> Server:
    server = Server(memo, limits or H2Limits())
    server.open()
    server.receive(PREFACE + settings({}), 1.0)
    return server


def test_a_connection_recognises_blocks_once_it_has_no_table_and_its_sender_is_known() -> None:
    memo = FieldMemo()
    server = opened(memo)
    blocks = [encoded([*FIXED, (b"authorization", b"Bearer k"), (b"x-request-id", b"%d" % n)]) for n in range(8)]
    asked(server, 1, blocks[0])
    asked(server, 3, blocks[1])
    assert not memo.shapes  # the peer may still have a table
    server.receive(SETTINGS_ACK, 1.0)
    for number in range(2, 8):
        asked(server, 2 * number + 1, blocks[number])
    assert server.recognised == 5
    assert [dict(fields)[b"x-request-id"] for fields in server.seen] == [b"%d" % n for n in range(8)]
    other = opened(memo)
    other.receive(SETTINGS_ACK, 1.0)
    for number in range(2):
        asked(other, 2 * number + 1, blocks[number])
    assert other.recognised == 1  # it tries what its own blocks had


def test_an_unknown_sender_teaches_nothing() -> None:
    memo = FieldMemo()
    server = opened(memo)
    server.receive(SETTINGS_ACK, 1.0)
    for number in range(4):
        asked(server, 2 * number + 1, encoded([*FIXED, (b"x-request-id", b"%d" % number)]))
    assert not memo.shapes and not memo.fields and server.recognised == 0


def test_a_list_above_the_bound_and_a_value_that_http2_does_not_allow_are_not_recognised() -> None:
    known = [*FIXED, (b"authorization", b"Bearer k"), (b"x-request-id", b"1")]
    size = sum(32 + len(name) + len(value) for name, value in known)
    server = opened(FieldMemo(), H2Limits(max_header_list_bytes=size + 120))
    server.receive(SETTINGS_ACK, 1.0)
    asks = iter(range(1, 99, 2))

    def ask(state: bytes) -> None:
        asked(server, next(asks), b"".join([literal(*field) for field in [*known, (b"baggage", state)]]))

    for _ in range(3):
        ask(b"a")
    assert (len(server.seen), server.recognised) == (3, 1)
    baggage = 120 - 32 - len(b"baggage")
    ask(b"a" * baggage)
    assert (len(server.seen), server.large) == (4, 0)
    ask(b"a" * (baggage + 1))
    assert (len(server.seen), server.large) == (4, 1)
    ask(b"a\x01")
    assert len(server.seen) == 4
    assert server.out[-1] == frame(RST_STREAM, 0, next(asks) - 2, PROTOCOL_ERROR.to_bytes(4, "big"))
