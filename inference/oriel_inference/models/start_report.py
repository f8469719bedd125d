"""The log's report once the models of the start are loaded: a table of models and one of ports. Pure."""

import textwrap
from collections.abc import Sequence

from oriel_inference.catalog import Entry
from oriel_inference.model import ModelState

MAX_ROWS = 200
MIN_WIDTH, MAX_WIDTH = 60, 200
_SHORTEST = 8  # a column is not made narrower
_HEADING = ("Model", "Version", "Status", "Runs on")


def models_table(entries: Sequence[Entry], width: int) -> str:
    """Return a table with model, version, status with the reason, and where it runs; at most `width` columns (60 at
    least).

    With more than MAX_ROWS lines those that serve are left out, so that the failures are visible.
    """
    shown = sorted(entries, key=lambda entry: entry.state is ModelState.READY) if len(entries) > MAX_ROWS else entries
    rows = [_row(entry) for entry in shown[:MAX_ROWS]]
    if not rows:
        return "no models are loaded"
    lines = _table(_HEADING, rows, min(MAX_WIDTH, max(MIN_WIDTH, width)))
    if len(entries) > MAX_ROWS:
        lines.append(f"... and {len(entries) - MAX_ROWS} more")
    return "\n".join(lines)


def ports_table(ports: Sequence[tuple[str, str]]) -> str:
    """Return a table with name and address of every port."""
    return "\n".join(_table(("Port", "Address"), ports, MAX_WIDTH))


def _row(entry: Entry) -> tuple[str, str, str, str]:
    status = f"{entry.state.value}: {entry.reason}" if entry.reason else entry.state.value
    version = entry.shown_version or "-"
    if entry.serving is None:
        return entry.name, version, status, ""
    instances = entry.serving.spec.instances
    return entry.name, version, status, f"{entry.serving.provider.removesuffix('ExecutionProvider')} x {instances}"


def _table(heading: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> list[str]:
    widths = [max(len(cell) for cell in column) for column in zip(heading, *rows, strict=True)]
    room = width - 3 * len(widths) - 1
    while sum(widths) > room:
        # The widest column is narrowed, the reason first among equals; what does not fit is wrapped.
        widest = max(range(len(widths)), key=lambda index: (widths[index], index == 2))
        if widths[widest] <= _SHORTEST:
            break
        widths[widest] -= 1
    rule = "+" + "+".join("-" * (each + 2) for each in widths) + "+"
    lines = [rule, *_wrapped(heading, widths), rule]
    for row in rows:
        lines.extend(_wrapped(row, widths))
    return [*lines, rule]


def _wrapped(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    cells = [textwrap.wrap(cell, each) or [""] for cell, each in zip(row, widths, strict=True)]
    return [
        "|"
        + "|".join(f" {cell[n] if n < len(cell) else '':<{each}} " for cell, each in zip(cells, widths, strict=True))
        + "|"
        for n in range(max(map(len, cells)))
    ]
