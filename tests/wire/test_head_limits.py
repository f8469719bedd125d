"""Heads that are made to cost time: each field that `Connection` names was looked for in every line."""

import pytest

from oriel_wire.errors import BadMessage
from oriel_wire.h1 import LineMemo, parse_request_head, parse_response_head

NAMES = [f"x-{number}" for number in range(33)]


def request(*lines: str) -> bytes:
    return "\r\n".join(("POST / HTTP/1.1", "host: x", *lines)).encode()


@pytest.mark.parametrize("lines", [[", ".join(NAMES)], [", ".join(NAMES[:20]), ", ".join(NAMES[20:])]])
def test_connection_names_no_more_fields_than_it_may(lines: list[str]) -> None:
    """8,000 names in one head without a key held the loop for 0.2 s."""
    lines = [f"connection: {line}" for line in lines]
    with pytest.raises(BadMessage, match="more than 32"):
        parse_request_head(request(*lines), LineMemo())
    with pytest.raises(BadMessage, match="more than 32"):
        parse_response_head("\r\n".join(("HTTP/1.1 200 OK", *lines)).encode(), LineMemo(response=True))


def test_some_names_are_dropped_with_their_fields() -> None:
    head = parse_request_head(request(f"connection: {', '.join(NAMES[:30])}, close", "x-29: 1", "x-30: 1"), LineMemo())
    assert head.forward == [b"x-30: 1"] and head.close


def test_an_answer_has_no_more_fields_than_it_may() -> None:
    lines = ["HTTP/1.1 200 OK", *(f"x-{number}: 1" for number in range(513))]
    assert len(parse_response_head("\r\n".join(lines[:-1]).encode(), LineMemo(response=True)).fields) == 512
    with pytest.raises(BadMessage, match="512"):
        parse_response_head("\r\n".join(lines).encode(), LineMemo(response=True))
