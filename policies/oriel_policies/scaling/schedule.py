"""Hours of the week in which a pool has a larger minimum, on the clock of a time zone.

A window is written as `from` and `to`: "Mon-Fri 08:00" and "18:00". A `to` at or before `from` is on the next day; no
days are all days. When clocks are changed, a time that is skipped or comes twice is understood so that the window is
the longer one: a replica too many for an hour, twice a year, is better than one that is missing.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from typing import Final
from zoneinfo import ZoneInfo

DAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_DAY_MINUTES: Final = 24 * 60
_CLOCK: Final = re.compile(r"([01][0-9]|2[0-3]):([0-5][0-9])\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A weekly period in which a pool has at least `minimum` replicas.

    days: days of the week on which it begins; 0 is Monday.
    begins, ends: minutes since midnight of the day; ends > begins, and beyond 24 hours if it is on the next day.
    """

    days: tuple[int, ...]
    begins: int
    ends: int
    zone: str
    minimum: int

    def includes(self, epoch_s: float, ahead_s: float = 0.0) -> bool:
        """Return whether a moment lies in the window, or in the `ahead_s` seconds before it."""
        zone = time_zone(self.zone)
        day = datetime.fromtimestamp(epoch_s, zone).replace(tzinfo=None, fold=0, hour=0, minute=0, second=0)
        day = day.replace(microsecond=0) - timedelta(days=1)
        last = datetime.fromtimestamp(epoch_s + ahead_s, zone).replace(tzinfo=None)
        while day <= last:
            if day.weekday() in self.days:
                begins_s = min(_epochs(day, self.begins, zone))
                if begins_s - ahead_s <= epoch_s < max(_epochs(day, self.ends, zone)):
                    return True
            day += timedelta(days=1)
        return False

    def __str__(self) -> str:
        first, last = self.days[0], self.days[-1]
        days = ",".join([DAYS[day] for day in self.days])
        if last - first + 1 == len(self.days) > 2:
            days = f"{DAYS[first]}-{DAYS[last]}"
        ends = self.ends if self.ends <= _DAY_MINUTES else self.ends - _DAY_MINUTES
        return f"{days} {_clock(self.begins)} to {_clock(ends)} {self.zone}"


def scheduled_minimum(windows: Sequence[Window], epoch_s: float, ahead_s: float) -> int:
    """Return the largest minimum of the windows that include this moment, or will in `ahead_s`; 0 if there are none."""
    return max([window.minimum for window in windows if window.includes(epoch_s, ahead_s)], default=0)


def read_window(begins: str, ends: str, zone: str, minimum: int) -> Window:
    """Return the window that a document describes. Raises ValueError with the reason."""
    days, _, clock = begins.rpartition(" ")
    first, last = _minutes(clock), _DAY_MINUTES if ends == "24:00" else _minutes(ends)
    if first == last:
        raise ValueError("`from` and `to` are the same time: a whole day is from 00:00 to 24:00")
    if last < first:
        last += _DAY_MINUTES
    time_zone(zone)
    return Window(days=_days(days), begins=first, ends=last, zone=zone, minimum=minimum)


def time_zone(name: str) -> tzinfo:
    """Return the time zone of this name. Raises ValueError."""
    if name == "UTC":
        return UTC
    try:
        return ZoneInfo(name)
    except (KeyError, ValueError, OSError) as error:
        raise ValueError(
            f"this machine knows no time zone {name[:100]!r}: names are those of the tz database, such as Europe/Berlin"
        ) from error


def _epochs(day: datetime, minutes: int, zone: tzinfo) -> tuple[float, float]:
    """The moments at which clocks of the zone show a time of this day: two that differ where they are changed."""
    shown = day + timedelta(minutes=minutes)
    return shown.replace(tzinfo=zone, fold=0).timestamp(), shown.replace(tzinfo=zone, fold=1).timestamp()


def _minutes(text: str) -> int:
    match = _CLOCK.match(text)
    if match is None:
        raise ValueError(f"{text[:20]!r} is not a time: write 08:00, or days and a time, Mon-Fri 08:00")
    return int(match[1]) * 60 + int(match[2])


def _clock(minutes: int) -> str:
    return f"{minutes // 60:02}:{minutes % 60:02}"


def _days(text: str) -> tuple[int, ...]:
    """Return the days of `Mon-Fri` or `Sat,Sun`; all days for an empty text. `Fri-Mon` runs over the weekend."""
    if not text:
        return tuple(range(len(DAYS)))
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if first not in DAYS or (dash and last not in DAYS):
            raise ValueError(f"{part.strip()[:20]!r} is not a day: they are {', '.join(DAYS)}, or Mon-Fri")
        begins, length = DAYS.index(first), len(DAYS)
        count = (DAYS.index(last) - begins) % length if dash else 0
        found.update((begins + number) % length for number in range(count + 1))
    return tuple(sorted(found))
