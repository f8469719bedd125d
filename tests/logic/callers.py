"""A client of the service port that can leave, and what the server has counted."""

import asyncio
from typing import Any


class Connection:
    """A client that can leave."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def call(cls, port: int, service: str, body: bytes, *, declared: int | None = None) -> "Connection":
        connection = cls(*await asyncio.open_connection("127.0.0.1", port))
        size = len(body) if declared is None else declared
        head = f"POST /v1/services/{service} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {size}\r\n\r\n"
        connection.writer.write(head.encode() + body)
        return connection

    async def status(self) -> int:
        return int((await self.reader.readline()).split()[1])

    def leave(self) -> None:
        self.writer.transport.abort()


def counted(logic: Any, service: str, outcome: str) -> float:
    labels = {"service": service, "outcome": outcome}
    return logic.unit.metrics.registry.get_sample_value("oriel_logic_requests_total", labels) or 0
