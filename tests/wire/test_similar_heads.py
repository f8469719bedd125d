"""Heads that are recognised line by line say what a full parse would, or are left to it."""

from hypothesis import example, given
from hypothesis import strategies as st

from oriel_wire.engine.recognition import Recognition
from oriel_wire.errors import BadMessage
from oriel_wire.h1 import LineMemo, RequestHead, parse_request_head
from oriel_wire.h1_response import ResponseMemo, parse_response_head
from oriel_wire.h1_similar import HeadPattern

LINES = (
    b"POST /v2/models/digits/infer HTTP/1.1",
    b"Host: gateway:8080",
    b"X-Request-Id: r1",
    b"traceparent: 00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01",
    b"Content-Type: application/json",
    b"Content-Length: 17",
)


def pattern(lines: tuple[bytes, ...] = LINES) -> HeadPattern:
    block = b"\r\n".join(lines)
    found = HeadPattern.of(parse_request_head(block, LineMemo()), block)
    assert found is not None
    return found


def said(head: RequestHead) -> tuple[object, ...]:
    return (
        *(head.method, head.target, head.items(), head.forward, head.content_length, head.request_id, head.traceparent),
        *(head.close, head.chunked, head.expect_continue, head.timeout, head.credentials),
    )


def judged(block: bytes) -> tuple[object, ...] | None:
    try:
        return said(parse_request_head(block, LineMemo()))
    except BadMessage:
        return None


def test_what_differs_is_read_and_the_rest_is_known() -> None:
    lines = [*LINES]
    lines[2], lines[3], lines[5] = b"X-Request-Id: \t r2 ", b"traceparent: nonsense", b"Content-Length:9"
    head = pattern().read(b"\r\n".join(lines))
    assert head is not None and head.known
    assert (head.request_id, head.traceparent, head.content_length) == ("r2", "nonsense", 9)
    assert said(head) == judged(b"\r\n".join(lines))
    assert head.get("content-length") == "9" and b"Content-Length:9" in head.forward


def test_other_lines_are_left_to_the_parser() -> None:
    known = pattern()
    for number, line in enumerate((b"POST /v2/models/mlp/infer HTTP/1.1", b"Host: other", b"X-Request-ID: r2")):
        lines = [*LINES]
        lines[number] = line
        assert known.read(b"\r\n".join(lines)) is None
    assert known.read(b"\r\n".join((*LINES, b"x: y"))) is None
    for length in (b"1, 1", b"+1", b"-1", b"1" * 16, b"", b"0x10", "\u0661".encode()):
        lines = [*LINES]
        lines[5] = b"Content-Length: " + length
        assert known.read(b"\r\n".join(lines)) is None


def test_heads_with_a_key_that_was_not_recognised_make_no_pattern() -> None:
    memo = LineMemo()
    block = b"\r\n".join((*LINES, b"Authorization: Bearer secret"))
    assert HeadPattern.of(parse_request_head(block, memo), block) is None
    memo.keep_credential(b"Authorization: Bearer secret", "owner")
    found = HeadPattern.of(parse_request_head(block, memo), block)
    assert found is not None
    assert found.read(block.replace(b"secret", b"others")) is None
    head = found.read(block.replace(b"r1", b"r2"))
    assert head is not None and head.credentials is not None and head.credentials[0].owner == "owner"


def test_chunked_and_doubled_lines_make_no_pattern() -> None:
    for more in (b"Transfer-Encoding: chunked", b"Expect: 100-continue", b"x-request-id: r3"):
        block = b"\r\n".join((*LINES[:5], more))
        assert HeadPattern.of(parse_request_head(block, LineMemo()), block) is None


@given(st.lists(st.tuples(st.integers(0, 240), st.integers(0, 2), st.binary(max_size=3)), min_size=1, max_size=4))
@example([(70, 1, b"\n")])
@example([(70, 1, b"\r\n")])
def test_any_change_of_bytes_is_read_as_by_the_parser_or_not_at_all(changes: list[tuple[int, int, bytes]]) -> None:
    block = bytearray(b"\r\n".join(LINES))
    for at, removed, put in changes:
        block[at : at + removed] = put
    head = pattern().read(bytes(block))
    assert head is None or said(head) == judged(bytes(block))


def answer(memo: ResponseMemo, *lines: bytes) -> bytes:
    block = b"\r\n".join((b"HTTP/1.1 200 OK", b"content-length: 2", *lines))
    parse_response_head(block, memo)
    return block


def test_heads_of_answers_are_kept_when_every_line_was_known_and_at_most_32_of_up_to_1_kib() -> None:
    memo = ResponseMemo()
    first = answer(memo, b"x-number: 0")
    assert not memo.heads, "a line nobody had seen"
    answer(memo, b"x-number: 0")
    assert memo.heads[first].forward == [b"HTTP/1.1 200 OK", b"x-number: 0"]
    for timing in (b"server-timing: a;dur=1", b"x-request-id: r1", b"x-oriel-cost-us: 5"):
        for _ in range(3):
            assert answer(memo, timing) not in memo.heads, "these differ from answer to answer"
    long = [b"x-%d: %s" % (number, b"v" * 200) for number in range(6)]
    for _ in range(3):
        assert answer(memo, *long) not in memo.heads
    for number in range(100):
        answer(memo, b"x-number: %d" % number)
        answer(memo, b"x-number: %d" % number)
        assert len(memo.heads) <= 32


def test_a_copy_of_a_kept_head_may_be_changed() -> None:
    memo = ResponseMemo()
    head = memo.heads[[answer(memo, b"x: y"), answer(memo, b"x: y")][1]]
    head.start = b"as it was passed on"
    copy = head.copy()
    copy.forward.append(b"more: of it")
    assert head.forward == [b"HTTP/1.1 200 OK", b"x: y"] and copy.start is None and copy.content_length == 2


def test_a_client_that_says_something_else_from_now_on_is_known_by_its_bytes_again() -> None:
    """It stayed with its first head for good, and every later one was read line by line."""
    seen, memo = Recognition(), LineMemo()

    def came(length: int) -> RequestHead:
        data = b"\r\n".join((*LINES[:2], b"Content-Length: %d" % length)) + b"\r\n\r\n"
        head = seen.find(data, 0, len(data) - 4)
        if head is None:
            head = parse_request_head(data[:-4], memo)
        if head is not seen.head:
            seen.authenticated(head)
        return head

    for length in (5, 5, 5, 7):
        assert came(length).content_length == length
    assert seen.head is not None and seen.length == 5
    second = came(7)
    assert seen.head is second and seen.length == 7 and came(7) is second
    assert came(5).content_length == 5 and came(9).content_length == 9 and seen.head is second
