"""Read the public part of a pool's reports about itself: known parts only, checked and bounded. Pure.

A description comes from a server behind the gateway and goes to clients that hold keys. So an operation keeps its text,
its inputs and its answer, and nothing that could send a key elsewhere (`servers`, `security`, links, callbacks) or
refer to another document.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from oriel_wire.process.api_page import MODELS, OPENAI, SAMPLE

MAX_ANSWER_BYTES = 512 * 1024
MAX_NAMES = 256  # the most services, and the most models, of one pool
MAX_DEPTH = 32
MAX_TENSORS = 64
MAX_TEXT = 2000
MODEL_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}\Z")
_SERVICE = re.compile(r"/v1/services/([A-Za-z0-9_-][A-Za-z0-9._-]{0,127})\Z")
_OPENAI_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@-]{0,127}\Z")
_MEDIA = re.compile(r"[a-z*]+/[A-Za-z0-9*.+-]{1,127}\Z")
_SCHEMAS = "#/components/schemas/"
_COMPONENT = re.compile(r"[A-Za-z0-9._-]{1,256}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFacts:
    """One service as its pool describes it. operation, components: JSON; components by name, `<service>.<name>`."""

    name: str
    summary: str
    operation: msgspec.Raw
    components: Mapping[str, msgspec.Raw]


class Tensor(msgspec.Struct, frozen=True):
    """An input or output of a model. A size of -1 is any size."""

    name: str
    datatype: str
    shape: list[int]


class ModelFacts(msgspec.Struct, frozen=True):
    """A model as its server describes it."""

    name: str
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []


class _Indexed(msgspec.Struct):
    name: str
    version: str | None = None
    state: str | None = None


class _NotDescribed(ValueError):
    """A part of a description cannot be passed on."""


class Description(msgspec.Struct, frozen=True):
    """The description of one pool: services by name, and models by path of the OpenAI API."""

    services: Mapping[str, ServiceFacts]
    openai: Mapping[str, tuple[str, ...]] = {}


def read_services(data: bytes) -> Description:
    """Return the services of an OpenAPI document, without those that cannot be read. Raises ValueError."""
    try:
        found = msgspec.json.decode(data)
        paths = dict(found["paths"])
        components = dict(found.get("components", {}).get("schemas", {}))
    except (msgspec.MsgspecError, RecursionError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError("it is not an OpenAPI document") from error
    services: dict[str, ServiceFacts] = {}
    for path, item in paths.items():
        match = _SERVICE.match(path) if isinstance(path, str) else None
        if match is None or len(services) >= MAX_NAMES:
            continue
        try:
            services[match[1]] = _service(match[1], item["post"], components)
        except (_NotDescribed, AttributeError, KeyError, TypeError):
            continue
    return Description(services, {path: names for path in OPENAI if (names := _models(paths.get(path)))})


def _models(item: Any) -> tuple[str, ...]:
    """Return the models that an operation of the OpenAI API accepts."""
    post = item.get("post") if isinstance(item, dict) else None
    names = post.get(MODELS) if isinstance(post, dict) else None
    given = names[:MAX_NAMES] if isinstance(names, list) else ()
    return tuple(name for name in given if isinstance(name, str) and _OPENAI_MODEL.match(name))


def _service(name: str, given: Mapping[str, Any], components: Mapping[str, Any]) -> ServiceFacts:
    """Read a service. Raises _NotDescribed; or AttributeError, KeyError, TypeError if the document has another
    shape.
    """
    part = _Part(name, components)
    operation: dict[str, Any] = {"summary": _text(given.get("summary")) or name}
    if given.get("description"):
        operation["description"] = _text(given["description"])
    if given.get("parameters"):
        operation["parameters"] = [_parameter(each, part) for each in given["parameters"][:MAX_TENSORS]]
    if given.get("requestBody"):
        body = given["requestBody"]
        operation["requestBody"] = {
            "required": body.get("required") is True,
            "content": _content(body["content"], part),
        }
    answer = given["responses"]["200"]
    operation["responses"] = {
        "200": {
            "description": _text(answer.get("description")) or "the answer",
            "content": _content(answer.get("content", {}), part),
        }
    }
    return ServiceFacts(
        name=name,
        summary=operation["summary"],
        operation=msgspec.Raw(msgspec.json.encode(operation)),
        components={each: msgspec.Raw(msgspec.json.encode(schema)) for each, schema in part.copied().items()},
    )


def _parameter(given: Mapping[str, Any], part: "_Part") -> dict[str, Any]:
    if given["in"] != "query" or not isinstance(given["name"], str):
        raise _NotDescribed
    return {
        "name": _text(given["name"]),
        "in": "query",
        "required": given.get("required") is True,
        "schema": part.copy(given.get("schema", {})),
        "description": _text(given.get("description")),
    }


def _content(given: Mapping[str, Any], part: "_Part") -> dict[str, Any]:
    """Return media type -> schema and sample."""
    made: dict[str, Any] = {}
    for media, each in given.items():
        if _MEDIA.match(media) is None:
            raise _NotDescribed
        made[media] = {"schema": part.copy(each["schema"])} if "schema" in each else {}
        if "example" in each:
            made[media]["example"] = _plain(each["example"], 0)
        if isinstance(each.get(SAMPLE), str):
            made[media][SAMPLE] = each[SAMPLE]
    return made


def _text(given: Any) -> str:
    return given[:MAX_TEXT] if isinstance(given, str) else ""


def _plain(value: Any, depth: int) -> Any:
    """Return the value itself. Raises _NotDescribed if it is nested too deeply."""
    if depth > MAX_DEPTH:
        raise _NotDescribed
    for each in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _plain(each, depth + 1)
    return value


class _Part:
    """Copies the schemas of one service, and those they refer to under names that begin with the service's name."""

    def __init__(self, service: str, components: Mapping[str, Any]) -> None:
        self._service = service
        self._components = components
        self._wanted: dict[str, str] = {}  # name in the source -> name in the copy
        self._copied: dict[str, Any] = {}

    def copied(self) -> Mapping[str, Any]:
        """Return the components that are referred to, and those that they refer to. Raises _NotDescribed."""
        while len(self._copied) < len(self._wanted):
            for there, here in list(self._wanted.items()):
                if here not in self._copied:
                    self._copied[here] = self.copy(self._components.get(there, {}))
        return self._copied

    def copy(self, schema: Any, depth: int = 0) -> Any:
        """Return a schema with renamed references; one that leads elsewhere becomes a schema of anything."""
        if depth > MAX_DEPTH:
            raise _NotDescribed
        if isinstance(schema, list):
            return [self.copy(each, depth + 1) for each in schema]
        if not isinstance(schema, dict):
            return schema
        reference = schema.get("$ref")
        if isinstance(reference, str):
            there = reference.removeprefix(_SCHEMAS)
            if there == reference or _COMPONENT.match(there) is None:
                return {}
            own = there if there.startswith(f"{self._service}.") else f"{self._service}.{there}"
            return {"$ref": _SCHEMAS + self._wanted.setdefault(there, own)}
        return {key: self.copy(each, depth + 1) for key, each in schema.items() if key not in ("$id", "$dynamicRef")}


def read_index(data: bytes) -> dict[str, tuple[str, ...]]:
    """Return the names of ready models in an answer to `/v2/repository/index`, each with its versions.

    Raises ValueError.
    """
    try:
        rows = msgspec.json.decode(data, type=list[_Indexed])
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError("it is not a repository index") from error
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.state in ("READY", None) and MODEL_NAME.match(row.name):
            found.setdefault(row.name, []).append(row.version or "")
    return {name: tuple(sorted(versions)) for name, versions in sorted(found.items())[:MAX_NAMES]}


def read_model(data: bytes, name: str) -> ModelFacts:
    """Read an answer to `/v2/models/<name>`. Raises ValueError."""
    try:
        found = msgspec.json.decode(data, type=ModelFacts)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError("it is no model's metadata") from error
    if found.name != name or max(len(found.inputs), len(found.outputs)) > MAX_TENSORS:
        raise ValueError("it is no metadata of that model")
    return found
