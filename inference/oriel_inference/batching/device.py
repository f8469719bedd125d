"""The devices of this server: for how long each was busy, and who used it.

An execution begins and ends in the thread that runs it, so the clocks are behind a lock. The use of a batch's calls
is written on the loop, when they are answered (`Devices.charge`).
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from threading import Lock

from oriel_inference.batching.call import Call
from oriel_policies.metering.device_clock import DeviceClock
from oriel_policies.metering.shares import split
from oriel_policies.metering.usage import UsageBook, UsageKey, UsageRow, counters
from oriel_wire.context import CallContext
from oriel_wire.usage.lines import UsageLine

HOST = "host"
UNIT = "inference"
MAX_KNOWN = 4096  # callers that one version remembers the rows of


class Device:
    """One device. name: "host", or "gpu0". device_class: the class that prices name, such as "cpu" or "h100".

    `start` and `end` are called by any thread, once each per execution.
    """

    __slots__ = ("_clock", "_lock", "_now_ns", "_unbilled_ns", "device_class", "name")

    def __init__(self, name: str, device_class: str, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.name = name
        self.device_class = device_class
        self._clock = DeviceClock()
        self._lock = Lock()
        self._now_ns = now_ns
        self._unbilled_ns: Counter[str] = Counter()

    def start(self) -> int:
        """Begin an execution; the result goes to `end`."""
        with self._lock:
            return self._clock.start(self._now_ns())

    def end(self, started: int, unbilled: str = "") -> int:
        """End an execution; return the nanoseconds to charge.

        unbilled: why nobody is charged, one of `usage.UNBILLED`; then the result is 0.
        """
        with self._lock:
            charge = self._clock.end(started, self._now_ns())
            if not unbilled:
                return charge
            self._unbilled_ns[unbilled] += charge
            return 0

    def write_off(self, charge: int, why: str) -> None:
        """Charge nobody for what `end` returned."""
        with self._lock:
            self._unbilled_ns[why] += charge

    def read(self) -> tuple[int, int]:
        """Return for how long the device was busy until now, and how much of that was charged, in nanoseconds."""
        with self._lock:
            self._clock.advance(self._now_ns())
            return self._clock.busy_ns, self._clock.charged_ns

    def take_unbilled(self) -> Counter[str]:
        """Return the nanoseconds that nobody is charged for since the last call, by reason."""
        with self._lock:
            taken, self._unbilled_ns = self._unbilled_ns, Counter()
            return taken


class DeviceTime:
    """The device time of one execution that pauses while it waits for others. It begins when it is made."""

    __slots__ = ("_charge_ns", "_device", "_started")

    def __init__(self, device: Device) -> None:
        self._device = device
        self._charge_ns = 0
        self._started: int | None = device.start()

    @property
    def runs(self) -> bool:
        """Return whether it counts."""
        return self._started is not None

    def pause(self) -> int:
        """Stop counting; return the nanoseconds to charge so far. Nothing happens if it does not count."""
        if self._started is not None:
            self._charge_ns += self._device.end(self._started)
            self._started = None
        return self._charge_ns

    def resume(self) -> None:
        """Continue counting device time. Nothing happens if it counts."""
        if self._started is None:
            self._started = self._device.start()

    def fail(self) -> None:
        """End; nobody is charged."""
        self._device.write_off(self.pause(), "failed")


class Devices:
    """The devices of a server, and the book of their use. Single writer of the book: the loop.

    classes: name -> class of the devices that have another class than "cpu" or "gpu".
    """

    def __init__(
        self, classes: Mapping[str, str] | None = None, *, now_ns: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._classes = classes or {}
        self._now_ns = now_ns
        self._devices: dict[str, Device] = {}
        self._lock = Lock()
        self._book = UsageBook()
        self.host = self.find(HOST)

    def find(self, name: str) -> Device:
        """Return a device by its name; from any thread, because models are loaded in threads."""
        with self._lock:
            found = self._devices.get(name)
            if found is None:
                device_class = self._classes.get(name) or ("cpu" if name == HOST else "gpu")
                found = self._devices[name] = Device(name, device_class, self._now_ns)
            return found

    def all(self) -> list[Device]:
        """Return every device that is known."""
        with self._lock:
            return list(self._devices.values())

    @property
    def book(self) -> UsageBook:
        """The rows of what was used until now; on the loop."""
        for device in self.all():
            for why, ns in device.take_unbilled().items():
                self._unbilled(device, why).device_ns += ns
        return self._book

    def charge(self, device: Device, device_ns: int, calls: Sequence[Call]) -> list[int]:
        """Charge an execution to its calls by their rows; return the share of each call. Calls that ended meanwhile
        are not charged.
        """
        shares = split(device_ns, [call.rows for call in calls])
        for call, share in zip(calls, shares, strict=True):
            row = call.usage
            if call.finished:
                row = self._unbilled(device, "left")
            elif row is None:
                row = self._unbilled(device, "untenanted")
            elif row.key.device != device.name:
                row = self._book.row(row.key._replace(device=device.name, device_class=device.device_class))
            row.touch()
            row.device_ns += share
        return shares

    def _unbilled(self, device: Device, why: str) -> UsageRow:
        return self._book.row(UsageKey("", "", "", "", device.name, device.device_class, why))


class Accounts:
    """The rows of one model version: who calls it, on which device."""

    __slots__ = ("_book", "_device", "_generation", "_rows", "_target", "_version")

    def __init__(self, devices: Devices, target: str, version: str, device: Device) -> None:
        self._book = devices._book
        self._target = target
        self._version = version
        self._device = device
        self._rows: dict[tuple[str, str, str], UsageRow] = {}
        self._generation = 0

    def of(self, ctx: CallContext) -> UsageRow:
        """Return the row of the caller of a request."""
        key = (ctx.tenant, ctx.tier, ctx.unbilled)
        row = self._rows.get(key)
        if row is None or self._generation != self._book.generation:
            row = self._find(*key)
        return row

    def _find(self, tenant: str, tier: str, unbilled: str) -> UsageRow:
        book, device = self._book, self._device
        if self._generation != book.generation:
            self._rows.clear()
            self._generation = book.generation
        why = unbilled or ("" if tenant else "untenanted")
        row = book.row(UsageKey(tenant, tier, self._target, self._version, device.name, device.device_class, why))
        if len(self._rows) >= MAX_KNOWN:
            self._rows.clear()
        self._rows[tenant, tier, unbilled] = row
        return row


class UsageLines:
    """Writes what the devices were used for as lines of the usage ledger. Used by one reader, on the loop.

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
