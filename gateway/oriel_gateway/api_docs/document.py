"""Build the gateway's OpenAPI 3.1 document: what every gateway has, and a tenant's services and models. Pure.

Without a tenant the document is the same for every gateway: it does not show what is served.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from math import prod
from typing import Any

import msgspec

from oriel_gateway.api_docs.published import PoolFacts
from oriel_gateway.api_docs.reading import MAX_NAMES, ModelFacts, ServiceFacts, Tensor
from oriel_gateway.http_status import STATUS
from oriel_gateway.observe.usage import SHOWN
from oriel_gateway.routing.targets import OPENAI_SERVICES
from oriel_policies.documents import Tenant
from oriel_policies.documents.promises import fits
from oriel_policies.promise.routing import RouteTable
from oriel_wire.process.api_page import BINARY, DOCS, ERROR, OPENAI, OPENAPI, openai_operation

SERVICES = "/v1/services"
MAX_EXAMPLE = 1024  # the most elements of one tensor of an example
MAX_LISTED = 512  # the most services, and the most models, of one document
_JSON = "application/json"
_BYTES = "application/octet-stream"
_TITLE = "Oriel gateway"
_STRANGERS = (
    "Send a key or token (Authorization: Bearer KEY, or x-api-key: KEY) to see the services and models it may use."
)
_KNOWN = "What this key may use. Whatever else there is answers like what does not exist."
_TEXT: dict[str, Any] = {"type": "string"}
_INTEGER: dict[str, Any] = {"type": "integer"}
_OBJECT: dict[str, Any] = {"type": "object"}


def _object(*required: str, **properties: Any) -> dict[str, Any]:
    """Return the schema of an object with these properties."""
    always = {"required": list(required)} if required else {}
    return {"type": "object", **always, "properties": properties}


def _list(items: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": items}


def _parameter(name: str, where: str, schema: Mapping[str, Any], description: str = "") -> dict[str, Any]:
    """Return a parameter of operations. where: "path", or "header", which may be left out."""
    made = {"name": name, "in": where, "required": where == "path", "schema": schema}
    return made | {"description": description} if description else made


_V2_ERROR = _object(
    "error",
    error={**_TEXT, "description": "a sentence for people"},
    reason={**_TEXT, "description": "for programs: one of docs/errors.md"},
    request_id=_TEXT,
)
_TENSORS = _list(
    _object(
        *("name", "shape", "datatype"),
        name=_TEXT,
        shape=_list(_INTEGER),
        datatype={**_TEXT, "examples": ["FP32", "INT64", "BYTES"]},
        parameters=_OBJECT,
        data={**_list({}), "description": "the elements, flat or nested as the shape"},
    )
)
_INFER = _object("inputs", id=_TEXT, parameters=_OBJECT, inputs=_TENSORS, outputs=_list(_object("name", name=_TEXT)))
_INFERRED = _object("model_name", "outputs", id=_TEXT, model_name=_TEXT, model_version=_TEXT, outputs=_TENSORS)
_WHY = {
    400: "The request cannot be read, or carries two credentials.",
    401: "There is no key or token, or it does not count. `WWW-Authenticate` names the fault of a token that its "
    "issuer has signed (RFC 6750).",
    403: "`x-request-tier` names a tier above the one that serves the call, or none. What a key may not use is "
    "answered 404; a server behind the gateway may answer 403 for reasons of its own.",
    404: "There is nothing at this path for this key, whether it exists or not.",
    406: "None of the media types in Accept is given.",
    413: "The body is larger than what is read.",
    415: "A body of this media type is not read.",
    422: "The input cannot be served as it is.",
    429: "A limit of this key's tenant is reached; `Retry-After` is the true wait.",
    502: "The server behind the gateway cannot be reached, or broke off.",
    503: "There is no room now, or the service cannot run; `Retry-After` says when to come back.",
    504: "The time ran out: the tier's, or what `x-request-timeout-ms` allows.",
}
_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    429: {
        "Retry-After": "seconds",
        "RateLimit": "what is left of the limits",
        "RateLimit-Policy": "the limits",
    },
    502: {"Retry-After": "seconds, 1 to 60"},
    503: {"Retry-After": "seconds, 1 to 60"},
}
_COMMON = (400, 401, 403, 404, 413, 429, 502, 503, 504)
_OF_SERVICES = (*_COMMON, 406, 415, 422)
_DEADLINE = _parameter(
    "x-request-timeout-ms",
    "header",
    {**_INTEGER, "minimum": 1},
    "the deadline of this request, at most the tier's own, or the hold of its pool while no server can answer",
)
_TIER = _parameter("x-request-tier", "header", _TEXT, "a tier below the one that would serve this request")
_CALL_HEADERS = (_DEADLINE, _TIER)
_JSON_SIZE = _parameter(
    "inference-header-content-length",
    "header",
    {**_INTEGER, "minimum": 0},
    "of a binary body: the size in bytes of the JSON before the tensors",
)
_MODEL = _parameter("model", "path", _TEXT)
_VERSION = _parameter("version", "path", _TEXT)
_BY_TIER = {"type": "object", "additionalProperties": _INTEGER}
_TIME = {**_TEXT, "format": "date-time"}
_PERIOD = _object(
    begins=_TIME,
    **dict.fromkeys(SHOWN, _INTEGER),
    targets={**_list(_OBJECT), "description": "the same, by model or service"},
)
_USED = _object(
    *("tenant", "day", "month"),
    tenant=_TEXT,
    since={**_TIME, "description": "when this gateway began to count"},
    day=_PERIOD,
    month=_PERIOD,
    budgets=_list(_OBJECT),
)
_LEFT = _object(
    *("tenant", "tier", "limits"),
    tenant=_TEXT,
    tier=_TEXT,
    deadline={
        **_object(most_ms=_INTEGER, held_ms=_INTEGER, set_by=_TEXT, more_ms=_BY_TIER),
        "description": "the most time of a call (held_ms: without a server), who sets it, and the tiers that give more",
    },
    limits=_list(
        _object(
            **dict.fromkeys(("name", "kind", "unit", "per"), _TEXT),
            **dict.fromkeys(("limit", "left", "per_second", "more_in_s"), {"type": "number"}),
        )
    ),
)


class Listed(msgspec.Struct, frozen=True):
    """A row of `GET /v1/services`."""

    name: str
    path: str
    description: str = ""


def listed(tenant: Tenant, routes: RouteTable, pools: Mapping[str, PoolFacts]) -> list[Listed]:
    """Return the services that this tenant may use."""
    rows = [
        Listed(name=name, path=f"{SERVICES}/{name}", description=facts.summary if facts is not None else "")
        for name, facts in _services(tenant, routes, pools).items()
    ]
    return sorted(rows, key=lambda row: row.name)


def common_document() -> bytes:
    """Build the document of what every gateway has, for a caller without a key."""
    paths = {**_own_paths(), **_service_template(), **_model_templates()}
    for path in OPENAI:
        paths |= _openai_path(path, ())
    paths |= _openai_models()
    return _document(paths, {}, _STRANGERS)


def document(tenant: Tenant, routes: RouteTable, pools: Mapping[str, PoolFacts]) -> bytes:
    """Build the document of the services and models that this tenant may use, and of what every gateway has."""
    paths: dict[str, Any] = {}
    components: dict[str, Any] = {}
    for name, facts in _services(tenant, routes, pools).items():
        paths[f"{SERVICES}/{name}"] = {"post": _service(name, facts)}
        if facts is not None:
            components |= facts.components
    openai = _openai(tenant, routes, pools)
    for path, models in openai.items():
        paths |= _openai_path(path, models)
    if openai and tenant.may_use_service("models") and routes.for_service("models", tenant.tier.name):
        paths |= _openai_models()
    for name, model in _models(tenant, routes, pools).items():
        paths |= _model(name, model)
    if routes.for_model("", "", tenant.tier.name) and tenant.models:
        paths |= _model_templates()
    return _document(paths | _own_paths(), components, _KNOWN)


def _document(paths: Mapping[str, Any], components: Mapping[str, Any], about: str) -> bytes:
    for path, methods in paths.items():
        for method, operation in methods.items():
            operation.setdefault("operationId", _id(method, path))
    schemas = {"Error": ERROR, "ErrorV2": _V2_ERROR, "InferRequest": _INFER, "InferResponse": _INFERRED, **components}
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": _TITLE, "version": "1", "description": about},
            "servers": [{"url": "/", "description": "the gateway that this document comes from"}],
            "security": [{"bearer": []}, {"apiKey": []}],
            "tags": [{"name": name} for name in ("Services", "OpenAI", "Models", "Gateway")],
            "paths": paths,
            "components": {
                "securitySchemes": {
                    "bearer": {"type": "http", "scheme": "bearer", "description": "a key, or a token (JWT)"},
                    "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "a key"},
                },
                "schemas": schemas,
                "responses": {
                    **{str(status): _refusal(status, "Error") for status in _WHY},
                    **{f"v2-{status}": _refusal(status, "ErrorV2") for status in _COMMON},
                },
            },
        }
    )


def _id(method: str, path: str) -> str:
    """Return an id of an operation that names no service and no model: what a caller fills in is `any-...`."""
    return "-".join([method, *re.findall(r"[a-z0-9.-]+", path.replace("{", "any-"))])


def _refusal(status: int, schema: str) -> dict[str, Any]:
    reasons = ", ".join(f"`{outcome.value}`" for outcome, each in STATUS.items() if each == status)
    made: dict[str, Any] = {
        "description": _WHY[status] + (f" Reasons of the gateway: {reasons}." if reasons else ""),
        "content": {_JSON: {"schema": {"$ref": f"#/components/schemas/{schema}"}}},
    }
    if status in _HEADERS:
        made["headers"] = {name: {"description": what, "schema": _TEXT} for name, what in _HEADERS[status].items()}
    return made


def _refusals(statuses: Sequence[int], prefix: str = "") -> dict[str, Any]:
    return {str(status): {"$ref": f"#/components/responses/{prefix}{status}"} for status in statuses}


def _json(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {"description": "the answer", "content": {_JSON: {"schema": schema}}}


# Operations of every gateway --------------------------------------------------------------------------------


def _own_paths() -> dict[str, Any]:
    def own(summary: str, answer: Mapping[str, Any], *, needs_key: bool = False, **more: Any) -> dict[str, Any]:
        made = {"tags": ["Gateway"], "summary": summary, "responses": {"200": answer, **more}}
        return {"get": made if needs_key else made | {"security": []}}

    row = _object("name", "path", **dict.fromkeys(("name", "path", "description"), _TEXT))
    page = {"description": "a page", "content": {"text/html": {}}}
    services = _object(services=_list(row))
    return {
        SERVICES: own("The services this key may use", _json(services), needs_key=True, **_refusals((400, 401, 503))),
        "/v1/usage": own(
            "What this key's tenant has used this day and month", _json(_USED), needs_key=True, **_refusals((401, 503))
        ),
        "/v1/limits": own(
            "The limits of this key's tenant and what is left", _json(_LEFT), needs_key=True, **_refusals((401, 503))
        ),
        OPENAPI: own("This document: with a key, what that key may use", _json(_OBJECT), **_refusals((401,))),
        DOCS: own("A page to try it on", page),
        "/v2/health/live": own("Whether the gateway runs", {"description": "it runs"}),
        "/v2/health/ready": own(
            "Whether the gateway takes calls", {"description": "it does"}, **_refusals((503,), "v2-")
        ),
    }


def _service_template() -> dict[str, Any]:
    parameters = [_parameter("service", "path", _TEXT), *_CALL_HEADERS]
    return {f"{SERVICES}/{{service}}": {"post": _service("", None) | {"parameters": parameters}}}


def _model_templates() -> dict[str, Any]:
    """Return the paths of the v2 protocol for any model."""
    found: dict[str, Any] = {"/v2": {"get": _of_model("What the servers of the models are", None)}}
    for base, parameters in (
        ("/v2/models/{model}", [_MODEL]),
        ("/v2/models/{model}/versions/{version}", [_MODEL, _VERSION]),
    ):
        for verb, summary in {
            "": "Inputs and outputs of a model",
            "/ready": "Whether a model is ready",
            "/config": "A model's configuration",
            "/stats": "A model's statistics",
        }.items():
            found[base + verb] = {"get": _of_model(summary, None) | {"parameters": parameters}}
        for verb, summary in {
            "/infer": "Run a model",
            "/generate": "Run a model, plain JSON in and out",
            "/generate_stream": "Run a model, answers as server-sent events",
        }.items():
            made = _of_tensors(summary) if verb == "/infer" else _of_model(summary, _OBJECT)
            if verb == "/generate_stream":
                made["responses"]["200"]["content"] = {"text/event-stream": {"schema": _TEXT}}
            found[base + verb] = {"post": made | {"parameters": [*parameters, *made.get("parameters", _CALL_HEADERS)]}}
    return found


def _of_model(summary: str, takes: Mapping[str, Any] | None) -> dict[str, Any]:
    made: dict[str, Any] = {
        "tags": ["Models"],
        "summary": summary,
        "responses": {"200": _json(_OBJECT), **_refusals(_COMMON, "v2-")},
    }
    if takes is not None:
        made["requestBody"] = {"required": True, "content": {_JSON: {"schema": takes}}}
    return made


def _of_tensors(summary: str) -> dict[str, Any]:
    """Return the operation that runs a model, with tensors as JSON or, both ways, as bytes behind the JSON."""
    made = _of_model(summary, {"$ref": "#/components/schemas/InferRequest"})
    made["requestBody"]["content"][_BYTES] = {"schema": BINARY}
    made["parameters"] = [*_CALL_HEADERS, _JSON_SIZE]
    answer = made["responses"]["200"] = _json({"$ref": "#/components/schemas/InferResponse"})
    answer["content"][_BYTES] = {"schema": BINARY}
    return made


# Operations of the tenant -----------------------------------------------------------------------------------


def _services(tenant: Tenant, routes: RouteTable, pools: Mapping[str, PoolFacts]) -> dict[str, ServiceFacts | None]:
    """Return the services by name, at most MAX_LISTED; None for one that a route names and its pool does not
    describe.
    """
    found: dict[str, ServiceFacts | None] = {}
    may_use = _allowed(tenant.services)
    for pool, facts in pools.items():
        for name, service in (facts.services or {}).items():
            if len(found) >= MAX_LISTED:
                return found
            if may_use(name) and any(route.pool == pool for route in routes.for_service(name, tenant.tier.name)):
                found.setdefault(name, service)
    for name in islice(routes.service_names, MAX_NAMES):
        if name not in found and name not in OPENAI_SERVICES and may_use(name):
            routed = routes.for_service(name, tenant.tier.name)
            if all(pools[route.pool].services is None for route in routed if route.pool in pools):
                found[name] = None
    return found


def _models(tenant: Tenant, routes: RouteTable, pools: Mapping[str, PoolFacts]) -> dict[str, ModelFacts | None]:
    """Return the models by name, at most MAX_LISTED; None for one whose inputs are not known."""
    found: dict[str, ModelFacts | None] = {}
    may_use = _allowed(tenant.models)
    for pool, facts in pools.items():
        for name, model in (facts.models or {}).items():
            if len(found) >= MAX_LISTED:
                return found
            if may_use(name) and any(route.pool == pool for route in routes.for_model(name, "", tenant.tier.name)):
                found.setdefault(name, model)
    return found


def _allowed(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Return a test of names against patterns. Most patterns have no `*`, and many names are tested."""
    exact, wild = frozenset(patterns), [each for each in patterns if "*" in each]
    return lambda name: name in exact or any(fits(each, name) for each in wild)


def _service(name: str, facts: ServiceFacts | None) -> dict[str, Any]:
    made: dict[str, Any] = {"tags": ["Services"]}
    if facts is None:
        made["summary"] = name or "Call a service"
        anything: dict[str, Any] = {_JSON: {"schema": {}}, "text/plain": {"schema": _TEXT}}
        made["requestBody"] = {"content": {**anything, _BYTES: {"schema": BINARY}}}
        made["responses"] = {"200": {"description": "the answer", "content": {"*/*": {}}}}
    else:
        made |= msgspec.json.decode(facts.operation)
    if name:
        made["operationId"] = f"service-{name}"
        made["parameters"] = [*made.get("parameters", ()), *_CALL_HEADERS]
    made["responses"] |= _refusals(_OF_SERVICES)
    return made


def _openai_path(path: str, models: Sequence[str]) -> dict[str, Any]:
    made = openai_operation(path, models)
    made["parameters"] = [*_CALL_HEADERS]
    made["responses"] |= _refusals(_COMMON)
    return {path: {"post": made}}


def _openai_models() -> dict[str, Any]:
    made = {"tags": ["OpenAI"], "summary": "The models this key may use there"}
    return {"/v1/models": {"get": made | {"responses": {"200": _json(_OBJECT), **_refusals(_COMMON)}}}}


def _openai(tenant: Tenant, routes: RouteTable, pools: Mapping[str, PoolFacts]) -> dict[str, Sequence[str]]:
    """Return the paths of the OpenAI API with the models that this tenant may use there, as far as its pool names
    them.
    """
    found: dict[str, Sequence[str]] = {}
    for path, (name, _, _) in OPENAI.items():
        routed = routes.for_service(name, tenant.tier.name) if tenant.may_use_service(name) else ()
        for facts in [pools.get(route.pool, PoolFacts()) for route in routed]:
            models = [each for each in facts.openai.get(path, ()) if tenant.may_use_model(each)]
            if models or facts.services is None:
                found.setdefault(path, models)
    return found


def _model(name: str, facts: ModelFacts | None) -> dict[str, Any]:
    infer = _of_tensors(f"Run {name}")
    infer["operationId"] = f"model-{name}"
    if facts is not None:
        infer["description"] = f"takes {_shown(facts.inputs)}; gives {_shown(facts.outputs)}"
        example = [_example(each) for each in facts.inputs]
        if all(example):
            infer["requestBody"]["content"][_JSON]["example"] = {"inputs": example}
    return {
        f"/v2/models/{name}/infer": {"post": infer},
        f"/v2/models/{name}": {
            "get": _of_model(f"Inputs and outputs of {name}", None) | {"operationId": f"metadata-{name}"}
        },
    }


def _shown(tensors: Sequence[Tensor]) -> str:
    return ", ".join(f"{each.name} {each.datatype} {each.shape}" for each in tensors) or "nothing"


def _example(tensor: Tensor) -> dict[str, Any] | None:
    """Build an example with one element along every axis of any size; None if it would be too long."""
    shape = [size if size > 0 else 1 for size in tensor.shape]
    elements = prod(shape)
    if elements > MAX_EXAMPLE:
        return None
    kind = tensor.datatype
    one: Any = "text" if kind == "BYTES" else False if kind == "BOOL" else 0.0 if kind.startswith(("FP", "BF")) else 0
    return {"name": tensor.name, "shape": shape, "datatype": kind, "data": [one] * elements}
