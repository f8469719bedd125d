"""A gRPC call whose message is already compressed; client libraries would need the whole message in memory first."""

import socket
import struct
from dataclasses import dataclass, field

DATA, HEADERS, RESET, SETTINGS, PING, AWAY, WINDOW = 0, 1, 3, 4, 6, 7, 8
END_STREAM, END_HEADERS, ACK = 1, 4, 1
FRAME = 16_384
FIRST_WINDOW = 65_535
INITIAL_WINDOW_SIZE = 4


@dataclass
class Call:
    """One call on a connection of its own. answer: the header blocks that were received, not decoded."""

    sock: socket.socket
    windows: dict[int, int] = field(default_factory=lambda: {0: FIRST_WINDOW, 1: FIRST_WINDOW})
    initial: int = FIRST_WINDOW
    answer: bytes = b""
    ended: bool = False

    def frame(self, kind: int, flags: int, stream: int, payload: bytes = b"") -> None:
        self.sock.sendall(
            struct.pack(">I", len(payload))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + payload
        )

    def read(self) -> None:
        """Read one frame."""
        head = self._exactly(9)
        kind, flags, stream = head[3], head[4], int.from_bytes(head[5:]) & 0x7FFF_FFFF
        payload = self._exactly(int.from_bytes(head[:3]))
        if kind == SETTINGS and not flags & ACK:
            for number, value in struct.iter_unpack(">HI", payload):
                if number == INITIAL_WINDOW_SIZE:
                    self.windows[1] += value - self.initial
                    self.initial = value
            self.frame(SETTINGS, ACK, 0)
        elif kind == PING and not flags & ACK:
            self.frame(PING, ACK, 0, payload)
        elif kind == WINDOW:
            self.windows[stream] = self.windows.get(stream, 0) + int.from_bytes(payload)
        elif kind == HEADERS:
            self.answer += payload
            self.ended = bool(flags & END_STREAM)
        elif kind in (RESET, AWAY):
            self.ended = True

    def _exactly(self, size: int) -> bytes:
        got = b""
        while len(got) < size:
            more = self.sock.recv(size - len(got))
            if not more:
                raise ConnectionError("the server closed the connection")
            got += more
        return got


def call(address: tuple[str, int], path: str, encoding: str, packed: bytes, timeout_s: float) -> bytes:
    """Send one message that is compressed by `encoding`; returns the server's headers and trailers as they were
    received.
    """
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
        "grpc-encoding": encoding,
    }
    block = b"".join(
        b"\0" + bytes((len(name),)) + name.encode() + bytes((len(value),)) + value.encode()
        for name, value in fields.items()
    )
    message = b"\1" + struct.pack(">I", len(packed)) + packed
    with socket.create_connection(address, timeout=timeout_s) as sock:
        made = Call(sock)
        sock.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
        made.frame(SETTINGS, 0, 0)
        made.frame(HEADERS, END_HEADERS, 1, block)
        while message and not made.ended:
            size = min(FRAME, len(message), *made.windows.values())
            if size <= 0:
                made.read()
                continue
            made.frame(DATA, END_STREAM if size == len(message) else 0, 1, message[:size])
            message = message[size:]
            for stream in made.windows:
                made.windows[stream] -= size
        while not made.ended:
            made.read()
        return made.answer
