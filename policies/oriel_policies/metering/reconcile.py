"""Checks that nothing is missing: per device and hour, tenants + unbilled + idle = wall time."""

from dataclasses import dataclass

TOLERANCE = 0.01


@dataclass(slots=True, kw_only=True)
class DeviceHour:
    """The sums of one device of one instance in one hour, in nanoseconds.

    tenants_ns, unbilled_ns: device time charged to tenants, and to nobody.
    busy_ns, wall_ns: busy time and watched time of the device, measured apart from charges.
    open_ns: time of batches that still ran at the end of the hour, minus that at its begin; a batch is charged when it
    ends.
    """

    tenants_ns: int = 0
    unbilled_ns: int = 0
    busy_ns: int = 0
    wall_ns: int = 0
    open_ns: int = 0

    @property
    def idle_ns(self) -> int:
        """The time in which nothing ran."""
        return self.wall_ns - self.busy_ns

    @property
    def difference_ns(self) -> int:
        """Return by how many nanoseconds the sum exceeds the wall time; negative if time is missing."""
        return self.tenants_ns + self.unbilled_ns + self.open_ns + self.idle_ns - self.wall_ns

    @property
    def ratio(self) -> float:
        """The difference as a share of the busy time, which is what is charged; 0 of a device that was idle."""
        most = max(self.busy_ns, self.tenants_ns + self.unbilled_ns)
        return abs(self.difference_ns) / most if most else 0.0

    @property
    def good(self) -> bool:
        """Return whether the difference is tolerable."""
        return self.ratio <= TOLERANCE
