"""Memory that the gateway needs for idle HTTP/2 connections and for streams whose request is not complete.

    python benchmarks/growth.py http2 [--connections 5000] [--streams 10000] [--rounds 3]

Each connection has had one answer before it is idle. The streams have sent an authenticated head and none of the body
that it announces, 127 of them on each connection, whose own memory does not count. A new gateway for each round;
memory is the growth of its proportional set size, so what the kernel holds for a socket is not in it. Medians.
Needs Linux and as many open files as connections.
"""

import argparse
import json
import resource
import socket
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

from harness.processes import free_ports, gateway, pss_mb

from gateway_bench.contenders import upstream
from gateway_bench.growth import documents
from oriel_wire.h2.frames import DATA, END_HEADERS, END_STREAM, FRAME, HEADERS, PREFACE, SETTINGS, SETTINGS_ACK, frame
from oriel_wire.h2.hpack import encode_block

CONNECTION_KB, STREAM_KB = 20.0, 6.0  # at most, each
STREAMS = 127  # of one connection, which takes one more
GET = encode_block([(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/v2/health/live"), (b":authority", b"x")])
POST = encode_block(
    [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", b"/v2/models/m0/infer"),
        (b":authority", b"x"),
        (b"authorization", b"Bearer k0"),
        (b"content-length", b"1024"),
    ]
)


def answered(port: int) -> socket.socket:
    """A connection on which one request was answered."""
    sock = socket.create_connection(("127.0.0.1", port))
    sock.sendall(PREFACE + frame(SETTINGS, 0, 0) + SETTINGS_ACK + frame(HEADERS, END_HEADERS | END_STREAM, 1, GET))
    data = b""
    while not ended(data):
        piece = sock.recv(65536)
        if not piece:
            raise SystemExit("the gateway has closed a connection: are as many open files allowed?")
        data += piece
    return sock


def ended(data: bytes) -> bool:
    """Return whether the whole frames of `data` end a stream."""
    start = 0
    while len(data) - start >= 9:
        head, flags, _ = FRAME.unpack_from(data, start)
        start += 9 + (head >> 8)
        if head & 255 in (DATA, HEADERS) and flags & END_STREAM and start <= len(data):
            return True
    return False


def idle_connections(pid: int, port: int, count: int) -> float:
    """KB of each."""
    kept = [answered(port) for _ in range(100)]  # what the first ones load is not of the others
    before = pss_mb(pid)
    kept += [answered(port) for _ in range(count)]
    found = (pss_mb(pid) - before) * 1024 / count
    for sock in kept:
        sock.close()
    return found


def idle_streams(pid: int, port: int, count: int) -> float:
    """KB of each."""
    kept = [answered(port) for _ in range(-(-count // STREAMS) + 1)]
    begin(kept[0], STREAMS)
    before = pss_mb(pid)
    left = count
    for sock in kept[1:]:
        begin(sock, min(left, STREAMS))
        left -= STREAMS
    found = (pss_mb(pid) - before) * 1024 / count
    for sock in kept:
        sock.close()
    return found


def begin(sock: socket.socket, count: int) -> None:
    """Open streams, and wait until they are read: the request behind them is answered."""
    heads = b"".join([frame(HEADERS, END_HEADERS, 2 * number + 3, POST) for number in range(count)])
    sock.sendall(heads + frame(HEADERS, END_HEADERS | END_STREAM, 2 * count + 3, GET))
    data = b""
    while not ended(data):
        data += sock.recv(65536)


def median(measure: Callable[[int, int, int], float], count: int, rounds: int) -> float:
    values = []
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            ports = free_ports(1)
            (Path(folder) / "all.toml").write_text(documents(ports=ports))
            with upstream(ports), gateway(Path(folder)) as (pid, port, _):
                values.append(measure(pid, port, count))
    return statistics.median(values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connections", type=int, default=5000)
    parser.add_argument("--streams", type=int, default=10_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    found = {
        "connection": median(idle_connections, args.connections, args.rounds),
        "stream": median(idle_streams, args.streams, args.rounds),
    }
    if args.json:
        print(json.dumps(found))
        return
    for name, bound in (("connection", CONNECTION_KB), ("stream", STREAM_KB)):
        word = "met" if found[name] <= bound else "missed"
        print(f"{name:11} {found[name]:6.1f} KB  {word} (<= {bound:g})")
