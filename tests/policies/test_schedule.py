"""Windows of a schedule: what may be written, and which moments they include when clocks are changed."""

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from oriel_policies.scaling.schedule import DAYS, Window, read_window, scheduled_minimum

BERLIN = "Europe/Berlin"
ZONES = (BERLIN, "America/New_York", "Australia/Lord_Howe", "Asia/Kathmandu", "UTC")
HOUR_S = 3600.0


def at(text: str, zone: str = "UTC", *, fold: int = 0) -> float:
    moment = datetime.fromisoformat(text).replace(fold=fold)
    return moment.replace(tzinfo=UTC if zone == "UTC" else ZoneInfo(zone)).timestamp()


def shown(epoch_s: float, zone: str) -> datetime:
    """What clocks of the zone show at a moment."""
    return datetime.fromtimestamp(epoch_s, UTC if zone == "UTC" else ZoneInfo(zone)).replace(tzinfo=None)


def written(window: Window, moment: datetime) -> bool:
    """Whether a clock that shows this is inside the window as it is written."""
    minutes = moment.hour * 60 + moment.minute
    today = moment.weekday() in window.days and window.begins <= minutes < window.ends
    yesterday = (moment.weekday() - 1) % 7 in window.days and window.begins <= minutes + 24 * 60 < window.ends
    return today or yesterday


windows = st.builds(
    lambda days, begins, length, zone: Window(
        days=tuple(sorted(days)), begins=begins, ends=begins + length, zone=zone, minimum=1
    ),
    st.sets(st.integers(0, 6), min_size=1),
    st.integers(0, 24 * 60 - 1),
    st.integers(1, 24 * 60),
    st.sampled_from(ZONES),
)
# Around the nights of 2026 in which clocks of the zones are changed, and any other time.
changes = st.sampled_from(["2026-03-08", "2026-03-29", "2026-04-04", "2026-10-03", "2026-10-25", "2026-11-01"])
moments = st.one_of(
    st.builds(lambda day, minutes: at(day) + 60.0 * minutes, changes, st.integers(-1500, 2900)),
    st.floats(at("2020-01-01"), at("2040-01-01")),
)
NIGHT = Window(days=(6,), begins=150, ends=195, zone=BERLIN, minimum=1)  # Sun 02:30 to 03:15


@given(windows, moments)
@example(NIGHT, at("2026-03-29T01:05:00"))  # 03:05, five minutes after 01:59
@example(NIGHT, at("2026-10-25T00:45:00"))  # 02:45 for the first time
@example(NIGHT, at("2026-10-25T01:45:00"))  # 02:45 for the second time
def test_a_window_includes_what_its_clocks_show_and_is_longer_only_where_they_are_changed(
    window: Window, epoch_s: float
) -> None:
    inside = window.includes(epoch_s)
    if written(window, shown(epoch_s, window.zone)):
        assert inside
    elif inside:
        nights = {
            shown(epoch_s + hours * HOUR_S, window.zone) - shown(epoch_s, window.zone) - timedelta(hours=hours)
            for hours in range(-26, 27)
        }
        assert len(nights) > 1, "no clock is changed within a day"


@given(windows, moments, st.floats(0.0, 24 * HOUR_S))
def test_ahead_means_now_or_until_then(window: Window, epoch_s: float, ahead_s: float) -> None:
    ahead = window.includes(epoch_s, ahead_s)
    if window.includes(epoch_s) or window.includes(epoch_s + ahead_s):
        assert ahead
    if not ahead:
        assert not any(window.includes(epoch_s + ahead_s * step / 16) for step in range(17))


@given(windows)
def test_a_window_is_read_as_it_is_shown(window: Window) -> None:
    begins, _, rest = str(window).partition(" to ")
    ends, _, zone = rest.partition(" ")
    if window.ends - window.begins < 24 * 60:
        assert read_window(begins, ends, zone, 1) == window


def test_a_night_goes_on_over_midnight_and_a_weekend_over_the_end_of_the_week() -> None:
    night = read_window("Sat,Sun 22:00", "06:00", "UTC", 1)
    assert str(night) == "Sat,Sun 22:00 to 06:00 UTC"
    assert night.includes(at("2026-03-02T05:59:00")) and not night.includes(at("2026-03-02T06:00:00"))  # a Monday
    assert read_window("Fri-Mon 00:00", "24:00", "UTC", 1).days == (0, 4, 5, 6)
    assert read_window("08:00", "09:00", "UTC", 1).days == tuple(range(len(DAYS)))


def test_the_largest_minimum_of_the_open_windows_counts() -> None:
    windows = [read_window("08:00", "18:00", "UTC", 2), read_window("Mon 09:00", "10:00", "UTC", 5)]
    monday = at("2026-03-02")
    hours = {hour: scheduled_minimum(windows, monday + hour * HOUR_S, 0.0) for hour in (7, 8, 9, 10, 18)}
    assert hours == {7: 0, 8: 2, 9: 5, 10: 2, 18: 0}
    assert scheduled_minimum(windows, monday + 8 * HOUR_S - 60.0, 60.0) == 2, "replicas are there when it begins"
    assert scheduled_minimum([], monday, 60.0) == 0


@pytest.mark.parametrize(
    ("begins", "ends", "zone", "reason"),
    [
        ("8:00", "18:00", "UTC", "'8:00' is not a time"),
        ("Mon-Fri", "18:00", "UTC", "'Mon-Fri' is not a time"),
        ("08:00", "25:00", "UTC", "'25:00' is not a time"),
        ("24:00", "08:00", "UTC", "'24:00' is not a time"),
        ("Montag 08:00", "18:00", "UTC", "'Montag' is not a day"),
        ("Mon-Foo 08:00", "18:00", "UTC", "'Mon-Foo' is not a day"),
        ("Mon, 08:00", "18:00", "UTC", "'' is not a day"),
        ("08:00", "08:00", "UTC", "are the same time"),
        ("08:00", "18:00", "Berlin", "no time zone 'Berlin'"),
        ("08:00", "18:00", "../etc/passwd", "no time zone"),
        ("08:00", "18:00", "", "no time zone"),
        ("08:00", "18:00", "Europe", "no time zone"),
        ("08:00", "18:00", "a\0", "no time zone"),
    ],
)
def test_what_cannot_be_read_is_said(begins: str, ends: str, zone: str, reason: str) -> None:
    with pytest.raises(ValueError, match=".*") as caught:
        read_window(begins, ends, zone, 1)
    assert reason in str(caught.value)
