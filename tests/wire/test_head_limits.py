"""Heads that are made to cost time: each field that `Connection` names was looked for in every line."""

import pytest

from oriel_wire.errors import BadMessage
from oriel_wire.h1.request import LineMemo, parse_request_head
from oriel_wire.h1.response import ResponseMemo, parse_response_head

NAMES = [f"x-{number}" for number in range(9)]


def request(*lines: str) -> bytes:
    return "\r\n".join(("POST / HTTP/1.1", "host: x", *lines)).encode()


def test_connection_names_no_more_fields_than_it_may() -> None:
    """8,000 names in one head without a key held the loop for 0.2 s."""
    line = f"connection: {', '.join(NAMES)}"
    with pytest.raises(BadMessage, match="more than 8"):
        parse_request_head(request(line), LineMemo())
    with pytest.raises(BadMessage, match="more than 8"):
        parse_response_head(f"HTTP/1.1 200 OK\r\n{line}".encode(), ResponseMemo())


def test_some_names_are_dropped_with_their_fields() -> None:
    head = parse_request_head(request(f"connection: {', '.join(NAMES[:7])}, close", "x-6: 1", "x-7: 1"), LineMemo())
    assert head.forward == [b"x-7: 1"] and head.close


@pytest.mark.parametrize(
    "lines",
    [
        ("Inference-Header-Content-Length: 5", "inference-header-content-length: 9"),
        ("Inference-Header-Content-Length: 5", "Inference-Header-Content-Length: 5"),
        ("Inference-Header-Content-Length: 5", "connection: inference-header-content-length"),
    ],
)
def test_where_the_json_part_ends_is_said_once_to_every_hop(lines: tuple[str, ...]) -> None:
    """Of two values each server takes the one it likes, so a client could show one tensor and have another computed."""
    with pytest.raises(BadMessage, match="twice|may not be dropped"):
        parse_request_head(request(*lines), LineMemo())
    head = parse_request_head(request(lines[0], "inference_header_content_length: 9"), LineMemo())
    assert head.header_length == "5" and head.forward == [lines[0].encode()]


def test_an_answer_has_no_more_fields_than_it_may() -> None:
    lines = ["HTTP/1.1 200 OK", *(f"x-{number}: 1" for number in range(257))]
    assert len(parse_response_head("\r\n".join(lines[:-1]).encode(), ResponseMemo()).fields) == 256
    with pytest.raises(BadMessage, match="256"):
        parse_response_head("\r\n".join(lines).encode(), ResponseMemo())
