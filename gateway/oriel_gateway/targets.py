"""What a request line asks for: the public paths, judged for one tenant, without touching the body.

A path is percent-decoded once, has to match one of the known forms, and is forwarded in its canonical spelling, so
that the next hop cannot read another name out of it than the one that was authorised.
"""

import re
from dataclasses import dataclass
from typing import Literal
from urllib.parse import unquote_to_bytes

from oriel_gateway.errors import Outcome, Refused
from oriel_policies.documents import Allowance, Route, Snapshot, Tenant

__all__ = ["Kind", "Target", "resolve", "valid_name", "valid_version"]

Kind = Literal["service", "model", "server"]

_NAME = r"(?P<name>[A-Za-z0-9_-][A-Za-z0-9._-]{0,127})"
_SERVICE = re.compile(rf"/v1/services/{_NAME}\Z")
# One spelling per version: a server reads 01 as 1, and a route or a limit for version 1 would not know it.
_VERSION = r"(?P<version>0|[1-9][0-9]{0,17})"
_MODEL = re.compile(rf"/v2/models/{_NAME}(?:/versions/{_VERSION})?(?:/(?P<verb>[a-z_]+))?\Z")
_ONLY_NAME = re.compile(rf"{_NAME}\Z")
_ONLY_VERSION = re.compile(rf"{_VERSION}\Z")
_OPERATOR = re.compile(
    r"/v2/(?:repository(?:/[A-Za-z0-9._-]{1,128})?/(?:index|models/[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}/(?:load|unload))"
    r"|logging|trace/setting|models/stats|models/[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}/trace/setting"
    r"|(?:system|cuda)sharedmemory(?:/region/[A-Za-z0-9_-][A-Za-z0-9._-]{0,127})?/(?:status|register|unregister))\Z"
)
_GET = frozenset({"GET", "HEAD"})
_VERBS = {
    None: _GET,
    "ready": _GET,
    "config": _GET,
    "stats": _GET,
    "infer": frozenset({"POST"}),
    "generate": frozenset({"POST"}),
    "generate_stream": frozenset({"POST"}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One authorised thing to ask one pool for. line: the request line to send upstream; plan: what its route says.

    allowances: those of the tenant that count the call.
    """

    kind: Kind
    name: str
    pool: str
    plan: Route
    line: bytes
    route: str
    head_only: bool
    allowances: tuple[Allowance, ...]


def valid_name(name: str) -> bool:
    """Whether `name` can name a model or a service."""
    return _ONLY_NAME.match(name) is not None


def valid_version(version: str) -> bool:
    """Whether `version` is a model's version as it may be spelled."""
    return _ONLY_VERSION.match(version) is not None


def resolve(method: str, path: str, query: str, tenant: Tenant, snapshot: Snapshot) -> Target:
    """Raises Refused NOT_FOUND (also for what the tenant may not use) or METHOD_NOT_ALLOWED."""
    if "%" in path:
        try:
            path = unquote_to_bytes(path).decode("ascii")
        except UnicodeDecodeError:
            raise _absent() from None
    kind: Kind = "model"
    name, route = "", None
    if match := _SERVICE.match(path):
        kind, name, allowed = "service", match["name"], frozenset({"GET", "POST"})
        if tenant.may_use_service(name):
            route = snapshot.route_for_service(name)
        absent = f"there is no service {name!r} here for this key"
    elif path == "/v2":
        kind, allowed, absent = "server", _GET, "nothing is served here"
        route = snapshot.route_for_model("")
    elif _OPERATOR.match(path):
        kind, absent = "server", "nothing is served at this path"
        allowed = frozenset({"GET", "POST"})
        if "operator" in tenant.scopes:
            route = snapshot.route_for_model("")
    elif (match := _MODEL.match(path)) and match["verb"] in _VERBS:
        name, allowed = match["name"], _VERBS[match["verb"]]
        if tenant.may_use_model(name):
            route = snapshot.route_for_model(name, match["version"] or "")
        absent = f"there is no model {name!r} here for this key"
    else:
        raise _absent()
    if route is None:
        raise Refused(Outcome.NOT_FOUND, absent)
    if method not in allowed:
        allow = ", ".join(sorted(allowed))
        raise Refused(Outcome.METHOD_NOT_ALLOWED, f"this path takes {allow}, not {method}", headers=(("allow", allow),))
    target = f"{path}?{query}" if query else path
    return Target(
        kind=kind,
        name=name,
        pool=route.pool,
        plan=route,
        line=f"{method} {target} HTTP/1.1".encode("ascii"),
        route=f"{kind}:{name}" if name else kind,
        head_only=method == "HEAD",
        allowances=tenant.allowances_for(kind, name, route.name),
    )


def _absent() -> Refused:
    return Refused(Outcome.NOT_FOUND, "nothing is served at this path")
