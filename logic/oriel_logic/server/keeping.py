"""Answers a gateway that asks for the spans of traces that it keeps at their end, and asks the models' servers."""

from collections.abc import Iterable

from oriel_logic.errors import BadRequest
from oriel_logic.observe.spans import Ended
from oriel_logic.server.envelope import Visit
from oriel_logic.server.inbound import Inbound
from oriel_logic.server.ingress import nothing_here
from oriel_logic.server.replies import Reply
from oriel_wire.observe.recall import Recaller, keep_requested
from oriel_wire.observe.trace import SpanSink
from oriel_wire.observe.unsampled import MAX_TRACES, Noted

_MOST_BYTES = MAX_TRACES * 33


class Keeping:
    """The handler of `POST /oriel/v1/keep`. recaller: asks the inference servers that the requests called."""

    def __init__(self, sink: SpanSink, recaller: Recaller) -> None:
        self._sink = sink
        self._recaller = recaller

    async def __call__(self, inbound: Inbound, visit: Visit) -> Reply:
        """Answer; a sender that is not trusted finds nothing at this path."""
        if not visit.call.trusted:
            return nothing_here(inbound.path, visit)
        body = keep_requested(self._sink, await inbound.read(_MOST_BYTES), self._pass_on)
        if body is None:
            raise BadRequest(f"send up to {MAX_TRACES} trace ids, one a line")
        return Reply(status=200, body=body)

    def _pass_on(self, found: Iterable[Noted]) -> None:
        for trace_id, _, record, _ in found:
            ended: Ended = record[0]
            for hop in {stage.hop for stage in ended.stages if stage.hop is not None}:
                self._recaller.ask(hop.host, hop.port, f"{trace_id:032x}", grpc=not hop.path)
