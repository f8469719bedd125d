"""Resolves a request line for one tenant to a `Target`, without touching the body.

A path is percent-decoded once, has to match one of the known forms, and is forwarded in its canonical spelling, so
that the next hop cannot read another name out of it than the one that was authorised.

Everything that does not depend on the single call is decided once, when the request line is first seen, and remembered
in the `Target`; a split by tenant is such a thing. Headers and splits by anything else are decided per call, by the
`Choices` that the target carries.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal
from urllib.parse import unquote_to_bytes

from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.identity.named_models import unknown_model
from oriel_policies.documents import Allowance, Route, Split, Tenant
from oriel_policies.documents.promises import takes_tokens
from oriel_policies.promise.routing import RouteTable
from oriel_policies.upstreams.assignment import Sides
from oriel_policies.upstreams.fallback import passed_over
from oriel_wire.near_names import did_you_mean, near_path

Kind = Literal["service", "model", "server"]
# The tenant by the tier that serves its calls on a route; without one, by its own. May raise Refused TIER_NOT_ALLOWED.
ByTier = Callable[[Tenant, Route], Tenant]
# Makes the target of a route and, where the route has a split, of one side of it.
Make = Callable[[Route, Split | None], "Target"]

_NAME = r"(?P<name>[A-Za-z0-9_-][A-Za-z0-9._-]{0,127})"
# A service's versions are names and not numbers: no two spellings are one to a logic server.
_SERVICE = re.compile(rf"/v1/services/{_NAME}(?:/versions/[A-Za-z0-9][A-Za-z0-9._-]{{0,63}})?\Z")
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
_POST = frozenset({"POST"})
# Paths of the OpenAI API: the service under whose name they are routed and granted, and where they name a model (see
# `Target.names`). `/v1/files` and `/v1/batches` are not among them: a batch names its models in a file that was sent
# before, perhaps by somebody else. So is nothing that names what another call has left behind.
_OPENAI: dict[str, tuple[str, frozenset[str], str]] = {
    "/v1/embeddings": ("embeddings", _POST, "json"),
    "/v1/completions": ("completions", _POST, "json"),
    "/v1/chat/completions": ("chat.completions", _POST, "json"),
    "/v1/responses": ("responses", _POST, "json"),
    "/v1/moderations": ("moderations", _POST, "json"),
    "/v1/images/generations": ("images.generations", _POST, "json"),
    "/v1/images/edits": ("images.edits", _POST, "form"),
    "/v1/images/variations": ("images.variations", _POST, "form"),
    "/v1/audio/speech": ("audio.speech", _POST, "json"),
    "/v1/audio/transcriptions": ("audio.transcriptions", _POST, "form"),
    "/v1/audio/translations": ("audio.translations", _POST, "form"),
    "/v1/models": ("models", _GET, "list"),
}
OPENAI_SERVICES = frozenset(name for name, _, _ in _OPENAI.values())
_LISTED = re.compile(r"/v1/models((?:/[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}){1,4})\Z")
_EXECUTING = frozenset({"infer", "generate", "generate_stream"})
_VERBS = {
    None: _GET,
    "ready": _GET,
    "config": _GET,
    "stats": _GET,
    "infer": frozenset({"POST"}),
    "generate": frozenset({"POST"}),
    "generate_stream": frozenset({"POST"}),
}


@dataclass(frozen=True, slots=True)
class Spill:
    """The pool that a call left for the next one of its route, and why.

    reason: a value of `Outcome`.
    """

    pool: str
    reason: str


_LENGTH = (b"content-length:",)
_READABLE = (*_LENGTH, b"accept-encoding:")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A request that the caller is authorised to send to one pool.

    line: the request line to send upstream. plan: the route that led here.
    tenant: the caller's tenant, with the tier that serves the call, or with the caller's own tier until the route is
    known.
    allowances: the tenant's allowances that count the call.
    work: the name of the timing to which the call belongs, because calls of one name take about equally long; "" if
    calls are not timed.
    choices: the routes among which the call's headers or id decide; `choices.pick` returns the target to use. None if
    there is no choice.
    side: the side of the split, "" without one. version: the model version to send, "" to leave it as in the call.
    executes: True if a call runs a model or a service. Only such calls use a device.
    keepable: True if the answer may be cached on a deterministic route.
    special: True if a call needs `Extras`.
    by_service_tier: the targets to use if the body asks for another tier, by its `service_tier`; None for one that is
    refused.
    tokens: True if the tokens of a call are counted.
    names: the text to search for model names that this tenant may not use: "json" or "form" (the request body), "list"
    or "entry" (the answer); "" for none.
    sought: the model that an endpoint must have to serve the call, as in `/v2/models/<sought>/ready`; "" if any can.
    counted: the name under which permits are counted: the model, or service and tenant, because calls of one tenant
    may take longer than those of another; "" if they are not counted.
    fallbacks: the targets to try in the pools after this one, in order; see `call.fallback`.
    renames: the model name to write into the body or message, "" to leave it unchanged.
    spills: the pools that the call has left for this one.
    copies_to: the target that gets copies of some calls, to compare the answers; None for the shadow of the route.
    stateless: True if the body must not refer to data that earlier calls stored on the servers.
    """

    tenant: Tenant
    kind: Kind
    name: str
    pool: str
    plan: Route
    line: bytes
    route: str
    head_only: bool
    work: str = ""
    allowances: tuple[Allowance, ...] = ()
    choices: "Choices | None" = None
    side: str = ""
    version: str = ""
    executes: bool = False
    keepable: bool = False
    special: bool = False
    tokens: bool = False
    by_service_tier: "tuple[tuple[str, Target | None], ...]" = ()
    names: str = ""
    sought: str = ""
    counted: str = ""
    fallbacks: "tuple[Target, ...]" = ()
    renames: str = ""
    spills: tuple[Spill, ...] = ()
    copies_to: "Target | None" = None
    stateless: bool = False

    @property
    def left_out(self) -> tuple[bytes, ...]:
        """The beginnings of the header lines that are not sent on: an answer whose tokens count has to be readable."""
        return _READABLE if self.tokens else _LENGTH


class Choices:
    """Routes of which a call's headers and id choose one. Their targets are made when they are first chosen."""

    def __init__(self, routes: Sequence[Route], make: Make, tenant: str) -> None:
        self._routes = routes
        self._make = make
        self._tenant = tenant
        self._made: dict[tuple[Route, Split | None], Target] = {}

    def pick(self, header: Callable[[str], str | None], span: str) -> Target | None:
        """Choose the target of one call, None when no route fits.

        header: maps a lower-case name to its first value in the call. span: the gateway's own id of the call: a client
        could choose its side by an id that it sends.
        """
        for route in self._routes:
            if all(header(name) == value for name, value in route.headers):
                break
        else:
            return None
        side = None
        if route.split:
            by = route.split_by
            # Without the header, the side follows from the tenant, which changes least from call to call.
            side = _side(route, span if by == "request" else by != "tenant" and header(by) or self._tenant)
        target = self._made.get((route, side))
        if target is None:
            target = self._made[route, side] = _made(self._make, route, side)
        return target


def _side(route: Route, key: str) -> Split | None:
    if not route.split:
        return None
    before, shares = 0.0, []
    for side in route.split:
        shares.append(side.until - before)
        before = side.until
    return route.split[Sides(route.name, [side.name for side in route.split], shares).of(key)]


def _made(make: Make, route: Route, side: Split | None) -> Target:
    """Return the target of one side; for a judged canary with the target that copies of its calls go to."""
    target, rule = make(route, side), route.rollback
    if rule is None or side is None or side.name != rule.canary or not rule.compare_share or not target.executes:
        return target
    other = next(each for each in route.split if each.name != rule.canary)
    return replace(target, copies_to=make(route, other))


def chosen(target: Target, header: Callable[[str], str | None], span: str) -> Target:
    """Return the target that the choices of `target` come to for one call. Raises Refused NOT_FOUND.

    header, span: see `Choices.pick`.
    """
    assert target.choices is not None
    found = target.choices.pick(header, span)
    if found is None:
        raise absent(target.kind, target.name)
    return found


def check_model(tenant: Tenant, name: str, version: str) -> None:
    """Raise Refused NOT_FOUND if these name no model, or one that this tenant may not use. version: may be ""; for one
    that is no number the refusal is INVALID_REQUEST, with Triton's sentence.
    """
    if _ONLY_NAME.match(name) is None or not tenant.may_use_model(name):
        raise absent("model", name, tenant)
    if version and not _ONLY_VERSION.match(version):
        wanted = f"from specified version string {version[:64]!r}, version should be an integral value > 0"
        raise Refused(Outcome.INVALID_REQUEST, f"failed to get model version {wanted}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """The place that a path names. found: its routes that the tenant may use. missing: the error if there are none, if
    it is another one than that there is no such thing. allowed: its methods. verb, version: the verb and version in a
    model's path.
    """

    kind: Kind
    name: str
    found: tuple[Route, ...]
    allowed: frozenset[str]
    missing: Refused | None = None
    verb: str | None = None
    version: str = ""
    names: str = ""


@dataclass(frozen=True, slots=True)
class Tiers:
    """The tiers of calls. by_route: see `ByTier`. by_service_tier: returns the tenant by the tier of each
    `service_tier` that bodies of the OpenAI API may ask for on a route; None for one that is refused.
    """

    by_route: ByTier
    by_service_tier: Callable[[Tenant, Route], Mapping[str, Tenant | None]]


def resolve(
    method: str, path: str, query: str, tenant: Tenant, routes: RouteTable, tiers: Tiers | None = None
) -> Target:
    """Resolve a request line. tiers: tiers by request; None if every call has its tenant's.

    Raises Refused NOT_FOUND (also for what the tenant may not use), METHOD_NOT_ALLOWED or what `tiers` does.
    """
    if "%" in path:
        try:
            path = unquote_to_bytes(path).decode("ascii")
        except UnicodeDecodeError:
            raise _nothing(path) from None
    place = _place(path, tenant, routes)
    kind, name, verb = place.kind, place.name, place.verb
    if not place.found:
        raise place.missing or absent(kind, name, tenant)
    if method not in place.allowed:
        allow = ", ".join(sorted(place.allowed))
        raise Refused(Outcome.METHOD_NOT_ALLOWED, f"this path takes {allow}, not {method}", headers=(("allow", allow),))
    executes = (kind == "service" or verb in _EXECUTING) and place.names not in ("list", "entry")
    wanted = replace(
        _target_of(tenant, place.found[0], kind, name),
        executes=executes and method == "POST",
        keepable=executes and method != "HEAD" and verb != "generate_stream",
        head_only=method == "HEAD",
        names=place.names,
    )

    def line_of(where: str) -> bytes:
        return f"{method} {f'{where}?{query}' if query else where} HTTP/1.1".encode("ascii")

    def other_model(model: str) -> tuple[bytes, str, str]:
        where = f"/v2/models/{model}/{verb}"
        return line_of(where), f"{kind}:{where}", ""

    def make(route: Route, side: Split | None) -> Target:
        # A call that names a version gets this version. Only a call that names none gets that of the side.
        version = side.version if side is not None and not place.version else ""
        where = f"/v2/models/{name}/versions/{version}{f'/{verb}' if verb else ''}" if version and name else path
        line, work = line_of(where), f"{kind}:{where}" if method == "POST" and name else ""

        def of(tenant: Tenant, others: tuple[tuple[str, Target | None], ...] = ()) -> Target:
            found = replace(_target(wanted, tenant, route, side, place.version), line=line, work=work)
            found = replace(found, by_service_tier=others, special=True) if others else found
            return _with_fallbacks(found, place.version, other_model, in_body=path in _OPENAI)

        served = tenant if tiers is None else tiers.by_route(tenant, route)
        names = tiers is not None and path in _OPENAI and method == "POST"
        others = tiers.by_service_tier(served, route) if tiers is not None and names else {}
        return of(served, tuple((word, None if each is None else of(each)) for word, each in others.items()))

    return _first(place.found, make, wanted)


def _place(path: str, tenant: Tenant, routes: RouteTable) -> _Place:
    """Return the place that a decoded path names. Raises Refused NOT_FOUND for a path that has no meaning."""
    tier = tenant.tier.name
    if match := _SERVICE.match(path):
        name = match["name"]
        found = routes.for_service(name, tier) if tenant.may_use_service(name) else ()
        return _Place(kind="service", name=name, found=found, allowed=frozenset({"GET", "POST"}))
    listed = _LISTED.match(path)
    if path in _OPENAI or listed is not None:
        name, allowed, names = _OPENAI.get(path, _OPENAI["/v1/models"])
        found = routes.for_service(name, tier) if tenant.may_use_service(name) else ()
        missing = None
        if tenant.models == ("*",):
            names = ""
        elif listed is not None:
            names, model = "entry", listed[1][1:]
            if found and not tenant.may_use_model(model):
                found, missing = (), unknown_model(model, tenant)
        return _Place(kind="service", name=name, found=found, allowed=allowed, missing=missing, names=names)
    if path == "/v2":
        found = routes.for_model("", "", tier)
        return _Place(kind="server", name="", found=found, allowed=_GET, missing=_nothing(path))
    if _OPERATOR.match(path):
        found = routes.for_model("", "", tier) if "operator" in tenant.scopes else ()
        return _Place(kind="server", name="", found=found, allowed=frozenset({"GET", "POST"}), missing=_nothing(path))
    if (match := _MODEL.match(path)) and match["verb"] in _VERBS:
        name, verb, version = match["name"], match["verb"], match["version"] or ""
        found = routes.for_model(name, version, tier) if tenant.may_use_model(name) else ()
        return _Place(kind="model", name=name, found=found, allowed=_VERBS[verb], verb=verb, version=version)
    raise _nothing(path)


def resolve_grpc(
    kind: Kind, model: tuple[str, str], method: str, tenant: Tenant, routes: RouteTable, by_tier: ByTier | None = None
) -> Target:
    """Resolve a gRPC method. model: the name and the version of a model that this tenant may use; each may be ""."""
    name, version = model
    found = routes.for_model(name, version, tenant.tier.name)
    if not found:
        raise absent(kind, name, tenant)
    executes, keepable = method in ("ModelInfer", "ModelStreamInfer"), method == "ModelInfer"
    wanted = replace(_target_of(tenant, found[0], kind, name), executes=executes, keepable=keepable)
    work = f"model:{name}/{method}" if kind == "model" else ""

    def other_model(model: str) -> tuple[bytes, str, str]:
        return b"", f"model:{model}/{method}", model

    def make(route: Route, side: Split | None) -> Target:
        served = tenant if by_tier is None else by_tier(tenant, route)
        target = replace(_target(wanted, served, route, side, version), work=work)
        return _with_fallbacks(target, version, other_model)

    return _first(found, make, wanted)


def _first(found: tuple[Route, ...], make: Make, wanted: Target) -> Target:
    """Return the target that fits whatever the headers of a call are, or one with `choices`."""
    route, tenant = found[0], wanted.tenant
    if not route.headers and (not route.split or route.split_by == "tenant"):
        return _made(make, route, _side(route, tenant.name))
    return replace(_target_of(tenant, route, wanted.kind, wanted.name), choices=Choices(found, make, tenant.name))


def _target_of(tenant: Tenant, route: Route, kind: Kind, name: str) -> Target:
    """Return a target that says what a request names, without its route."""
    return Target(tenant=tenant, kind=kind, name=name, pool=route.pool, plan=route, line=b"", route="", head_only=False)


def _target(wanted: Target, tenant: Tenant, route: Route, side: Split | None, version: str) -> Target:
    """Return the target of a route and, where it has a split, of one side of it, but for its `line` and `work`.

    wanted: the request, as a target without a route. version: the one that is asked for; "" if none is.
    """
    kind, name, executes = wanted.kind, wanted.name, wanted.executes
    keepable, of_side = wanted.keepable and route.deterministic, "" if side is None or version else side.version
    shadowed = executes and bool(route.shadow_pool)
    of = version or of_side
    sought = (f"{name}/versions/{of}" if of else name) if kind == "model" else ""
    allowances = tenant.allowances_for(kind, name, route.name)
    stateless = executes and (kind, name) == ("service", "responses") and not route.stored_state
    tokens = executes and takes_tokens(kind, name)
    return replace(
        wanted,
        tenant=tenant,
        pool=side.pool if side is not None else route.pool,
        plan=route,
        route=f"{kind}:{name}" if name else kind,
        allowances=allowances,
        side="" if side is None else side.name,
        version=of_side,
        keepable=keepable,
        sought=sought,
        counted=sought or (f"{name} {tenant.name}" if executes else ""),
        tokens=tokens,
        stateless=stateless,
        special=bool(tokens or wanted.names or keepable or shadowed or side or stateless)
        or (route.sequences and executes)
        or route.sticky not in ("", "stream"),
    )


def bounds_tokens(tenant: Tenant, allowances: Sequence[Allowance]) -> bool:
    """True if a limit or a budget of the tenant depends on the tokens of its calls."""
    return any(each.counts_tokens for each in allowances) or any(
        budget.unit not in ("cpu_seconds", "device_seconds") for budget in tenant.budgets
    )


def _with_fallbacks(
    target: Target, version: str, other_model: Callable[[str], tuple[bytes, str, str]], *, in_body: bool = False
) -> Target:
    """Add what the call asks of the further pools of its route, if it executes something.

    version: the one that the call names. other_model: returns `line`, `work` and `renames` of a call of another model.
    in_body: True if a service's call names its model in its body.
    """
    plan, tenant = target.plan, target.tenant
    if not plan.fallback or not target.executes:
        return target
    known = target.name if target.kind == "model" or in_body else ""
    further = []
    for entry in plan.fallback:
        model = entry.model
        may_use = tenant.may_use_model(model)
        if passed_over(model, may_use=may_use, kind=target.kind, name=known, version=version):
            continue
        other = replace(target, pool=entry.pool, side="", special=True)
        if model and target.kind == "model":
            line, work, renames = other_model(model)
            other = replace(
                other,
                name=model,
                version="",
                line=line,
                route=f"model:{model}",
                work=work,
                sought=model,
                counted=model,
                renames=renames,
            )
        elif model:
            other = replace(other, renames=model)
        further.append(other)
    return replace(target, fallbacks=tuple(further), special=True)


def absent(kind: Kind, name: str, tenant: Tenant | None = None) -> Refused:
    """Return the error about something that this key cannot see, whether it is there or not.

    tenant: a near name among its models and services is added.
    """
    granted = () if tenant is None else tenant.models if kind == "model" else tenant.services
    near = did_you_mean(name, (each for each in granted if "*" not in each))
    return Refused(Outcome.NOT_FOUND, f"there is no {kind} {name[:128]!r} here for this key{near}")


def _nothing(path: str) -> Refused:
    message = "nothing is served at this path"
    if (near := near_path(path)) and (near in _OPENAI or _SERVICE.match(near) or _LISTED.match(near)):
        message += f": {near} is one (a path has /v1 once, and no slash at its end)"
    return Refused(Outcome.NOT_FOUND, message)
