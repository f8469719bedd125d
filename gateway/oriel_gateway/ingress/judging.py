"""Makes a call of an HTTP request whose sender and target are known, whatever version of HTTP it came by."""

from typing import Final

from oriel_gateway.call.http import Call
from oriel_gateway.contracts import Client
from oriel_gateway.core import Gateway
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.identity.named_models import judge_head
from oriel_gateway.observe.tracing import Mark
from oriel_gateway.routing.targets import Target
from oriel_gateway.shared.model_list import ACCEPT_JSON, ModelList
from oriel_gateway.shared.special import attach
from oriel_policies.documents import Tenant
from oriel_wire.h1 import RequestHead

__all__ = ["open_call"]

_LISTS: Final = ("list", "entry")


def open_call(
    gateway: Gateway,
    client: Client,
    head: RequestHead,
    tenant: Tenant,
    target: Target,
    mark: Mark,
    received_s: float,
    late_s: float,
    lines: bytes | None,
) -> Call:
    """Judge the deadline, the size and the limits of a request, and begin its call.

    late_s: how long the request lay unread. lines: what the upstream gets of the head, None if it is not known yet.
    Raises Refused.
    """
    if target.names:
        judge_head(head, target.names)
    deadline = gateway.deadline(tenant, received_s, head.timeout)
    gate = gateway.pools[target.pool]
    bound = gate.pool.max_body_bytes
    if head.content_length is not None and head.content_length > bound:
        raise Refused(Outcome.TOO_LARGE, f"the body is larger than {bound} bytes")
    if 0.0 < (left_s := deadline - received_s - late_s) < gate.slow_s:
        gate.judge(target, head.content_length or 0, left_s)
    grant = None
    if target.allowances:
        grant = gateway.limiter.acquire(tenant, target, head.content_length or 0, received_s + late_s)
    receiver = None
    if target.names in _LISTS:
        lines, receiver = ACCEPT_JSON + gateway.targets.tenant_lines(tenant), ModelList()
    call = Call(gateway, client, gate, head, tenant, target, mark, received_s, deadline, lines, receiver)
    if grant is not None:
        call.limited(grant)
    if target.special:
        attach(call, gateway.routing)
    return call
