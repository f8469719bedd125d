"""Offers a flood of bronze and a little gold to a gateway, on schedule, from one thread; prints what came back.

flood.py '{"protocol": "http/1.1", "port": 8080, ...}' (see `Plan`). A real client would take too much of its core to
offer more than a gateway can refuse, so requests are made of bytes that are ready, but for a request id each, and of
answers only the end and the status are read.

Gold's answers are timed from when they were scheduled. An arrival of the flood for which no connection or stream is
free is left out: the flood is what so many impatient connections can do.
"""

import json
import os
import select
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
BODY = b"x" * 1024
PATIENCE_S = 2.0
LATE_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """protocol: http/1.1, http/2 or grpc. rate: of the flood per second, 0: each connection or stream goes on as soon
    as it is answered. mixed: gold's streams are on the flood's connections.
    """

    protocol: str
    port: int
    seconds: float
    rate: float
    connections: int
    streams: int
    gold_rate: float
    mixed: bool = False


def literal(name: bytes, value: bytes) -> bytes:
    assert len(name) < 127 and len(value) < 127
    return b"\x00" + bytes((len(name),)) + name + bytes((len(value),)) + value


def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


class Connection:
    """One socket. gold: stream -> when the request was due; free: streams or requests that may be sent."""

    def __init__(self, plan: Plan, tenant: str, model: str) -> None:
        self.plan = plan
        self.sock = socket.socket()
        self.sock.setblocking(False)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.connect_ex(("127.0.0.1", plan.port))
        self.out = b""
        self.gold: dict[int, float] = {}
        self.tenant, self.model = tenant, model

    def fileno(self) -> int:
        return self.sock.fileno()

    def flush(self) -> None:
        try:
            self.out = self.out[self.sock.send(self.out) :]
        except OSError:
            return  # not connected yet, or its buffer is full, or reading finds that it is closed


class Http1(Connection):
    """One request at a time."""

    free = 1

    def __init__(self, plan: Plan, tenant: str, model: str) -> None:
        super().__init__(plan, tenant, model)
        self.head = (
            f"POST /v2/models/{model}/infer HTTP/1.1\r\nhost: x\r\nauthorization: Bearer bench-{tenant}\r\n"
            f"content-type: application/json\r\ncontent-length: {len(BODY)}\r\nx-request-id: "
        ).encode()
        self.answer = b""

    def ask(self, number: int, due: float, tenant: str, model: str) -> None:
        self.free = 0
        if tenant == "gold":
            self.gold[0] = due
        self.out += b"%b%016x\r\n\r\n%b" % (self.head, number, BODY)

    def read(self, found: "Found", now: float) -> int:
        data = self.sock.recv(65536)
        if not data:
            raise ConnectionResetError
        self.answer = answer = self.answer + data if self.answer else data
        stop = answer.find(b"\r\n\r\n")
        if stop < 0:
            return 0
        at = answer.find(b"content-length: ", 0, stop) + 16
        if len(answer) < stop + 4 + int(answer[at : answer.index(b"\r\n", at)]):
            return 0
        self.answer, self.free = b"", 1
        found.ended(self.gold.pop(0, 0.0), answer.startswith(b"HTTP/1.1 200"), now)
        return 1


class Http2(Connection):
    """Many streams."""

    def __init__(self, plan: Plan, tenant: str, model: str) -> None:
        super().__init__(plan, tenant, model)
        self.out = PREFACE + frame(4, 0, 0, b"") + frame(8, 0, 0, (2**31 - 65536).to_bytes(4, "big"))
        self.free, self.next, self.window = plan.streams, 1, 65535
        self.left = b""
        self.unread = 0
        self.heads: dict[tuple[str, str], tuple[bytes, bytes]] = {}
        self.status: dict[int, bool] = {}

    def request(self, tenant: str, model: str) -> tuple[bytes, bytes]:
        grpc = self.plan.protocol == "grpc"
        path = "/inference.GRPCInferenceService/ModelInfer" if grpc else f"/v2/models/{model}/infer"
        head = b"\x83\x86" + b"\x04" + bytes((len(path),)) + path.encode() + b"\x01\x01x"
        head += literal(b"authorization", f"Bearer bench-{tenant}".encode())
        head += literal(b"content-type", b"application/grpc" if grpc else b"application/json")
        if not grpc:
            return head, BODY
        message = b"\x0a" + bytes((len(model),)) + model.encode() + b"\x3a\x80\x08" + BODY
        return head + literal(b"te", b"trailers"), b"\0" + len(message).to_bytes(4, "big") + message

    def ask(self, number: int, due: float, tenant: str, model: str) -> None:
        if (known := self.heads.get((tenant, model))) is None:
            known = self.heads[tenant, model] = self.request(tenant, model)
        head, body = known
        stream = self.next
        self.next += 2
        self.free -= 1
        self.window -= len(body)
        if tenant == "gold":
            self.gold[stream] = due
        head += b"\x00\x0cx-request-id\x10%016x" % number
        self.out += frame(1, 4, stream, head) + frame(0, 1, stream, body)

    def read(self, found: "Found", now: float) -> int:
        data = self.sock.recv(262144)
        if not data:
            raise ConnectionResetError
        data = self.left + data if self.left else data
        at, size, ended = 0, len(data), 0
        while size - at >= 9:
            length = int.from_bytes(data[at : at + 3], "big")
            end = at + 9 + length
            if end > size:
                break
            kind, flags = data[at + 3], data[at + 4]
            stream = int.from_bytes(data[at + 5 : at + 9], "big")
            if kind == 1:
                if stream in self.gold:
                    block = data[at + 9 : end]
                    if self.plan.protocol != "grpc":
                        self.status[stream] = b"200" in block[:8] or block[:1] == b"\x88"
                    elif flags & 1:
                        self.status[stream] = b"grpc-status\x010" in block
            elif kind == 0:
                self.unread += length
                if self.unread > 2**30:
                    self.out += frame(8, 0, 0, self.unread.to_bytes(4, "big"))
                    self.unread = 0
            elif kind == 4:
                if not flags & 1:
                    self.out += frame(4, 1, 0, b"")
            elif kind == 6:
                if not flags & 1:
                    self.out += frame(6, 1, 0, data[at + 9 : end])
            elif kind == 8:
                if stream == 0:
                    self.window += int.from_bytes(data[at + 9 : end], "big")
            elif kind == 7:
                raise ConnectionResetError
            if (kind < 2 and flags & 1) or kind == 3:
                ended += 1
                found.ended(self.gold.pop(stream, 0.0), self.status.pop(stream, False), now)
            at = end
        self.left = data[at:]
        self.free += ended
        return ended


class Found:
    """The results of a run. asked: of the flood; left_out: arrivals for which no connection was free."""

    def __init__(self) -> None:
        self.asked = self.left_out = self.ended_count = self.gold_asked = self.gold_failed = self.lost = 0
        self.times: list[float] = []
        self.lateness: list[float] = []

    def ended(self, due: float, good: bool, now: float) -> None:
        if not due:
            self.ended_count += 1
        elif good:
            self.times.append(now - due)
        else:
            self.gold_failed += 1


def main() -> None:
    plan = Plan(**json.loads(sys.argv[1]))
    make = Http1 if plan.protocol == "http/1.1" else Http2
    poll = select.epoll()
    by_fd: dict[int, Http1 | Http2] = {}
    found = Found()

    def opened(tenant: str, model: str) -> Http1 | Http2:
        connection = make(plan, tenant, model)
        by_fd[connection.fileno()] = connection
        poll.register(connection.fileno(), select.EPOLLIN)
        return connection

    flood: deque[Http1 | Http2] = deque(opened("bronze", "held") for _ in range(plan.connections))
    own = 8 if plan.protocol == "http/1.1" else 2
    gold: deque[Http1 | Http2] = flood if plan.mixed else deque(opened("gold", "quick") for _ in range(own))
    keep = 8 if plan.mixed else 0  # streams of each connection that are gold's
    flood_free = deque(flood) if make is Http1 else flood
    time.sleep(0.2)
    number = int(time.time()) << 24
    began = time.monotonic()
    warm = began + 0.5 if plan.rate else began  # gold begins when the flood is there
    ends = warm + plan.seconds
    dirty: dict[Http1 | Http2, None] = dict.fromkeys(by_fd.values())
    cpu = time.process_time()

    def ask_flood(due: float) -> bool:
        nonlocal number
        if make is Http1:
            if not flood_free:
                return False
            connection = flood_free.popleft()
        else:
            for _ in range(len(flood)):
                connection = flood[0]
                flood.rotate(-1)
                if connection.free > keep and connection.window > 2048:
                    break
            else:
                return False
        number += 1
        connection.ask(number, due, "bronze", "held")
        dirty[connection] = None
        found.asked += 1
        return True

    def ask_gold(due: float) -> None:
        nonlocal number
        number += 1
        found.gold_asked += 1
        new = make is Http1 and found.gold_asked % 10 == 0  # one in ten on a new connection
        connection = None
        if not new:
            for _ in range(len(gold)):
                gold.rotate(-1)
                if gold[0].free > 0 and (make is Http1 or gold[0].window > 2048):
                    connection = gold[0]
                    break
        if connection is None:
            connection = opened("gold", "quick")
            if not plan.mixed:
                gold.append(connection)
        connection.ask(number, due, "gold", "quick")
        dirty[connection] = None

    flooded = golden = 0
    now = began
    while now < ends + PATIENCE_S:
        if now < ends:
            if plan.rate:
                wanted = int((now - began) * plan.rate)
                for _ in range(min(wanted - flooded, 2000)):
                    if not ask_flood(now):
                        found.left_out += wanted - flooded
                        flooded = wanted
                        break
                    flooded += 1
            else:
                while ask_flood(now):
                    pass
            while (due := warm + golden / plan.gold_rate if plan.gold_rate else ends) <= now:
                golden += 1
                found.lateness.append(now - due)
                ask_gold(due)
        elif len(found.times) + found.gold_failed >= found.gold_asked:
            break
        for connection in list(dirty):
            connection.flush()
            if not connection.out:
                del dirty[connection]
        for fd, _ in poll.poll(0.0005, 256):
            connection = by_fd[fd]
            try:
                ended = connection.read(found, time.monotonic())
                if make is Http1 and ended and connection.tenant == "bronze":
                    flood_free.append(connection)
                if connection.out:
                    dirty[connection] = None
            except BlockingIOError:
                continue
            except OSError:
                found.lost += 1
                poll.unregister(fd)
                del by_fd[fd]
                dirty.pop(connection, None)
                found.gold_failed += len(connection.gold)
                connection.sock.close()
                for several in (flood, gold):
                    if connection in several:
                        several.remove(connection)
                        again = opened(connection.tenant, connection.model)
                        several.append(again)
                        if several is flood and make is Http1:
                            flood_free.append(again)
                        break
        now = time.monotonic()
    seconds = now - began
    times, late = sorted(found.times), sorted(found.lateness) or [0.0]
    print(
        json.dumps(
            {
                "offered_rate": (found.asked + found.left_out) / (ends - began),
                "refused_rate": found.ended_count / (min(now, ends) - began),
                "left_out": found.left_out,
                "lost": found.lost,
                "gold_asked": found.gold_asked,
                "gold_failed": found.gold_failed,
                "gold_ms": [round(1e3 * value, 3) for value in times],
                "late_p99_ms": 1e3 * late[int(len(late) * 0.99)],
                "busy": (time.process_time() - cpu) / seconds,
                "pid": os.getpid(),
            }
        )
    )


main()
