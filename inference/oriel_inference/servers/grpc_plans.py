"""Keeps what was read of the metadata of gRPC calls, for later calls that send the same.

The fields of one call alone are read for each: its id, trace and timeouts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from msgspec.structs import replace

from oriel_inference.servers.restrictions import Restriction
from oriel_wire.context import REQUEST_ID, TENANT, TIMEOUT_MS, CallContext, ContextPlan, read_headers
from oriel_wire.h2.grpc import parse_timeout_s
from oriel_wire.h2.known_fields import PER_REQUEST, Field
from oriel_wire.observe.orca import LOAD_FORMAT, report_form
from oriel_wire.observe.sampling import NEVER, Sampling

MAX_PLANS: Final = 256
MAX_PLAN_BYTES: Final = 2048
ERROR_MODE: Final = b"triton_grpc_error"

_OWN: Final = {name: name.decode() for name in PER_REQUEST | {TIMEOUT_MS.encode()}}
# These alone make a context differ from that of its plan.
_OF_CONTEXT: Final = frozenset({REQUEST_ID, TIMEOUT_MS, "traceparent", "x-request-timeout-ms"})


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPlan:
    """The metadata that calls have in common.

    path: the path of the method. is_grpc: False for requests that are no gRPC calls.
    encoding: the coding of compressed messages, "" for none. load_form: see `orca.report_form`.
    errors_as_status: a stream ends with the first refusal as its status.
    of_tenant: the calls are of a tenant of a gateway.
    fields: the metadata itself.
    secrets: the restrictions whose secret the calls have.
    """

    path: bytes
    is_grpc: bool
    context: ContextPlan
    encoding: str
    load_form: str
    errors_as_status: bool
    of_tenant: bool
    fields: Sequence[Field]
    secrets: Sequence[Restriction]


class CallPlans:
    """The plans of the calls of one sender, or of all that are trusted alike. Bounded."""

    def __init__(
        self,
        *,
        trusted: bool,
        default_timeout_s: float,
        sampling: Sampling = NEVER,
        restrictions: Sequence[Restriction] = (),
    ) -> None:
        self._trusted = trusted
        self._sampling = sampling
        self._restrictions = restrictions
        self._default_timeout_s = default_timeout_s
        self._known: dict[tuple[Field, ...], CallPlan] = {}

    def read(self, fields: list[Field]) -> tuple[CallPlan, dict[str, str], float | None]:
        """Return the plan of a call, its own metadata, and the seconds of its `grpc-timeout`."""
        own: dict[str, str] = {}
        timeout_s: float | None = None
        shared: list[Field] = []
        for field in fields:
            name = _OWN.get(field[0])
            if name is None:
                shared.append(field)
            elif name == "grpc-timeout":
                timeout_s = parse_timeout_s(field[1])
            elif name not in own:
                own[name] = field[1].decode("latin-1")
        key = tuple(shared)
        return self._known.get(key) or self._read(key), own, timeout_s

    def _read(self, key: tuple[Field, ...]) -> CallPlan:
        values: dict[bytes, bytes] = {}
        for name, value in key:
            values.setdefault(name, value)

        def get(name: str) -> str | None:
            value = values.get(name.encode())
            return None if value is None else value.decode("latin-1")

        encoding = get("grpc-encoding") or ""
        plan = CallPlan(
            path=values.get(b":path", b""),
            is_grpc=values[b":method"] == b"POST" and values.get(b"content-type", b"").startswith(b"application/grpc"),
            context=read_headers(get, trusted=self._trusted, sampling=self._sampling),
            encoding="" if encoding == "identity" else encoding,
            load_form=report_form(get(LOAD_FORMAT) or ""),
            errors_as_status=values.get(ERROR_MODE, b"").lower() == b"true",
            of_tenant=TENANT.encode() in values,
            fields=key,
            secrets=[each for each in self._restrictions if each.met(get)],
        )
        if sum(len(name) + len(value) for name, value in key) <= MAX_PLAN_BYTES:
            if len(self._known) >= MAX_PLANS:
                self._known.clear()
            self._known[key] = plan
        return plan

    def context(
        self, plan: CallPlan, own: Mapping[str, str], now: float, timeout_s: float | None, connection: str
    ) -> tuple[CallContext, int]:
        """Make the context of a call that arrived at `now`; with it the caller's span, 0 if the trace begins here."""
        context = plan.context
        if own and not _OF_CONTEXT.isdisjoint(own):
            context = context.of_request(own.get)
        parent_id = context.trace.span_id if context.trace is not None else 0
        if timeout_s is None:
            return context.at(now, self._default_timeout_s, connection), parent_id
        ctx = context.at(now, timeout_s, connection)
        if ctx.deadline > now + timeout_s:
            ctx = replace(ctx, deadline=now + timeout_s)
        return ctx, parent_id
