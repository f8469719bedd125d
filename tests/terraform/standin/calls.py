"""The calls of Terraform to its providers, in order."""

import threading
import time
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Call:
    rpc: str  # ApplyResourceChange, ReadDataSource, ConfigureProvider
    type: str  # aws_vpc, data.aws_region; of ConfigureProvider the provider's source
    action: str  # create, update, delete, read, configure
    values: dict[str, Any]  # as made; of a delete: as it was
    at_s: float  # when it came, since the log began
    done_s: float
    id: str | None = None
    name: str | None = None
    failed: bool = False
    address: str | None = field(default=None)  # aws_vpc.main; found afterwards, in what terraform printed


class CallLog:
    """The log of calls. Written by the threads of the servers, read between two commands."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._calls: list[Call] = []

    def now_s(self) -> float:
        return time.monotonic() - self._began

    def add(
        self, rpc: str, type_name: str, action: str, values: dict[str, Any], at_s: float, failed: bool = False
    ) -> None:
        name = values.get("name")
        call = Call(rpc, type_name, action, values, at_s, self.now_s(), values.get("id"), name, failed)
        with self._lock:
            self._calls.append(call)

    def taken(self) -> list[Call]:
        """Return the calls since the last time, in the order in which they were made."""
        with self._lock:
            calls, self._calls = self._calls, []
        return calls
