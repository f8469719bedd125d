"""Draws the gateway's snapshot as text of at most 80 columns. Pure: a decoded snapshot in, lines out."""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

WIDTH: Final = 80
# key -> (what it sorts by, for people). The first one is the gateway's own order: the most important rows first.
SORTS: Final = {"i": "importance", "m": "misses", "r": "calls/s", "l": "p99", "w": "waiting", "n": "name"}
RED, YELLOW, SOFT, BOLD, PLAIN = "\x1b[31m", "\x1b[33m", "\x1b[2m", "\x1b[1m", "\x1b[0m"

Row = Mapping[str, Any]
# heading, width (negative: right-aligned), what a row shows there; the text may carry a colour
Column = tuple[str, int, Callable[[Row], "str | tuple[str, str]"]]


def draw(snapshot: Row, *, sort: str = "i", colour: bool = False, height: int = 0, note: str = "") -> list[str]:
    """Return the lines. sort: a key of `SORTS`. height: the most lines, 0 for as many as there are. note: beside the
    title.
    """
    sections = [
        (_TIERS, snapshot["tiers"], "tiers"),
        (_POOLS, _sorted(snapshot["pools"], sort, "pool"), "pools"),
        (_TARGETS, _sorted(snapshot["targets"], sort, "name"), "targets"),
        (_TENANTS, _sorted(snapshot["tenants"], sort, "tenant"), "tenants"),
        (_CALLS, snapshot["calls"], "calls"),
    ]
    lines = [_title(snapshot, note, colour)]
    rooms = _rooms([len(rows) for _, rows, _ in sections], max(0, height - 1 - 2 * len(sections)) if height else None)
    for (columns, rows, name), room in zip(sections, rooms, strict=True):
        lines.append("")
        lines.append(_painted(_line([_fitted(heading, width) for heading, width, _ in columns]), SOFT, colour))
        lines += [_row(columns, row, colour) for row in rows[:room]]
        hidden = len(rows) - room + snapshot["more"][name]
        if hidden > 0 and room > 0 and not height:
            lines.append(_painted(f"and {hidden} more", SOFT, colour))
    return lines


def _rooms(wanted: Sequence[int], left: int | None) -> list[int]:
    """Return how many rows each section gets of those that are left, all the same if it can; None: as it wants."""
    if left is None:
        return list(wanted)
    rooms = [0] * len(wanted)
    while left and any(room < most for room, most in zip(rooms, wanted, strict=True)):
        for index, most in enumerate(wanted):
            if left and rooms[index] < most:
                rooms[index] += 1
                left -= 1
    return rooms


def _sorted(rows: Sequence[Row], sort: str, name: str) -> list[Row]:
    keys: dict[str, Callable[[Row], Any]] = {
        "m": lambda row: -(row.get("late", 0) + row.get("missed", 0)),
        "r": lambda row: -row.get("rate", row.get("inflight", 0)),
        "l": lambda row: -(row.get("p99_ms") or 0.0),
        "w": lambda row: -(_waiting(row) if "waiting" in row else 0),
        "n": lambda row: row[name],
    }
    return sorted(rows, key=keys[sort]) if sort in keys else list(rows)


def _title(snapshot: Row, note: str, colour: bool) -> str:
    rates = snapshot.get("rates")
    waiting = sum(_waiting(row) for row in snapshot["pools"])
    parts = [f"oriel {snapshot.get('version', '')}".strip()]
    if rates:
        parts.append(
            f"{_number(sum(rates.values()))} calls/s, {_number(rates['late'] + rates['missed'])} late or missed"
        )
    parts.append(f"{waiting} waiting")
    parts.append(f"loop {_time(snapshot.get('lag_ms'))} late")
    parts += ["stopping"] if snapshot.get("draining") else []
    parts += [note] if note else []
    clock = datetime.fromtimestamp(snapshot.get("at", 0.0)).strftime("%H:%M:%S")
    text = _clean("   ".join(parts))[: WIDTH - 10]
    return _painted(f"{text:<{WIDTH - 9}} {clock}", BOLD, colour)


def _row(columns: Sequence[Column], row: Row, colour: bool) -> str:
    cells = []
    for _, width, show in columns:
        shown = show(row)
        text, paint = (shown, "") if isinstance(shown, str) else shown
        cells.append(_painted(_fitted(text, width), paint, colour))
    return _line(cells)


def _line(cells: Sequence[str]) -> str:
    return " ".join(cells).rstrip()


def _fitted(text: str, width: int) -> str:
    # Names come from documents and from servers: no terminal control, no second line, one column each.
    clean, room = _clean(text), abs(width)
    cut = clean if len(clean) <= room else clean[: room - 1] + "~"
    return cut.rjust(room) if width < 0 else cut.ljust(room)


def _clean(text: str) -> str:
    return "".join(character if character.isascii() and character.isprintable() else "?" for character in text)


def _painted(text: str, paint: str, colour: bool) -> str:
    return f"{paint}{text}{PLAIN}" if colour and paint and text.strip() else text


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _time(ms: float | None) -> str:
    if ms is None:
        return "-"
    if ms < 999.5:
        return f"{ms:.0f} ms" if ms >= 9.95 else f"{ms:.1f} ms"
    return f"{ms / 1000:.2f} s" if ms < 99_950 else f"{ms / 60_000:.0f} min"


def _share(value: float | None, digits: int = 2) -> str:
    """Cut, not rounded: 100 % is said only of all."""
    if value is None:
        return "-"
    power = 10**digits
    return f"{int(value * 100 * power + 1e-9) / power:.{digits}f}%"


def _judged(value: float | None, objective: float) -> tuple[str, str]:
    below = value is not None and value < objective
    return f"{'!' if below else ''}{_share(value)}", RED if below else ""


def _budget(row: Row) -> tuple[str, str]:
    left = row["budget_left"]
    return ("spent", RED) if left is not None and left <= 0.0 else (_share(left, 0), "")


def _attained(row: Row) -> float | None:
    judged = row["met"] + row["late"] + row["missed"]
    return row["met"] / judged if judged else None


def _waiting(row: Row) -> int:
    waiting = row["waiting"]
    return int(sum(waiting.values()) + row["parked"] if isinstance(waiting, Mapping) else waiting)


def _bad(row: Row) -> tuple[str, str]:
    bad = row["late"] + row["missed"]
    return str(bad), RED if bad else ""


def _replicas(row: Row) -> str:
    if row.get("wanted") is None:
        return "-"
    return f"{row['replicas']}" if row["wanted"] == row["replicas"] else f"{row['replicas']}>{row['wanted']}"


def _queue(row: Row) -> str:
    parts = [f"{tier} {count}" for tier, count in row["waiting"].items()]
    return ", ".join([*parts, *([f"no server {row['parked']}"] if row["parked"] else [])]) or "0"


def _servers(row: Row) -> tuple[str, str]:
    states = row["endpoints"]
    text = ", ".join(f"{count} {state.replace('_', ' ')}" for state, count in states.items()) or "none"
    if row.get("phase") not in (None, "ready"):
        return row["phase"].replace("_", " "), YELLOW
    return text, "" if set(states) <= {"ready", "unknown"} else RED


_TIERS: Final[Sequence[Column]] = (
    ("TIER", 12, lambda row: row["tier"]),
    ("TARGET", -7, lambda row: _time(row["target_ms"])),
    ("CALLS/S", -7, lambda row: _number(row["rate"])),
    ("5 MIN", -8, lambda row: _judged(row["attainment"].get("5m"), row["objective"])),
    ("1 H", -8, lambda row: _judged(row["attainment"].get("1h"), row["objective"])),
    ("30 D", -8, lambda row: _judged(row["attainment"].get("30d"), row["objective"])),
    ("LEFT", -5, _budget),
    ("BURN", -5, lambda row: _number(row["burn"].get("1h"))),
    ("WAIT", -4, lambda row: _number(row["waiting"])),
    ("OLDEST", -7, lambda row: _time(row["oldest_ms"]) if row["waiting"] else "-"),
)
_POOLS: Final[Sequence[Column]] = (
    ("POOL", 18, lambda row: row["pool"]),
    ("PERMITS", -9, lambda row: f"{row['inflight']}/{row['permits']}"),
    ("WAITING", 18, _queue),
    ("OLDEST", -7, lambda row: _time(row["oldest_ms"]) if _waiting(row) else "-"),
    ("SERVERS", 17, _servers),
    ("REPL", -5, _replicas),
)
_TARGETS: Final[Sequence[Column]] = (
    ("MODEL OR SERVICE", 24, lambda row: f"{row['name']}{' (service)' if row['kind'] == 'service' else ''}"),
    ("CALLS/S", -7, lambda row: _number(row["rate"])),
    ("P50", -7, lambda row: _time(row["p50_ms"])),
    ("P99", -7, lambda row: _time(row["p99_ms"])),
    ("MISSES", -6, _bad),
    ("ROWS", -5, lambda row: _number(row["rows"])),
    ("PROVIDER", 9, lambda row: row["provider"] or "-"),
    ("VERS", -6, lambda row: row["version"] or "-"),
)
_TENANTS: Final[Sequence[Column]] = (
    ("TENANT", 28, lambda row: row["tenant"]),
    ("TIER", 10, lambda row: row["tier"] or "-"),
    ("MISSES", -6, _bad),
    ("IN TIME", -8, lambda row: _share(_attained(row), 1)),
    ("USE", -6, lambda row: _number(row["used"])),
    ("REFUSED", -7, lambda row: str(row["refused"])),
    ("CALLS/S", -8, lambda row: _number(row["rate"])),
)
_CALLS: Final[Sequence[Column]] = (
    ("TIME", 8, lambda row: datetime.fromtimestamp(row["at"]).strftime("%H:%M:%S")),
    ("RESULT", 7, lambda row: (row["result"], YELLOW if row["result"] == "late" else RED)),
    ("REASON", 18, lambda row: "-" if row["result"] == "late" else row["reason"].replace("_", " ")),
    ("CAUSE", 10, lambda row: (row.get("cause") or "-").replace("_", " ")),
    ("TENANT", 13, lambda row: row["tenant"] or "-"),
    ("OF", 11, lambda row: row["target"].partition(":")[2] or row["target"] or "-"),
    ("TOOK", -7, lambda row: _time(row["took_ms"])),
)
