"""A gRPC client that sends message frames exactly as given, which client libraries do not allow."""

import asyncio
from dataclasses import dataclass, field

import h2.config
import h2.connection
import h2.events

__all__ = ["RawAnswer", "framed", "raw_call"]


@dataclass
class RawAnswer:
    """What came back. trailers: those of the answer, or the fields of its head if it has no trailers."""

    trailers: dict[str, str] = field(default_factory=dict)
    data: bytes = b""

    @property
    def status(self) -> int:
        """The gRPC status; -1 if there is none."""
        return int(self.trailers.get("grpc-status", -1))


def framed(message: bytes, *, compressed: bool = False) -> bytes:
    """A message with its prefix of five bytes."""
    return bytes((compressed,)) + len(message).to_bytes(4, "big") + message


async def raw_call(
    address: str,
    path: str,
    metadata: dict[str, str],
    body: bytes,
    *,
    encoding: str = "gzip",
    end: bool = True,
    kind: str = "application/grpc",
) -> RawAnswer:
    """Send one call with this body, unchanged, and wait for its end."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding="utf-8"))
    connection.initiate_connection()
    fields = [
        (":method", "POST"),
        (":scheme", "http"),
        (":authority", address),
        (":path", path),
        ("content-type", kind),
        ("te", "trailers"),
        ("grpc-encoding", encoding),
        *metadata.items(),
    ]
    connection.send_headers(1, fields)
    answer, left, ended = RawAnswer(), body, False
    try:
        while not ended:
            while left and (room := min(connection.local_flow_control_window(1), 16384)) > 0:
                connection.send_data(1, left[:room])
                left = left[room:]
                if end and not left:
                    connection.end_stream(1)
            writer.write(connection.data_to_send())
            data = await reader.read(65536)
            for event in connection.receive_data(data) if data else ():
                if isinstance(event, h2.events.ResponseReceived | h2.events.TrailersReceived):
                    answer.trailers.update({str(name): str(value) for name, value in event.headers})
                elif isinstance(event, h2.events.DataReceived):
                    answer.data += event.data
                    connection.acknowledge_received_data(event.flow_controlled_length, 1)
                elif isinstance(event, h2.events.StreamEnded | h2.events.StreamReset):
                    ended = True
            ended = ended or not data
    finally:
        writer.close()
    return answer
