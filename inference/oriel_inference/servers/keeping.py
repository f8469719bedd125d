"""Sends the spans of traces that a server in front asks for at their end (`oriel_wire.observe.recall`)."""

from collections.abc import Iterable

from oriel_inference.servers.request_record import note_kept
from oriel_inference.servers.surface import Surface
from oriel_wire.observe.recall import keep_requested
from oriel_wire.observe.unsampled import Noted


def keep_traces(surface: Surface, body: bytes) -> bytes | None:
    """Return the body of the answer, None for a request that is not valid. body: of the request."""

    def recalled(found: Iterable[Noted]) -> None:
        for _, build, record, _ in found:
            if build is not None:
                note_kept(surface.meter, *record)

    return keep_requested(surface.sink, body, recalled)
