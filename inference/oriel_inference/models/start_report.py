"""The log's report once the models of the start are loaded: a table of models and one of ports. Pure."""

from collections.abc import Sequence

from oriel_inference.catalog import Entry
from oriel_inference.model import ModelState

MAX_ROWS = 200
_HEADING = ("Model", "Version", "Status", "Runs on", "")


def models_table(entries: Sequence[Entry]) -> str:
    """Return a table with model, version, status, where it runs, and the reason of its status.

    With more than MAX_ROWS lines those that serve are left out, so that the failures are visible.
    """
    if not entries:
        return "no models are loaded"
    shown = sorted(entries, key=lambda entry: entry.state is ModelState.READY) if len(entries) > MAX_ROWS else entries
    more = [(f"... and {len(entries) - MAX_ROWS} more",)] if len(entries) > MAX_ROWS else []
    return _table([_HEADING, *(_row(entry) for entry in shown[:MAX_ROWS]), *more])


def ports_table(ports: Sequence[tuple[str, str]]) -> str:
    """Return a table with name and address of every port."""
    return _table([("Port", "Address"), *ports])


def _row(entry: Entry) -> tuple[str, ...]:
    serving, runs_on = entry.serving, ""
    if serving is not None:
        runs_on = f"{serving.provider.removesuffix('ExecutionProvider')} x {serving.spec.instances}"
    # A reason must not forge a line of the log.
    return entry.name, entry.shown_version or "-", entry.state.value, runs_on, " ".join(entry.reason.split())


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[at]) for row in rows if at < len(row)) for at in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows
    )
