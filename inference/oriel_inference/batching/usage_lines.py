"""Writes what the devices of this server were used for as lines of the usage ledger."""

import time
from collections.abc import Callable

from oriel_inference.batching.device import Devices
from oriel_policies.metering.usage import counters
from oriel_wire.usage.lines import UsageLine

UNIT = "inference"


class UsageLines:
    """Reads the book of the devices. Used by one reader, on the loop.

    now_ns: the clock of the devices.
    """

    def __init__(self, devices: Devices, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._devices = devices
        self._now_ns = now_ns
        self._read_ns = now_ns()
        self._busy_ns: dict[str, int] = {}

    def added(self, minute: str) -> list[UsageLine]:
        """Return what was used since the last call, and how long each device was busy."""
        lines = [
            UsageLine(minute=minute, unit=UNIT, **key._asdict(), **counters(values))
            for key, values in self._devices.book.added()
        ]
        before, self._read_ns = self._read_ns, self._now_ns()
        for device in self._devices.all():
            busy_ns, charged_ns = device.read()
            lines.append(
                UsageLine(
                    kind="device",
                    minute=minute,
                    unit=UNIT,
                    device=device.name,
                    device_class=device.device_class,
                    busy_ns=busy_ns - self._busy_ns.get(device.name, 0),
                    wall_ns=self._read_ns - before,
                    open_ns=busy_ns - charged_ns,
                )
            )
            self._busy_ns[device.name] = busy_ns
        return lines
