"""A gateway on a folder of documents that a test changes, and what its admin port says about them."""

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from oriel_gateway.admin.app import admin_app
from oriel_gateway.admin.reload import Reloader
from oriel_gateway.core import Gateway
from oriel_gateway.documents.compiler import FolderCompiler
from oriel_gateway.documents.source import FolderSource, Stamp
from oriel_policies.documents import Snapshot

from .stack import gateway


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, data in files.items():
        beside = folder / f".{name}"
        beside.write_bytes(data)
        os.replace(beside, folder / name)


async def compile_folder(folder: Path) -> Snapshot:
    """Compile the documents of a folder once."""
    with FolderCompiler(folder) as compiler:
        return await compiler.compile()


@asynccontextmanager
async def watched(folder: Path, files: dict[str, bytes], **more: float) -> AsyncIterator[tuple[int, Gateway, Reloader]]:
    """A gateway on the documents of a folder: its port, its core, and the object that reloads the documents."""
    write(folder, files)
    source = FolderSource(folder)
    async with gateway(files) as (port, core):
        yield port, core, Reloader(core, source.stamp, lambda: compile_folder(folder), seen=source.stamp(), **more)


async def asked_text(core: Gateway, path: str) -> str:
    """Return the answer of the admin port, without a socket."""
    sent: list[dict] = []  # type: ignore[type-arg]

    async def receive() -> dict:  # type: ignore[type-arg]
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message) -> None:  # type: ignore[no-untyped-def]
        sent.append(message)

    headers = [(b"host", b"localhost")]
    scope = {"type": "http", "method": "GET", "path": path, "headers": headers, "query_string": b"", "root_path": ""}
    await admin_app(core)({**scope, "client": ("127.0.0.1", 1)}, receive, send)
    return b"".join(message.get("body", b"") for message in sent).decode()


async def asked(core: Gateway, path: str) -> dict:  # type: ignore[type-arg]
    answer: dict = json.loads(await asked_text(core, path))  # type: ignore[type-arg]
    return answer


class Moving:
    """A source of documents whose stamp changes a given number of times, as if documents were being written."""

    def __init__(self, changes: int) -> None:
        self.changes = changes
        self.number = 0

    def stamp(self) -> Stamp:
        self.number += self.changes > 0
        self.changes -= 1
        return (("all.toml", self.number, 0, 0),)
