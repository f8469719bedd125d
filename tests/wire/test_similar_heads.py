"""Heads of a known shape say what a full parse would, or are left to it."""

import gc
from itertools import count
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from oriel_wire.errors import BadMessage, TooLarge
from oriel_wire.h1.request import LineMemo, RequestHead, parse_request_head
from oriel_wire.h1.response import ResponseMemo, parse_response_head
from oriel_wire.h1.similar import SIZE, HeadShape, SimilarHeads

LINES = (
    b"POST /v2/models/digits/infer HTTP/1.1",
    b"Host: gateway:8080",
    b"X-Request-Id: r1",
    b"traceparent: 00-" + b"1" * 32 + b"-" + b"2" * 16 + b"-01",
    b"Content-Type: application/json",
    b"Content-Length: 17",
    b"X-Oriel-Timeout-Ms: 100",
    b"tracestate: a=1",
    b"X-Note: 1",
)
SECRET = b"Authorization: Bearer secret"


class Server:
    """What a server does with each head: it reads it, and its sender is authenticated."""

    def __init__(self, *credentials: bytes) -> None:
        self.memo = LineMemo()
        for each in credentials:
            self.memo.keep_credential(each, each)
        self.heads = SimilarHeads(self.memo)
        self.numbers = count()

    def read(self, *lines: bytes) -> RequestHead:
        head = self.heads.read(b"\r\n".join(lines), 128)
        self.heads.authenticated(head)
        return head

    def learn(self, *lines: bytes) -> "Server":
        """Read heads like this one until their shape is known."""
        for _ in range(3):
            head = self.read(*(changed(line, b"%d" % next(self.numbers)) for line in lines))
        assert head.lines
        return self


def changed(line: bytes, by: bytes) -> bytes:
    """Another line of the same sender."""
    name = line.partition(b":")[0].lower()
    if name in (b"x-request-id", b"traceparent", b"content-length", b"x-oriel-timeout-ms", b"tracestate", b"x-note"):
        return line + by
    return line


def said(head: RequestHead) -> dict[str, Any]:
    names = "method target path query host content_length chunked close expect_continue traceparent tracestate forward"
    names += " request_id timeout tier content_encoding header_length"
    found: dict[str, Any] = {name: getattr(head, name) for name in names.split()}
    found |= {"line": head.line.line, "names": head.by_name(), "sent_on": head.sent_on()}
    found["fields"] = [(each.name, each.value, each.line, each.kind, each.number) for each in head.fields]
    found["forwarded"] = [each.line for each in head.forwarded]
    found["owners"] = [each.owner for each in head.credentials or ()]
    return found


def judged(memo: LineMemo, block: bytes) -> dict[str, Any] | None:
    """What the parser says that knows nothing but the credentials."""
    new = LineMemo()
    new.credentials = memo.credentials
    try:
        return said(parse_request_head(block, new))
    except BadMessage:
        return None


def test_lines_that_differ_are_read_and_the_rest_is_known() -> None:
    server = Server().learn(*LINES)
    lines = [*LINES]
    lines[2:4] = b"X-Request-Id: \t r2 ", b"traceparent: nonsense"
    lines[5], lines[8] = b"Content-Length:9", b"X-Note:"
    head = server.read(*lines)
    assert head.lines and not head.fresh
    assert (head.request_id, head.traceparent, head.content_length) == ("r2", "nonsense", 9)
    assert (head.get("x-oriel-timeout-ms"), head.tracestate, head.varying) == ("100", "a=1", [b"X-Note:"])
    assert said(head) == judged(server.memo, b"\r\n".join(lines))


@pytest.mark.parametrize("line", [b"Content-Length: 1, 1", b"Content-Length: +1", b"Content-Length: " + b"1" * 16])
@pytest.mark.parametrize("more", [b"", b"\0", b"\x7f"])
def test_a_line_that_no_head_may_have_is_refused(line: bytes, more: bytes) -> None:
    server = Server().learn(*LINES)
    with pytest.raises(BadMessage):
        server.read(*LINES[:5], line + more)
    with pytest.raises(BadMessage):
        server.read(*LINES[:5], line + more, *LINES[6:])
    with pytest.raises(TooLarge):
        server.heads.read(b"\r\n".join((*LINES, *[b"x: y"] * 200)), 128)


def test_lines_that_are_given_twice_and_ends_of_connections_make_no_shape() -> None:
    for more in (b"Expect: 100-continue",), (b"x-request-id: r3",), (b"Connection: close",), (b"X-Note:", b"x-note:"):
        server = Server()
        for number in range(4):
            lines = [changed(line, b"%d" % number) for line in (*LINES[:5], *more)]
            assert not server.read(*lines).lines
        assert not server.heads._shapes


def test_a_decision_is_of_one_type_of_body() -> None:
    server = Server().learn(*LINES)
    server.heads.decide(server.read(*LINES), "decided")
    for number in range(4):
        head = server.read(*LINES[:4], b"Content-Type: application/x-%d" % number, *LINES[5:])
        assert not head.lines and head.decision is None
    assert server.read(*(changed(line, b"another") for line in LINES if b"Length" not in line)).decision is None
    assert server.read(*(changed(line, b"123") for line in LINES)).decision == "decided"


def test_shapes_are_made_of_what_is_in_the_memo_only() -> None:
    """So a sender that was not authenticated makes none."""
    heads = SimilarHeads(LineMemo())
    for _ in range(4):
        assert heads.read(b"\r\n".join(LINES), 128).lines == ()


# Credentials ---------------------------------------------------------------------------------------------------------


def test_a_key_that_was_not_recognised_is_read_as_by_the_parser() -> None:
    server = Server(SECRET).learn(*LINES, SECRET)
    head = server.read(*LINES, SECRET)
    assert head.credentials is not None and head.credentials[0].owner == SECRET
    assert not any(b"secret" in line for line in head.lines), "a key is not kept"
    for line in (SECRET + b"s", b"x-api-key: secrets"):
        for _ in range(4):  # the first ones make the other lines known
            head = server.read(*LINES, line)
            assert said(head) == judged(server.memo, b"\r\n".join((*LINES, line)))
        assert head.lines
        assert not any(b"secret" in each for each in head.lines)
    with pytest.raises(BadMessage):
        server.read(*LINES, b"Authorization: \0")
    assert not server.read(*LINES, b"Other: secret").lines


def test_each_of_many_keys_has_the_shape_of_the_first_and_its_bytes_are_in_none() -> None:
    """A key that came for the first time made its head's shape anew; those of the others were dropped for it."""
    server = Server()
    for number in range(20):
        lines = (*LINES[:3], b"User-Agent: one", b"Authorization: Bearer secret%d" % number)
        head = server.read(*lines)
        assert bool(head.lines) == (number > 1), number  # the second one found its request line in the memo
        assert said(head) == judged(server.memo, b"\r\n".join(lines))
    (shapes,) = server.heads._shapes.values()
    assert len(shapes) == 1
    kept = [shapes[0]._names, shapes[0]._forward, [(each.line, each.value) for each in shapes[0]._fields]]
    assert "secret" not in repr(kept)


def test_a_decision_is_of_one_shape_and_one_credential() -> None:
    both = SECRET, b"x-api-key: other"
    server = Server(*both).learn(*LINES, both[0]).learn(*LINES, both[1])
    first = server.read(*LINES, both[0])
    assert first.decision is None
    server.heads.decide(first, "decided")
    assert server.read(*LINES, both[0]).decision == "decided"
    assert server.read(*LINES, both[1]).decision is None
    assert server.learn(*LINES, both[0], b"x-more: 1").read(*LINES, both[0], b"x-more: 1").decision is None
    server.heads.forget_decisions()
    assert server.read(*LINES, both[0]).decision is None


def test_a_credential_that_was_forgotten_is_not_recognised() -> None:
    server = Server(SECRET).learn(*LINES, SECRET)
    server.heads.decide(server.read(*LINES, SECRET), "decided")
    server.memo.forget_credentials()
    assert server.read(*LINES, SECRET).decision is None
    server.memo.keep_credential(SECRET, "another owner")
    head = server.read(*LINES, SECRET)
    assert head.decision is None and head.credentials is not None and head.credentials[0].owner == "another owner"


# Bounds --------------------------------------------------------------------------------------------------------------


def test_lines_of_recognised_heads_do_not_fill_the_memo() -> None:
    server = Server().learn(*LINES)
    before = len(server.memo.fields)
    for number in range(200):
        head = server.read(*LINES[:8], b"X-Note: only %d" % number)
        assert head.varying == [b"X-Note: only %d" % number]
    assert len(server.memo.fields) == before


def test_clients_that_differ_in_lines_that_are_passed_on_share_a_shape() -> None:
    """Thousands of programs and languages made a shape each, so that none was there when it was wanted."""
    server = Server(SECRET)
    for number in range(2000):
        mine = b"User-Agent: %d" % (number % 100), b"accept-language: %d" % (number % 20)
        head = server.read(*LINES[:2], *mine, b"X-Twice: 1", b"X-Twice: 2", b"Content-Length: 1", SECRET)
        if number > 100:
            assert head.lines, number
            assert said(head) == judged(server.memo, b"\r\n".join((*LINES[:2], *head.lines[2:7], SECRET)))
            assert head.varying == [*mine, b"X-Twice: 1", b"X-Twice: 2"]
    assert sum(map(len, server.heads._shapes.values())) <= 8


def test_a_head_and_its_shape_are_gone_without_the_collector() -> None:
    server = Server().learn(*LINES)

    def kept() -> int:
        return sum(type(each) in (RequestHead, HeadShape) for each in gc.get_objects())

    gc.collect()
    gc.disable()
    try:
        before = kept()
        for number in range(20):
            server.read(*LINES[:8], *[b"X-Other: 1"] * number)
        server.heads = SimilarHeads(server.memo)
        assert kept() < before, "those that were known before are gone too"
    finally:
        gc.enable()


def test_shapes_and_decisions_are_bounded() -> None:
    server = Server().learn(*LINES)
    for number in range(3 * SIZE):
        for _ in range(2):
            head = server.read(LINES[0], b"Host: h%d" % number, b"X-Request-Id: r%d" % number)
        server.heads.decide(server.read(LINES[0], b"Host: h%d" % number, b"X-Request-Id: r"), number)
    for kept in (server.heads._shapes, server.heads._decisions):
        assert 0 < len(kept) <= SIZE
    latest = server.read(LINES[0], b"Host: h%d" % (3 * SIZE - 1), b"X-Request-Id: r")
    assert latest.decision == 3 * SIZE - 1 and not head.lines
    long = (*LINES, b"x-long: " + b"y" * 5000)
    assert not any(server.read(*long).lines for _ in range(4))


def test_as_many_credentials_and_decisions_are_kept_as_their_owner_asks_for() -> None:
    server = Server().learn(*LINES)
    most = server.memo.SIZE + 100
    lines = [b"Authorization: Bearer key%d" % number for number in range(most)]
    for line in lines:
        server.memo.keep_credential(line, line, most)
        server.learn(*LINES, line)
        server.heads.decide(server.read(*LINES, line), line, most)
    assert all(server.read(*LINES, line).decision == line for line in lines)
    server.memo.keep_credential(b"Authorization: Bearer one more", "", most)
    assert len(server.memo.credentials) == 1


def test_a_sender_of_ever_other_headers_keeps_no_more_shapes_the_more_decisions_are_kept() -> None:
    server = Server().learn(*LINES)
    for number in range(2 * SIZE + 1):
        server.heads.decide(server.read(*LINES, b"x-%d: 1" % number), number, 100 * SIZE)
    assert 0 < len({shape for shape, _ in server.heads._decisions}) <= SIZE


def test_nothing_is_kept_for_a_credential_that_is_not_recognised() -> None:
    server = Server().learn(*LINES, SECRET)
    server.heads.decide(server.read(*LINES, SECRET), "decided")
    assert not server.heads._decisions
    assert server.read(*LINES, SECRET).decision is None


# Any heads -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 340), st.integers(0, 2), st.binary(max_size=3)), min_size=1, max_size=4))
@example([(70, 1, b"\n")])
@example([(70, 1, b"\r\n")])
def test_any_change_of_bytes_is_read_as_by_the_parser(changes: list[tuple[int, int, bytes]]) -> None:
    server = Server(SECRET).learn(*LINES, SECRET)
    block = bytearray(b"\r\n".join((*LINES, SECRET)))
    for at, removed, put in changes:
        block[at : at + removed] = put
    try:
        head = said(server.read(*bytes(block).split(b"\r\n")))
    except BadMessage:
        head = None
    assert head == judged(server.memo, bytes(block))


VARIANTS = (
    LINES[:1],
    (b"Host: a", b"Host: b", b"host: a"),
    (b"X-Request-Id: r1", b"X-Request-Id: r2", b"x-request-id: r2", b"traceparent: t", b"X-Note: 1", b"x-tier: 1"),
    (b"X-Note: 1", b"X-Note: 2", b"X-Oriel-Tier: gold", b"x-forwarded-for: 1", b"X-Request-Tier: gold"),
    (SECRET, b"x-api-key: other", b"x-api-key: unknown", b"User-Agent: a", b"User-Agent: b"),
    (b"Content-Length: 1", b"Content-Length: 2", b"Transfer-Encoding: chunked", b"Connection: close"),
    (b"Content-Encoding: gzip", b"Inference-Header-Content-Length: 1", b"X-Note: 1", b"tracestate: a", b"x: y"),
)


@given(st.lists(st.tuples(*map(st.sampled_from, VARIANTS)), min_size=1, max_size=30), st.booleans())
def test_heads_of_many_clients_are_read_as_by_the_parser(heads: list[tuple[bytes, ...]], decides: bool) -> None:
    server = Server(SECRET, b"x-api-key: other")
    for lines in [*heads, *heads]:
        expected = judged(server.memo, b"\r\n".join(lines))
        if expected is None:
            with pytest.raises(BadMessage):
                server.read(*lines)
            continue
        head = server.read(*lines)
        assert said(head) == expected
        if decides and head.decision is None:
            server.heads.decide(head, 1)


# Answers of upstreams ------------------------------------------------------------------------------------------------


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
