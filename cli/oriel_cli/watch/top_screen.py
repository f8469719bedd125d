"""Draws the gateway's snapshot as text, 80 to 160 columns wide. Pure: a decoded snapshot in, lines out."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from textwrap import wrap
from typing import Any, Final

WIDTH, MOST = 80, 160
WIDE: Final = 110  # columns from which more is shown
WIDER: Final = 120  # and the share of answers that agree, of models that are compared
# key -> (what it sorts by, for people). The first one is the gateway's own order: the most important rows first.
SORTS: Final = {"i": "importance", "m": "misses", "r": "calls/s", "l": "p99", "w": "waiting", "n": "name"}
RED, YELLOW, SOFT, BOLD, PLAIN = "\x1b[31m", "\x1b[33m", "\x1b[2m", "\x1b[1m", "\x1b[0m"

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table.

    width: negative if its text stands at the right. show: the text of a row, with a colour if there is one.
    most: the width to which it grows where there is room. wide: True if only wide screens have it, False if only
    narrow ones do.
    """

    heading: str
    width: int
    show: Callable[[Row], "str | tuple[str, str]"]
    most: int = 0
    wide: bool | None = None


def draw(
    snapshot: Row, *, sort: str = "i", colour: bool = False, width: int = WIDTH, height: int = 0, note: str = ""
) -> list[str]:
    """Return the lines.

    sort: a key of `SORTS`. width: the width of the screen; less than `WIDTH` counts as that. height: the most lines, 0
    for as many as there are. note: beside the title.
    """
    width = min(max(width, WIDTH), MOST)
    sections = [
        (_TIERS, snapshot["tiers"], "tiers"),
        (_POOLS, _sorted(snapshot["pools"], sort, "pool"), "pools"),
        *([(_DECODING, decoding, "")] if (decoding := _decoding(snapshot)) else []),
        (_targets(snapshot, width), _sorted(snapshot["targets"], sort, "name"), "targets"),
        (_TENANTS, _sorted(snapshot["tenants"], sort, "tenant"), "tenants"),
        (_CALLS, snapshot["calls"], "calls"),
    ]
    lines = [_title(snapshot, note, colour, width)]
    if (gateways := snapshot.get("gateways", 1)) > 1:
        lines.append(f"one of {gateways} gateways: 5 min and more, and budgets, are of all")
    notes = [f"canary rolled back: {each}" for each in snapshot.get("rolled_back") or ()]
    notes += snapshot.get("troubles") or ()
    noted = [_painted(line, RED, colour) for each in notes for line in wrap(_clean(each), width)]
    lines += noted[: height // 2 or None]
    left = max(0, height - len(lines) - 2 * len(sections)) if height else None
    rooms = _rooms([len(rows) for _, rows, _ in sections], left)
    for (all_columns, rows, name), room in zip(sections, rooms, strict=True):
        columns = _fitting(all_columns, width)
        lines.append("")
        lines.append(_painted(_line([_fitted(each.heading, size) for each, size in columns]), SOFT, colour))
        lines += [_row(columns, row, colour) for row in rows[:room]]
        hidden = len(rows) - room + snapshot["more"].get(name, 0)
        if not rows and not hidden and not height:
            lines.append(_painted("none", SOFT, colour))
        if hidden > 0 and room > 0 and not height:
            lines.append(_painted(f"and {hidden} more", SOFT, colour))
    return lines


def _targets(snapshot: Row, width: int) -> Sequence[Column]:
    compared = any(row.get("agrees") is not None for row in snapshot["targets"])
    return (*_TARGETS, _AGREES) if compared and width >= WIDER else _TARGETS


def _decoding(snapshot: Row) -> list[Row]:
    """Return one row for each tier of each pool whose servers have language models."""
    tokens = {row["tier"]: row.get("tokens_s") for row in snapshot["tiers"]}
    return [
        {"pool": row["pool"], "tier": tier, "calls": calls, "cache": found["cache"], "tokens_s": tokens.get(tier)}
        for row in snapshot["pools"]
        if (found := row.get("language"))
        for tier, calls in found["calls"].items()
    ]


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


def _fitting(columns: Sequence[Column], width: int) -> list[tuple[Column, int]]:
    """Return the columns that a screen of this width has, with the width of each; what is left goes to those that grow,
    one after the other.
    """
    shown = [each for each in columns if each.wide is None or each.wide == (width >= WIDE)]
    sizes = [abs(each.width) for each in shown]
    left = width - sum(sizes) - len(sizes) + 1
    while left > 0 and any(size < each.most for size, each in zip(sizes, shown, strict=True)):
        for index, each in enumerate(shown):
            if left > 0 and sizes[index] < each.most:
                sizes[index] += 1
                left -= 1
    return [(each, size if each.width > 0 else -size) for each, size in zip(shown, sizes, strict=True)]


def _sorted(rows: Sequence[Row], sort: str, name: str) -> list[Row]:
    keys: dict[str, Callable[[Row], Any]] = {
        "m": lambda row: -(row.get("late", 0) + row.get("missed", 0)),
        "r": lambda row: -row.get("rate", row.get("inflight", 0)),
        "l": lambda row: -(row.get("p99_ms") or 0.0),
        "w": lambda row: -(_waiting(row) if "waiting" in row else 0),
        "n": lambda row: row[name],
    }
    return sorted(rows, key=keys[sort]) if sort in keys else list(rows)


def _title(snapshot: Row, note: str, colour: bool, width: int) -> str:
    rates = snapshot.get("rates")
    waiting = sum(_waiting(row) for row in snapshot["pools"])
    parts = [f"oriel {snapshot.get('version', '')}".strip()]
    if rates:
        parts.append(
            f"{_number(sum(rates.values()))} calls/s, {_number(rates['late'] + rates['missed'])} late or missed"
        )
    parts.append(f"{waiting} waiting")
    parts += ["stopping"] if snapshot.get("draining") else []
    parts += [note] if note else []
    lag_ms = snapshot.get("lag_ms") or 0.0
    parts.append("loop on time" if lag_ms < 10.0 else f"loop {_time(lag_ms)} late")
    clock = datetime.fromtimestamp(snapshot.get("at", 0.0)).strftime("%H:%M:%S")
    while len(parts) > 1 and len("   ".join(parts)) > width - 10:
        parts.pop()
    text = _clean("   ".join(parts))[: width - 10]
    return _painted(f"{text:<{width - 9}} {clock}", BOLD, colour)


def _row(columns: Sequence[tuple[Column, int]], row: Row, colour: bool) -> str:
    cells = []
    for column, size in columns:
        shown = column.show(row)
        text, paint = (shown, "") if isinstance(shown, str) else shown
        cells.append(_painted(_fitted(text, size), paint, colour))
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


def _queue(row: Row) -> tuple[str, str]:
    parts = [f"{tier} {count}" for tier, count in row["waiting"].items()]
    text = ", ".join([*parts, *([f"no server {row['parked']}"] if row["parked"] else [])]) or "0"
    return text, RED if _is_down(row) else ""


def _is_down(row: Row) -> bool:
    """Return whether calls of a pool find no server, and none is starting for them."""
    return bool(row["parked"]) and row.get("phase") in (None, "ready")


def _servers(row: Row) -> tuple[str, str]:
    states = row["endpoints"]
    text = ", ".join(f"{count} {_words(state)}" for state, count in states.items()) or "none"
    return text, "" if set(states) <= {"ready", "unknown"} and not _is_down(row) else RED


def _servers_or_start(row: Row) -> tuple[str, str]:
    return _servers(row) if row.get("phase") in (None, "ready") else (_words(row["phase"]), YELLOW)


def _start(row: Row) -> tuple[str, str]:
    phase, rest_ms = row.get("phase"), row.get("expected_ms")
    if phase in (None, "ready"):
        return phase or "-", ""
    return _words(phase) + (f", about {_time(rest_ms)}" if rest_ms is not None else ""), YELLOW


def _causes(row: Row) -> list[tuple[str, float]]:
    """Return the causes of misses with their shares, the most frequent first."""
    total = sum(row["causes"].values())
    return sorted(((_words(cause), count / total) for cause, count in row["causes"].items()), key=lambda each: -each[1])


def _words(name: str) -> str:
    return name.replace("_", " ")


_TIERS: Final[Sequence[Column]] = (
    Column("TIER", 9, lambda row: row["tier"], most=20),
    Column("TARGET", -6, lambda row: _time(row["target_ms"])),
    Column("PER S", -5, lambda row: _number(row["rate"]), wide=False),
    Column("CALLS/S", -8, lambda row: _number(row["rate"]), wide=True),
    Column("1 MIN", -8, lambda row: _judged(_attained(row), row["objective"]), wide=True),
    Column("5 MIN", -7, lambda row: _judged(row["attainment"].get("5m"), row["objective"])),
    Column("1 H", -7, lambda row: _judged(row["attainment"].get("1h"), row["objective"])),
    Column("30 D", -7, lambda row: _judged(row["attainment"].get("30d"), row["objective"])),
    Column("LEFT", -5, _budget),
    Column("BURN", -4, lambda row: _number(row["burn"].get("1h"))),
    Column("WAIT", -4, lambda row: _number(row["waiting"])),
    Column("OLDEST", -6, lambda row: _time(row["oldest_ms"]) if row["waiting"] else "-"),
    Column("CAUSE", 10, lambda row: next((cause for cause, _ in _causes(row)), "-"), wide=False),
    Column(
        "CAUSE OF MISSES",
        20,
        lambda row: ", ".join(f"{cause} {_share(share, 0)}" for cause, share in _causes(row)) or "-",
        most=60,
        wide=True,
    ),
)
_POOLS: Final[Sequence[Column]] = (
    Column("POOL", 18, lambda row: row["pool"], most=28),
    Column("PERMITS", -9, lambda row: f"{row['inflight']}/{row['permits']}"),
    Column("WAITING", 18, _queue, most=44),
    Column("OLDEST", -7, lambda row: _time(row["oldest_ms"]) if _waiting(row) else "-"),
    Column("SERVERS", 17, _servers_or_start, wide=False),
    Column("SERVERS", 17, _servers, most=36, wide=True),
    Column("COLD START", 25, _start, wide=True),
    Column("REPL", -5, _replicas),
)
_DECODING: Final[Sequence[Column]] = (
    Column("DECODING IN", 18, lambda row: row["pool"], most=28),
    Column("TIER", 10, lambda row: row["tier"], most=20),
    Column("RUNNING", -7, lambda row: str(row["calls"][0])),
    Column("WAITING", -7, lambda row: str(row["calls"][1])),
    Column("PAUSED", -6, lambda row: str(row["calls"][2])),
    Column("CACHE", -6, lambda row: _share(row["cache"], 0)),
    Column("TOKENS/S", -8, lambda row: _number(row["tokens_s"])),
)
_TARGETS: Final[Sequence[Column]] = (
    Column(
        "MODEL OR SERVICE",
        25,
        lambda row: f"{row['name']}{' (service)' if row['kind'] == 'service' else ''}",
        most=40,
    ),
    Column("POOL", 18, lambda row: row.get("pool") or "-", most=28, wide=True),
    Column("CALLS/S", -8, lambda row: _number(row["rate"])),
    Column("P50", -7, lambda row: _time(row["p50_ms"])),
    Column("P99", -7, lambda row: _time(row["p99_ms"])),
    Column("MISSES", -6, _bad),
    Column("IN TIME", -8, lambda row: _share(_attained(row), 1), wide=True),
    Column("ROWS", -5, lambda row: _number(row["rows"])),
    Column("PROVIDER", 9, lambda row: row["provider"] or "-", most=14),
    Column("VERS", -6, lambda row: row["version"] or "-", most=14),
)
_AGREES: Final = Column("AGREES", -7, lambda row: _share(row.get("agrees"), 1))
_TENANTS: Final[Sequence[Column]] = (
    Column("TENANT", 29, lambda row: row["tenant"], most=40),
    Column("TIER", 10, lambda row: row["tier"] or "-", most=20),
    Column("MISSES", -6, _bad),
    Column("IN TIME", -8, lambda row: _share(_attained(row), 1)),
    Column("USE", -6, lambda row: _number(row["used"])),
    Column("REFUSED", -7, lambda row: str(row["refused"])),
    Column("CALLS/S", -8, lambda row: _number(row["rate"])),
)
_CALLS: Final[Sequence[Column]] = (
    Column("TIME", 8, lambda row: datetime.fromtimestamp(row["at"]).strftime("%H:%M:%S")),
    Column("RESULT", 7, lambda row: (row["result"], YELLOW if row["result"] == "late" else RED)),
    Column("REASON", 18, lambda row: "-" if row["result"] == "late" else _words(row["reason"]), most=24),
    Column("CAUSE", 10, lambda row: _words(row.get("cause") or "-"), most=14),
    Column("TENANT", 13, lambda row: row["tenant"] or "-", most=28),
    Column("TIER", 8, lambda row: row["tier"] or "-", most=14, wide=True),
    Column("OF", 11, lambda row: row["target"].partition(":")[2] or row["target"] or "-", most=28),
    Column("TOOK", -7, lambda row: _time(row["took_ms"])),
    Column("TARGET", -7, lambda row: _time(row["target_ms"]), wide=True),
    Column("REQUEST", 16, lambda row: row["id"], most=32, wide=True),
)
