"""Describes a service's inputs and answers for OpenAPI: media type -> JSON Schema (2020-12), with shared components.

msgspec writes the schemas of dataclasses, Structs, TypedDicts and plain types, pydantic those of its own models.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import inspect as kinds

from oriel_logic.bodies.signature import MISSING, Form, NotAService, Output, Parameter, Signature, form_of, is_pydantic

JSON = "application/json"
NDJSON = "application/x-ndjson"
EVENTS = "text/event-stream"
MULTIPART = "multipart/form-data"
MEDIA_IN: Mapping[Form, tuple[str, ...]] = {
    Form.JSON: (),
    Form.TEXT: ("text/plain",),
    Form.BYTES: ("application/octet-stream",),
    Form.IMAGE: ("image/png", "image/jpeg"),
    Form.AUDIO: ("audio/wav",),
    Form.ARRAY: ("application/x-npy",),
    Form.TENSORS: ("application/octet-stream",),
    Form.UPLOAD: ("application/octet-stream",),
    Form.LINES: (NDJSON, EVENTS),
}
MEDIA_OUT: Mapping[Form, tuple[str, ...]] = {
    Form.JSON: (JSON,),
    Form.TEXT: ("text/plain", JSON),
    Form.BYTES: ("application/octet-stream",),
    Form.IMAGE: ("image/png", "image/jpeg", JSON),
    Form.AUDIO: ("audio/wav", JSON),
    Form.ARRAY: (JSON, "application/x-npy"),
    Form.TENSORS: (JSON, "application/octet-stream"),
    Form.LINES: (NDJSON, EVENTS),
}
IMMUTABLE = (type(None), bool, int, float, complex, str, bytes, tuple, frozenset)
V2_TENSORS = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["name", "shape", "datatype"],
        "properties": {
            "name": {"type": "string"},
            "shape": {"type": "array", "items": {"type": "integer"}},
            "datatype": {"type": "string"},
            "data": {"type": "array"},
        },
    },
    "examples": [[{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [0.5, 1.5]}]],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Schemas:
    """The schemas of one service, as values that JSON can hold.

    input, output: media type -> {"schema": ...}.
    query: inputs that may be in the URL beside a body that is not JSON.
    components: named schemas; their names begin with the service's.
    gives_media: True if an answer may contain pictures or sounds.
    """

    input: Mapping[str, Any]
    output: Mapping[str, Any]
    query: tuple[Mapping[str, Any], ...] = ()
    components: Mapping[str, Any]
    gives_media: bool = False


def fields_type(signature: Signature) -> Any:
    """Return the type that a whole body is decoded to: the only input's type, or an object with one field per input."""
    inputs = [each for each in signature.inputs if each.form not in (Form.UPLOAD, Form.LINES)]
    if signature.body == "whole":
        return inputs[0].type
    required = [(each.name, field_type(each)) for each in inputs if each.default is MISSING]
    optional = [(each.name, field_type(each), default_of(each)) for each in inputs if each.default is not MISSING]
    return msgspec.defstruct("input", [*required, *optional], forbid_unknown_fields=True)


def reads_json(signature: Signature) -> bool:
    """Return whether the body may be JSON of `fields_type`."""
    return bool(signature.inputs) and signature.streams_in is None and not lone_tensors(signature)


def lone_tensors(signature: Signature) -> bool:
    """Return whether the body is a v2 infer request."""
    return any(each.form is Form.TENSORS for each in signature.inputs)


def field_type(parameter: Parameter) -> Any:
    return parameter.type | None if parameter.optional and parameter.form is not Form.JSON else parameter.type


def default_of(parameter: Parameter) -> Any:
    value = parameter.default
    if isinstance(value, IMMUTABLE):
        return value
    return msgspec.field(default_factory=lambda: copy.deepcopy(value))


def schemas_of(signature: Signature, name: str) -> Schemas:
    """Describe a signature. Raises NotAService for a type that has no JSON form."""
    writer = Writer(name)
    takes: dict[str, Any] = {}
    query: list[Mapping[str, Any]] = []
    if lone_tensors(signature):
        takes[JSON] = {"schema": {"type": "object", "required": ["inputs"], "properties": {"inputs": V2_TENSORS}}}
    if reads_json(signature):
        takes[JSON] = {"schema": writer.schema(fields_type(signature))}
        if signature.body == "whole" and "contentMediaType" in str((takes, writer.components)):
            takes[MULTIPART] = takes[JSON]
    lead = lead_input(signature)
    if lead is not None:
        for media in MEDIA_IN[lead.form]:
            takes[media] = {"schema": writer.item(lead.type)} if lead.form is Form.LINES else {}
        query = [
            {"name": each.name, "in": "query", "required": False, "schema": writer.schema(each.type)}
            for each in signature.inputs
            if each is not lead and each.form in (Form.JSON, Form.TEXT)
        ]
    if signature.body == "fields" and not any(each.form in (Form.LINES, Form.TENSORS) for each in signature.inputs):
        takes[MULTIPART] = {"schema": multipart_schema(signature, writer)}
    if signature.body == "raw" and signature.injects("request"):
        takes["*/*"] = {}
    given = Writer(name, is_lenient=True)  # an answer needs no schema to be sent, so any type is accepted
    gives = output_content(signature, given)
    return Schemas(
        input=takes,
        output=gives,
        query=tuple(query),
        components=writer.components | given.components,
        gives_media="contentMediaType" in str((gives, given.components)),
    )


def lead_input(signature: Signature) -> Parameter | None:
    """Return the input that a body other than JSON carries: the only picture, sound, array, file, stream or text.

    If there are several, the one without a default counts.
    """
    media = [each for each in signature.inputs if MEDIA_IN[each.form]]
    found = [each for each in media if each.form is not Form.TEXT] or media
    needed = [each for each in found if each.default is MISSING] or found
    return needed[0] if len(needed) == 1 and signature.body == "fields" else None


def multipart_schema(signature: Signature, writer: "Writer") -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for each in signature.inputs:
        if each.form in (Form.JSON, Form.TEXT):
            properties[each.name] = writer.schema(each.type)
        else:
            properties[each.name] = {"type": "string", "format": "binary"}
    required = [each.name for each in signature.inputs if each.default is MISSING]
    return {"type": "object", "properties": properties, "required": required}


def output_content(signature: Signature, writer: "Writer") -> dict[str, Any]:
    output = signature.output
    media = MEDIA_OUT[output.form]
    if not output.declared and output.form is Form.JSON:
        return {"*/*": {}}
    if output.form is Form.LINES:
        if output.type is bytes:
            return {"application/octet-stream": {}}
        if output.type is str:
            media = (*media, "text/plain")
        return {each: {"schema": writer.item(output.type)} for each in media}
    schema = writer.schema(output.type)
    return {each: {"schema": schema} if each == JSON else {} for each in media}


class Writer:
    """Writes the schemas of one service; `components` collects the named ones.

    is_lenient: describe types without a JSON form as any value instead of raising.
    """

    def __init__(self, service: str, *, is_lenient: bool = False) -> None:
        self.components: dict[str, Any] = {}
        self.is_lenient = is_lenient
        self._service = service

    def schema(self, found: Any) -> dict[str, Any]:
        """Write the schema of one type. Raises NotAService."""
        if found is Any:
            return {}
        template = f"#/components/schemas/{self._service}.{{name}}"
        try:
            (schema,), components = msgspec.json.schema_components(
                [found], schema_hook=self.custom, ref_template=template
            )
            add_examples(found, schema, components, template.removesuffix("{name}"))
        except NotAService:
            raise
        except Exception as error:  # msgspec and pydantic raise many kinds for types they cannot read
            shown = getattr(found, "__name__", str(found))
            what = "an input" if shown == "input" else f"the type {shown[:80]}"
            raise NotAService(f"{what} cannot be read from or written as JSON: {error}") from error
        for name, component in components.items():
            self.components[f"{self._service}.{name}"] = component
        return schema

    def item(self, found: Any) -> dict[str, Any]:
        return {"type": "string"} if found is str else self.schema(found)

    def custom(self, found: Any) -> dict[str, Any]:
        """Serve as msgspec's `schema_hook`, for types that msgspec does not know."""
        form, _, _ = form_of(found)
        if form in (Form.IMAGE, Form.AUDIO):
            kind = "image/png" if form is Form.IMAGE else "audio/wav"
            return {"type": "string", "contentEncoding": "base64", "contentMediaType": kind}
        if form is Form.ARRAY:
            return {"type": "array", "description": "numbers, nested as the array's shape"}
        if form is Form.TENSORS:
            return {"type": "object", "properties": {"outputs": V2_TENSORS}}
        if is_pydantic(found):
            return self.pydantic(found)
        if self.is_lenient:
            return {"description": "any value"}
        raise NotAService(
            f"the type {getattr(found, '__name__', found)} has no JSON form: use a dataclass, a msgspec.Struct, a "
            "pydantic model or plain types"
        )

    def pydantic(self, found: Any) -> dict[str, Any]:
        template = f"#/components/schemas/{self._service}.{{model}}"
        schema: dict[str, Any] = found.model_json_schema(ref_template=template)
        for name, component in schema.pop("$defs", {}).items():
            self.components[f"{self._service}.{name}"] = component
        self.components[f"{self._service}.{found.__name__}"] = schema
        return {"$ref": f"#/components/schemas/{self._service}.{found.__name__}"}


DATE_TIME, TIME = "2026-01-31T12:00:00", "12:00:00"


def add_examples(found: Any, schema: dict[str, Any], components: Mapping[str, dict[str, Any]], prefix: str) -> None:
    """Add an example to each date and time without a time zone, which msgspec describes as plain text.

    found: the type that `schema` and `components` were made from.
    prefix: stands before a component's name in `$ref`.
    """
    todo = [(kinds.type_info(found), schema)]
    seen = set()
    while todo:
        kind, part = todo.pop()
        if isinstance(kind, kinds.Metadata):
            kind = kind.type
        if "$ref" in part:
            part = components.get(part["$ref"].removeprefix(prefix), {})
        if id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(kind, kinds.DateTimeType | kinds.TimeType):
            if part.get("type") == "string" and kind.tz is not True:
                part.setdefault("examples", [DATE_TIME if isinstance(kind, kinds.DateTimeType) else TIME])
        elif isinstance(kind, kinds.UnionType):
            options = part.get("anyOf", ())
            todo += zip(kind.types, options, strict=True) if len(options) == len(kind.types) else ()
        elif isinstance(kind, kinds.CollectionType | kinds.DictType):
            inner = kind.value_type if isinstance(kind, kinds.DictType) else kind.item_type
            below = part.get("additionalProperties" if isinstance(kind, kinds.DictType) else "items")
            todo += [(inner, below)] if isinstance(below, dict) else ()
        elif isinstance(kind, kinds.TupleType):
            todo += zip(kind.item_types, part.get("prefixItems", ()), strict=False)
        else:
            fields = {each.encode_name: each.type for each in getattr(kind, "fields", ())}
            todo += [(fields[name], each) for name, each in part.get("properties", {}).items() if name in fields]


class Unreadable(Exception):
    """The declared type can be decoded only by the library that it belongs to."""


def mismatch(output: Output, content_type: str, body: bytes) -> str:
    """Compare a JSON answer with the type that the handler declares.

    Returns a sentence for the handler's author, or "" if the answer fits or its type cannot be decoded by msgspec. Used
    by tests and self-tests, not for every request.
    """
    if not output.declared or output.form is not Form.JSON or content_type.partition(";")[0].strip() != JSON:
        return ""
    try:
        msgspec.json.decode(body, type=output.type, dec_hook=unreadable)
    except (Unreadable, TypeError):
        return ""
    except msgspec.MsgspecError as error:
        name = getattr(output.type, "__name__", str(output.type))
        return f"the answer is not the declared {name}: {error}"
    return ""


def unreadable(kind: type, value: Any) -> Any:
    raise Unreadable
