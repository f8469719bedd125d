"""Proxies in front of the gateway: which headers about the client are trusted, and what the next hop receives."""

import re
from ipaddress import ip_network

from hypothesis import example, given
from hypothesis import strategies as st

from oriel_gateway.ingress.forwarded import forwarded_for
from oriel_wire.h1.request import LineMemo, parse_request_head

from .gate import INFER
from .stack import Client, documents, gateway, upstream

NETWORKS = (ip_network("10.0.0.0/8"), ip_network("fd00::/8"))


def forwarded(peer: str, *lines: str, secure: bool = False) -> tuple[str, dict[str, str]]:
    block = "\r\n".join(["GET / HTTP/1.1", "host: public.example", *lines]).encode("latin-1")
    head = parse_request_head(block, LineMemo())
    address, out = forwarded_for(head, peer, secure=secure, networks=NETWORKS)
    passed = {name: value for name, _, value in (line.partition(": ") for line in out.split("\r\n")[:-1])}
    assert not any(line.lower().startswith((b"x-forwarded", b"forwarded", b"x-real")) for line in head.forward)
    return address, passed


def test_a_stranger_is_believed_nothing() -> None:
    address, passed = forwarded(
        "203.0.113.9", "X-Forwarded-For: 1.1.1.1", "Forwarded: for=1.1.1.1", "X-Forwarded-Proto: https",
        "X-Forwarded-Host: evil", "X-Real-IP: 1.1.1.1", "X-Forwarded-Prefix: /x",
    )  # fmt: skip
    assert address == "203.0.113.9"
    assert passed == {
        "x-forwarded-for": "203.0.113.9",
        "x-forwarded-proto": "http",
        "x-forwarded-host": "public.example",
        "forwarded": 'for=203.0.113.9;host="public.example";proto=http',
    }


def test_the_host_of_an_absolute_target_counts_and_the_field_is_ignored() -> None:
    """RFC 9112, section 3.2.2. The host that a trusted proxy names goes before both."""
    for target, host in (
        ("http://real.example/v2", "real.example"),
        ("HTTPS://real.example:8443?a=b", "real.example:8443"),
        ("http://[2001:db8::1]:80/", "[2001:db8::1]:80"),
        ("/v2", "other.example"),
        ("/http://real.example/", "other.example"),
    ):
        memo = LineMemo()
        for _ in range(2):  # the second time with a remembered line
            head = parse_request_head(f"GET {target} HTTP/1.1\r\nhost: other.example".encode(), memo)
            memo.keep_line(head.line)
            _, out = forwarded_for(head, "10.0.0.2", secure=False, networks=NETWORKS)
            assert f"x-forwarded-host: {host}\r\n" in out and f'host="{host}";' in out
    head = parse_request_head(
        b"GET http://real.example/ HTTP/1.1\r\nhost: other.example\r\nx-forwarded-host: shop.example", LineMemo()
    )
    assert "x-forwarded-host: shop.example\r\n" in forwarded_for(head, "10.0.0.2", secure=False, networks=NETWORKS)[1]


def test_a_trusted_proxys_list_is_continued() -> None:
    address, passed = forwarded(
        "10.0.0.2", "x-forwarded-for: 9.9.9.9, 203.0.113.9", "x-forwarded-for: 10.0.0.1",
        "x-forwarded-proto: https", "x-forwarded-host: shop.example", "x-real-ip: 203.0.113.9",
    )  # fmt: skip
    assert address == "203.0.113.9"  # the entries to its left may have been written by anybody
    assert passed["x-forwarded-for"] == "9.9.9.9, 203.0.113.9,10.0.0.1, 10.0.0.2"
    assert passed["forwarded"] == 'for=10.0.0.2;host="shop.example";proto=https'
    assert (passed["x-forwarded-proto"], passed["x-forwarded-host"]) == ("https", "shop.example")
    assert passed["x-real-ip"] == "203.0.113.9"


def test_rfc_7239_is_read_and_continued() -> None:
    address, passed = forwarded(
        "fd00::1", 'Forwarded: for="_gazonk, x", For="[2001:db8:cafe::17]:4711";proto=http;by=203.0.113.43', secure=True
    )
    assert address == "2001:db8:cafe::17"
    assert passed["forwarded"].endswith(', for="[fd00::1]";host="public.example";proto=https')
    assert passed["x-forwarded-for"] == "fd00::1"


def test_two_lists_that_disagree_leave_the_proxy_itself() -> None:
    """A trusted proxy writes only one of the two headers, so the other one may be the client's own text."""
    assert forwarded("10.0.0.1", "x-forwarded-for: 8.8.8.8", "forwarded: for=9.9.9.9")[0] == "10.0.0.1"
    assert forwarded("10.0.0.1", "x-forwarded-for: 8.8.8.8", "forwarded: for=8.8.8.8")[0] == "8.8.8.8"


def test_names_and_nonsense_end_the_walk() -> None:
    assert forwarded("10.0.0.1", "x-forwarded-for: 8.8.8.8, unknown")[0] == "10.0.0.1"
    assert forwarded("10.0.0.1", "x-forwarded-for: 8.8.8.8, unknown, 10.0.0.7:99")[0] == "10.0.0.7"
    assert forwarded("10.0.0.1", 'x-forwarded-for: fe80::1%any text"')[0] == "10.0.0.1"
    assert forwarded("::ffff:10.0.0.1", "x-forwarded-for: ::ffff:8.8.8.8")[0] == "8.8.8.8"
    assert forwarded("10.0.0.1", "x-forwarded-for:", "x-forwarded-host: a b", "x-forwarded-proto: gopher")[1] == {
        "x-forwarded-for": "10.0.0.1", "x-forwarded-proto": "http", "x-forwarded-host": "public.example",
        "forwarded": 'for=10.0.0.1;host="public.example";proto=http',
    }  # fmt: skip


_TEXT = st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=126), max_size=60)
_OURS = st.sampled_from(["10.1.1.1", "fd00::7", "[fd00::2]:1", "10.9.9.9:80"])


@given(_TEXT, st.sampled_from(["8.8.8.8", "2001:db8::1"]), st.lists(_OURS, max_size=5))
def test_whatever_a_client_writes_its_own_address_is_named(forged: str, client: str, proxies: list[str]) -> None:
    """The client sends any list; the first proxy appends the client's address, each further proxy that of the one
    before.
    """
    true = ", ".join([client, *proxies])
    assert forwarded("10.0.0.1", f"x-forwarded-for: {forged}, {true}")[0] == client
    assert forwarded("10.0.0.1", f"x-forwarded-for: {forged}", f"x-forwarded-for: {true}")[0] == client
    assert forwarded(client, f"x-forwarded-for: {forged}", f"forwarded: {forged}")[0] == client


_QUOTED = st.text(alphabet=st.characters(min_codepoint=32, max_codepoint=126), max_size=20).map(
    lambda text: '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
)


@given(_TEXT, st.sampled_from(["8.8.8.8", '"[2001:db8::1]"', '"8.8.8.8:99"']), st.lists(_QUOTED, max_size=2))
@example('for=6.6.6.6;x="', '"[2001:db8::1]"', [])
def test_whatever_a_client_describes_its_own_address_is_named(forged: str, client: str, more: list[str]) -> None:
    """Each proxy appends an element to the client's text, and may quote values that it copies from the request."""
    element = ";".join([f"for={client}", *(f"host={value}" for value in more), "proto=http"])
    for lines in ([f"forwarded: {forged}, {element}"], [f"forwarded: {forged}", f"forwarded: {element}"]):
        address, passed = forwarded("10.0.0.1", *lines)
        assert address == client.strip('"').removesuffix(":99").strip("[]")
        # A reader that begins at the left of the forwarded header does not meet an open quote either.
        assert re.sub(r'"(?:[^"\\]|\\.)*"', "", passed["forwarded"]).count('"') == 0


@given(_TEXT, st.sampled_from(["10.0.0.1", "8.8.4.4", "fd00::1", "unix"]))
def test_whatever_anybody_writes_no_line_is_broken_open(text: str, peer: str) -> None:
    _, passed = forwarded(peer, f"forwarded: {text}", f"x-forwarded-host: {text}", f"x-forwarded-for: {text}")
    assert not any("\r" in value or "\n" in value for value in passed.values())


async def test_the_next_hop_hears_it_only_where_proxies_are_named() -> None:
    headers = "x-forwarded-for: 203.0.113.9\r\nx-forwarded-proto: https\r\n"
    async with upstream() as up:
        async with gateway(documents([up.port])) as (port, _), Client(port) as client:
            assert (await client.ask(INFER, headers=headers)).status == 200
            assert up.seen[0].get("x-forwarded-for") is up.seen[0].get("x-forwarded-proto") is None
        files = documents([up.port], extra='[http]\ntrusted_proxies = ["127.0.0.0/8"]\n')
        async with gateway(files) as (port, _), Client(port) as client:
            for _ in range(3):  # from the third request on the head is recognised by its bytes
                assert (await client.ask(INFER, headers=headers)).status == 200
                assert up.seen[-1].get("x-forwarded-for") == "203.0.113.9, 127.0.0.1"
                assert up.seen[-1].get("forwarded") == 'for=127.0.0.1;host="x";proto=https'
