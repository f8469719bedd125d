"""Requests of pages in a browser to a port of this machine."""

import pytest

from oriel_wire.engine.peers import is_loopback, page_refusal


@pytest.mark.parametrize(
    ("headers", "words"),
    [
        ({"host": "127.0.0.1:8000"}, ""),
        ({"host": "localhost"}, ""),
        ({"host": "[::1]:8000"}, ""),
        ({"host": "127.9.9.9:1"}, ""),
        ({}, ""),
        ({"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8000"}, ""),
        ({"host": "localhost:8000", "origin": "https://localhost:8000"}, ""),
        ({"host": "evil.example:8000"}, "use a loopback address"),
        ({"host": "127.0.0.1.evil.example"}, "use a loopback address"),
        ({"host": "127.0.0.1:8000:1"}, "use a loopback address"),
        ({"host": "127.0.0.1:8000", "origin": "https://evil.example"}, "does not serve pages of other sites"),
        ({"host": "127.0.0.1:8000", "origin": "http://127.0.0.1:8001"}, "does not serve pages of other sites"),
        ({"host": "127.0.0.1:8000", "origin": "null"}, "does not serve pages of other sites"),
        ({"host": "127.0.0.1:8090", "origin": "http://127.0.0.1:8080", "x-oriel-tier": "gold"}, ""),
        ({"host": "evil.example", "origin": "http://evil.example", "x-oriel-tier": "gold"}, "use a loopback address"),
        ({"host": ""}, "use a loopback address"),
        ({"host": "127.0.0.1" + " " * 100}, "use a loopback address"),
        ({"host": "[" + ":" * 100 + "1]"}, "use a loopback address"),
        ({"origin": "https://evil.example"}, "does not serve pages of other sites"),
    ],
)
def test_a_page_from_elsewhere_is_told_by_its_host_or_its_origin(headers: dict[str, str], words: str) -> None:
    said = page_refusal(headers.get)
    assert bool(said) == bool(words) and words in said


def test_loopback_is_an_address_or_the_name_for_it() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "10.0.0.1", "::", "", "evil.example", "localhost.evil.example")))
