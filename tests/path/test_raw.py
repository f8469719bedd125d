"""Requests, byte by byte, that no client library would send."""

import contextlib
import socket

import httpx
import pytest
from stacks import Stack, picture

HEAD = "POST /v1/services/digits HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer oriel-demo-gold\r\n"


def exchange(stack: Stack, *parts: bytes) -> bytes:
    """Send bytes, then read until the gateway closes."""
    host, port = stack.gateway.split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection:
        for part in parts:
            connection.sendall(part)
        answer = b""
        while data := connection.recv(65536):
            answer += data
    return answer


def test_a_body_in_pieces_and_chunks_is_read(stack: Stack) -> None:
    body = picture(4)
    chunks = [
        f"{len(body[at : at + 100]):x}\r\n".encode() + body[at : at + 100] + b"\r\n" for at in range(0, len(body), 100)
    ]
    head = f"{HEAD}Content-Type: image/png\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n".encode()
    answer = exchange(stack, head[:30], head[30:], *chunks, b"0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ") and b'"label":4' in answer


def test_two_requests_on_one_connection_are_answered_in_order(stack: Stack) -> None:
    def request(digit: int, connection: str) -> bytes:
        body = picture(digit)
        head = f"{HEAD}Content-Type: image/png\r\nContent-Length: {len(body)}\r\nConnection: {connection}\r\n\r\n"
        return head.encode() + body

    answer = exchange(stack, request(1, "keep-alive") + request(2, "close"))
    assert answer.count(b"HTTP/1.1 200 ") == 2 and answer.index(b'"label":1') < answer.index(b'"label":2')


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ("Content-Length: 5\r\nTransfer-Encoding: chunked\r\n", 400),
        ("Content-Length: 5\r\nContent-Length: 6\r\n", 400),
        ("Transfer-Encoding: gzip, chunked\r\n", (400, 501)),
        ("Content-Length: -1\r\n", 400),
        ("X-Odd\x00: 1\r\nContent-Length: 0\r\n", 400),
        (f"X-Long: {'x' * 40000}\r\n", 431),
        ("X-Many: 1\r\n" * 200, 431),
    ],
)
def test_what_could_be_read_two_ways_is_refused_and_the_connection_closed(
    stack: Stack, fields: str, status: int | tuple[int, int]
) -> None:
    answer = exchange(stack, f"{HEAD}{fields}\r\n".encode())
    assert int(answer.split()[1]) in (status if isinstance(status, tuple) else (status,))
    assert answer.count(b"HTTP/1.1 ") == 1


def test_a_body_that_is_too_large_is_refused_before_it_is_read(stack: Stack) -> None:
    answer = exchange(stack, f"{HEAD}Content-Length: {1 << 40}\r\n\r\n".encode())
    assert answer.startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize(("unit", "label"), [("gateway", "admin"), ("logic", "admin"), ("inference", "metrics")])
def test_silent_connections_to_an_admin_port_keep_no_probe_out(stack: Stack, unit: str, label: str) -> None:
    """Otherwise Kubernetes would restart a healthy pod."""
    host, port = stack.address(unit, label).split(":")
    with contextlib.ExitStack() as closing:
        for _ in range(150):
            closing.enter_context(socket.create_connection((host, int(port)), timeout=60))
        for path in ("/health/live", "/health/ready", "/metrics"):
            assert httpx.get(f"http://{host}:{port}{path}", timeout=60, trust_env=False).status_code == 200
