"""Draws one trace as indented text of at most 100 columns. Pure: a decoded trace in, lines out."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

WIDTH = 100
NAME_COLUMNS = 34
UNIT_COLUMNS = 10
BAR_COLUMNS = 34
# Shown once in the heading, or noise in a picture of time.
HEADING = ("oriel.tier", "oriel.tenant")
HIDDEN = frozenset(
    {*HEADING, "oriel.request_id", "error.type", "http.request.method", "url.scheme", "http.route", "url.full"}
    | {"network.protocol.version", "rpc.system.name", "rpc.method"}
)

Span = Mapping[str, Any]


def draw(request_id: str, trace_id: str, spans: Sequence[Span], *, ascii_only: bool = False) -> list[str]:
    """Lines of a waterfall: children under their parent, offsets and durations in milliseconds.

    spans: the spans of `GET /traces/<id>`, at least one. ascii_only: True for terminals that cannot show blocks.
    """
    start_ns = min(span["start_ns"] for span in spans)
    end_ns = max(span["end_ns"] for span in spans)
    about = [f"{name.removeprefix('oriel.')} {value}" for name in HEADING if (value := _first(spans, name))]
    lines = [
        _fit(f"request {request_id}", WIDTH),
        _fit("   ".join([f"trace {trace_id}", f"{(end_ns - start_ns) / 1e6:.2f} ms", *about]), WIDTH),
        "",
        f"{'span':<{NAME_COLUMNS}} {'unit':<{UNIT_COLUMNS}} {'start ms':>9} {'ms':>9}",
    ]
    for depth, span in _in_order(spans):
        lines.append(_row(depth, span, start_ns, end_ns, ascii_only))
        details = _details(span)
        if details:
            lines.append(_fit(f"{'  ' * (depth + 1)}{details}", WIDTH))
    return lines


def _in_order(spans: Sequence[Span]) -> Iterator[tuple[int, Span]]:
    known = {span["span_id"] for span in spans}
    children: dict[str, list[Span]] = {}
    for span in sorted(spans, key=lambda span: (span["start_ns"], span["end_ns"])):
        parent = span["parent_id"] if span["parent_id"] in known and span["parent_id"] != span["span_id"] else ""
        children.setdefault(parent, []).append(span)
    pending = [(0, span) for span in reversed(children.get("", []))]
    while pending:
        depth, span = pending.pop()
        yield depth, span
        # Popped: spans whose parents form a ring are reached at most once.
        pending.extend((depth + 1, below) for below in reversed(children.pop(span["span_id"], [])))


def _row(depth: int, span: Span, start_ns: int, end_ns: int, ascii_only: bool) -> str:
    name = _fit("  " * depth + str(span["name"]), NAME_COLUMNS)
    unit = _fit(str(span["unit"]).removeprefix("oriel-"), UNIT_COLUMNS)
    offset_ms = (span["start_ns"] - start_ns) / 1e6
    taken_ms = (span["end_ns"] - span["start_ns"]) / 1e6
    bar = _bar(span["start_ns"] - start_ns, span["end_ns"] - start_ns, end_ns - start_ns, ascii_only)
    row = f"{name:<{NAME_COLUMNS}} {unit:<{UNIT_COLUMNS}} {offset_ms:>9.2f} {taken_ms:>9.2f} {bar}"
    return _fit(row.rstrip(), WIDTH)


def _bar(start_ns: int, end_ns: int, whole_ns: int, ascii_only: bool) -> str:
    if whole_ns <= 0:
        return ""
    # Whole columns; a span too short for one still shows a tick in its place.
    first = min(int(start_ns * BAR_COLUMNS / whole_ns), BAR_COLUMNS - 1)
    length = round((end_ns - start_ns) * BAR_COLUMNS / whole_ns)
    full, tick = ("#", "|") if ascii_only else ("█", "▏")
    return " " * first + (full * min(length, BAR_COLUMNS - first) if length >= 1 else tick)


def _details(span: Span) -> str:
    parts = [f"{_short(key)}={value}" for key, value in sorted(span["attributes"].items()) if key not in HIDDEN]
    if span["error"]:
        parts.insert(0, f"error: {span['error']}")
    return "  ".join(parts)


def _short(key: str) -> str:
    return key.removeprefix("oriel.")


def _first(spans: Sequence[Span], name: str) -> object:
    return next((span["attributes"][name] for span in spans if name in span["attributes"]), None)


def _fit(text: str, columns: int) -> str:
    # Span names and attributes come from outside: no terminal control, no second line.
    clean = "".join(character if character.isprintable() else "?" for character in text)
    return clean if len(clean) <= columns else clean[: columns - 1] + "~"
