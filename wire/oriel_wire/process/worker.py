"""The place of one worker process among those of a server, which its parent hands down in the environment."""

import os
import socket
from typing import Final

import msgspec

from oriel_wire.process.process import listen

VARIABLE: Final = "ORIEL_WORKER"


class Worker(msgspec.Struct, frozen=True, kw_only=True):
    """One worker. The first one also keeps what one process alone may keep.

    index: its number, from 0. count: the number of workers. link: descriptor of the socket to the parent.
    sockets: descriptors of its listening sockets by name, such as "gateway HTTP".
    """

    index: int
    count: int
    link: int = -1
    sockets: dict[str, int] = {}

    @property
    def first(self) -> bool:
        return self.index == 0


def inherited() -> Worker | None:
    """Return the place of this process among workers; None if it serves by itself. Its children inherit none."""
    text = os.environ.pop(VARIABLE, "")
    if not text:
        return None
    worker = msgspec.json.decode(text, type=Worker)
    for descriptor in (worker.link, *worker.sockets.values()):
        os.set_inheritable(descriptor, False)
    return worker


def listening(worker: Worker | None, host: str, port: int, what: str) -> socket.socket:
    """Return the listening socket named `what`: the worker's own, or a new one. Raises StartFailed."""
    return listen(host, port, what) if worker is None else socket.socket(fileno=worker.sockets[what])
