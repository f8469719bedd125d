"""The record of one request that has ended: names, sizes, times and outcomes; no body, no header and no credential.

A call makes its record when it ends (`call.lifecycle`); a request that is refused before it becomes a call gets one by
`refused_record`. Counters, the decisions kept for `oriel explain`, the access log and spans all read this one object,
and nothing changes it once they have it.
"""

from typing import NamedTuple

from oriel_gateway.errors import Outcome
from oriel_gateway.observe.tracing import Address, Mark
from oriel_gateway.routing.targets import Target
from oriel_policies.documents import Tenant


class Judged(NamedTuple):
    """The judgement about a call that did not keep its promise.

    result: `late`, `missed` or `excused`.
    cause: one of `oriel_policies.promise.objectives.CAUSES`, "" if it is excused.
    excess_s: seconds by which the call was longer in that place than usual; 0.0 for a refusal.
    passed: the place in which the target passed, "" if it did not.
    """

    result: str
    cause: str = ""
    excess_s: float = 0.0
    passed: str = ""


class Record:
    """One request that has ended. Times are monotonic seconds, 0.0 means not reached; sizes are bytes.

    tenant, target: the request's tenant and target; None if it was refused before they were known.
    opened: it became a call of its target's pool; False if it was refused before.
    status: the HTTP status; 0 for a gRPC call that was not refused.
    error: the text of the error, "" without one.
    limited_s: it began to wait for the ledger of its limits.
    answered_s: the time that its target is about: its end, or the first byte of a stream; where its tier has a time per
    token, the first event.
    token_s: the mean seconds per token of such a stream, 0.0 of fewer than two tokens; -1.0 for any other call.
    held_s: seconds of its wait for a permit in which no endpoint was usable.
    ahead: calls before it in the queue when it joined; -1 if it did not queue.
    beside: the calls that its pool had in flight when it ended, itself included.
    endpoint: the endpoint that answered or got the request last.
    tried: the endpoints that got it before in vain.
    timing: `Server-Timing` of the server behind, "" if it sent none.
    used: the use that the answer reported, see `oriel_wire.context.parse_cost`; "" if it reported nothing.
    judged: the judgement about a call that did not keep the promise of its tier; None for one that did, and for a
    sender that is not known.
    """

    __slots__ = (
        *("mark", "method", "protocol", "tenant", "target", "opened", "outcome", "status", "error"),
        *("received_s", "limited_s", "queued_s", "permit_s", "sent_s", "response_s", "answered_s", "ended_s", "held_s"),
        *("deadline", "ahead", "beside", "bytes_in", "bytes_out", "endpoint", "tried", "timing", "used", "judged"),
        "token_s",
    )
    mark: Mark
    method: str
    protocol: str
    tenant: Tenant | None
    target: Target | None
    opened: bool
    outcome: Outcome
    status: int
    error: str
    received_s: float
    limited_s: float
    queued_s: float
    permit_s: float
    sent_s: float
    response_s: float
    answered_s: float
    ended_s: float
    held_s: float
    deadline: float
    ahead: int
    beside: int
    bytes_in: int
    bytes_out: int
    endpoint: Address | None
    tried: tuple[Address, ...]
    timing: str
    used: str
    judged: Judged | None
    token_s: float


def refused_record(
    mark: Mark, method: str, received_s: float, tenant: Tenant | None, target: Target | None, outcome: Outcome
) -> Record:
    """Return the record of a request that did not become a call."""
    record = Record()
    record.mark = mark
    record.method = method
    record.protocol = "http"
    record.tenant = tenant
    record.target = target
    record.outcome = outcome
    record.status = 0
    record.received_s = received_s
    record.limited_s = record.queued_s = record.permit_s = record.sent_s = record.response_s = 0.0
    record.answered_s = record.ended_s = record.held_s = record.deadline = 0.0
    record.ahead = -1
    record.bytes_in = record.bytes_out = record.beside = 0
    record.endpoint = None
    record.tried = ()
    record.error = record.timing = record.used = ""
    record.opened = False
    record.judged = None
    record.token_s = -1.0
    return record
