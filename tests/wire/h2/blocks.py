"""Header representations of RFC 7541 written by hand, and strategies for fields and blocks."""

from hypothesis import strategies as st

Field = tuple[bytes, bytes]


def integer(value: int, bits: int, first: int = 0) -> bytes:
    """Encode an integer, RFC 7541 section 5.1."""
    most = (1 << bits) - 1
    if value < most:
        return bytes([first | value])
    out, value = bytearray([first | most]), value - most
    while value >= 128:
        out.append(value % 128 + 128)
        value //= 128
    return bytes([*out, value])


def string(text: bytes) -> bytes:
    return integer(len(text), 7) + text


def literal(name: bytes | int, value: bytes, *, kind: int = 0x00) -> bytes:
    """Encode a literal field. kind: 0x00 without indexing, 0x10 never indexed, 0x40 with incremental indexing. name:
    the name, or its index.
    """
    bits = 6 if kind == 0x40 else 4
    if isinstance(name, int):
        return integer(name, bits, kind) + string(value)
    return bytes([kind]) + string(name) + string(value)


def indexed(name: bytes | int, value: bytes) -> bytes:
    """Encode a literal field that goes into the dynamic table."""
    return literal(name, value, kind=0x40)


def reference(index: int) -> bytes:
    return integer(index, 7, 0x80)


def size_update(size: int) -> bytes:
    return integer(size, 5, 0x20)


NAMES = st.sampled_from(
    [b":path", b":method", b":status", b"content-type", b"te", b"x-a", b"traceparent", b"authorization", b"cookie"]
) | st.from_regex(rb"[a-z0-9-]{1,12}", fullmatch=True)
VALUES = (
    st.sampled_from([b"", b"/", b"GET", b"trailers", b"200", b"application/grpc", b"v" * 126, b"v" * 127, b"v" * 300])
    | st.from_regex(rb"[!-~]([ -~]{0,40}[!-~])?", fullmatch=True)
)  # fmt: skip
FIELDS = st.lists(st.tuples(NAMES, VALUES), max_size=12)
