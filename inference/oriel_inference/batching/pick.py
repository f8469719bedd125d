"""Which waiting calls make up the next batch. Acts on the queue as `oriel_policies.batch.Fill` decides.

Calls join in queue order. Where more wait than one batch holds, a call that a full batch would make late is put aside,
as long as others of its tier or of more urgent ones fill the batch without it. What was put aside goes back behind
the others of its level, with the same expiry: it runs if they thin out in time.

A call of a caller that failed lately shares a batch with its like only. One that stands in the way of others is put
aside as well and keeps its rank, so that it is the next one's turn.
"""

from collections.abc import Callable

from oriel_inference.batching.call import Call
from oriel_policies.batch import Fill
from oriel_policies.queue import SlaQueue, Ticket

__all__ = ["pick", "unwrap"]

MAX_ASIDE = 1024  # calls put aside at one go: some milliseconds
MAX_APART = 64


def pick(
    queue: SlaQueue,
    fill: Fill,
    limit: int,
    crowded: bool,
    alone: bool,
    *,
    failed: Callable[[Call], bool] | None = None,
    in_order: bool = False,
) -> list[Call]:
    """Take the calls of one batch out of `queue`, at least one if it holds any.

    limit: rows, the fill's own. crowded: more rows wait than that. alone: one call is a batch. failed: whether a
    call's caller failed lately, None if nobody did. in_order: no call may pass another one.
    """
    calls: list[Call] = []
    aside: list[Ticket] = []
    apart: list[Ticket] = []
    has_failed = False
    while (ticket := queue.peek()) is not None:
        call = ticket.payload
        assert isinstance(call, Call)
        if (
            crowded
            and len(aside) < MAX_ASIDE
            and fill.endangers(call.deadline)
            and fill.rows + queue.rows_ahead(ticket.band) - ticket.rows >= limit
        ):
            queue.remove(ticket)
            aside.append(ticket)
            continue
        if calls and call.signature != calls[0].signature:
            break
        if failed is not None:
            if not calls:
                has_failed = failed(call)
            elif failed(call) != has_failed:
                if has_failed or in_order or len(apart) >= MAX_APART:
                    break
                queue.remove(ticket)
                apart.append(ticket)
                continue
        if not fill.admit(call.rows, call.deadline, _size_bytes(call)):
            break
        queue.pop()
        unwrap(ticket)
        calls.append(call)
        if alone or fill.rows >= limit:
            break
    for ticket in aside:
        queue.push(unwrap(ticket).parked(ticket.deadline))
    for ticket in apart:
        queue.push(unwrap(ticket).again())
    return calls


def unwrap(ticket: Ticket) -> Call:
    """The call of a ticket that has left the queue, which keeps dead tickets for a while: they must hold no tensors."""
    call, ticket.payload = ticket.payload, None
    assert isinstance(call, Call)
    return call


def _size_bytes(call: Call) -> int:
    """Text tensors count as they were sent, numbers in JSON as they are computed with."""
    return max(call.ticket.size_bytes, sum([array.nbytes for array in call.inputs.values()]))
