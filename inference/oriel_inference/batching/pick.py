"""Picks the waiting calls of the next batch. It acts on the queue as `oriel_policies.waiting.batch.Fill` decides.

Calls join in queue order. If more rows wait than one batch holds, a call that a full batch would make late is put
aside, as long as other calls of its tier or of more urgent tiers fill the batch without it. It then goes back behind
the others of its level with the same expiry, and runs if their number decreases in time.

Calls of callers that failed lately share batches only with one another. Such a call that would block others is put
aside too, but keeps its rank, so that the next batch is its turn.
"""

from collections.abc import Callable

from oriel_inference.batching.call import Call
from oriel_policies.waiting.batch import Fill
from oriel_policies.waiting.flows import Ticket
from oriel_policies.waiting.queue import SlaQueue

MAX_ASIDE = 1024  # calls put aside for one batch; takes some milliseconds
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

    limit: the rows that the fill accepts.
    crowded: more rows wait than that.
    alone: every call is a batch of its own.
    failed: returns whether a call's caller failed lately; None if no caller did.
    in_order: no call may overtake another one.
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
    """Return the call of a ticket that has left the queue, and drop the reference to it: the queue keeps dead tickets
    for a while, which must not keep tensors in memory.
    """
    call, ticket.payload = ticket.payload, None
    assert isinstance(call, Call)
    return call


def _size_bytes(call: Call) -> int:
    """Return the bytes of a call. Text tensors count as they were sent, numbers in JSON as arrays."""
    return max(call.ticket.size_bytes, sum([array.nbytes for array in call.inputs.values()]))
