"""What a service takes and gives as OpenAPI says it: media type -> JSON Schema (2020-12), with shared components.

msgspec writes the schemas of dataclasses, Structs, TypedDicts and plain types, pydantic those of its own models.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oriel_logic.signature import MISSING, Form, NotAService, Parameter, Signature, form_of, is_pydantic

__all__ = [
    "JSON",
    "MEDIA_IN",
    "MEDIA_OUT",
    "Schemas",
    "MULTIPART",
    "fields_type",
    "lead_input",
    "reads_json",
    "schemas_of",
]

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
    """JSON-able. input, output: media type -> {"schema": ...}. query: inputs that may stand in the URL beside a body
    of another kind. components: named schemas, their names begin with the service's.
    gives_media: whether there may be pictures or sounds in an answer."""

    input: Mapping[str, Any]
    output: Mapping[str, Any]
    query: tuple[Mapping[str, Any], ...] = ()
    components: Mapping[str, Any]
    gives_media: bool = False


def fields_type(signature: Signature) -> Any:
    """The type of what is read whole: the one input's own, or an object with a field per input."""
    try:
        import msgspec  # a worker in an environment of its own may be without it
    except ImportError as error:
        raise NotAService("typed inputs need the package msgspec in the service's environment") from error
    inputs = [each for each in signature.inputs if each.form not in (Form.UPLOAD, Form.LINES)]
    if signature.body == "whole":
        return inputs[0].type
    required = [(each.name, field_type(each)) for each in inputs if each.default is MISSING]
    optional = [(each.name, field_type(each), default_of(each)) for each in inputs if each.default is not MISSING]
    return msgspec.defstruct("input", [*required, *optional], forbid_unknown_fields=True)


def reads_json(signature: Signature) -> bool:
    """Whether the body may be JSON of `fields_type`."""
    return bool(signature.inputs) and signature.streams_in is None and not lone_tensors(signature)


def lone_tensors(signature: Signature) -> bool:
    """Whether the body is a v2 infer request."""
    return any(each.form is Form.TENSORS for each in signature.inputs)


def field_type(parameter: Parameter) -> Any:
    return parameter.type | None if parameter.optional and parameter.form is not Form.JSON else parameter.type


def default_of(parameter: Parameter) -> Any:
    value = parameter.default
    if isinstance(value, IMMUTABLE):
        return value
    import msgspec

    return msgspec.field(default_factory=lambda: copy.deepcopy(value))


def schemas_of(signature: Signature, name: str) -> Schemas:
    """Raises NotAService for a type that has no JSON form."""
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
    given = Writer(name, is_lenient=True)  # what is given has the handler as its witness
    gives = output_content(signature, given)
    return Schemas(
        input=takes,
        output=gives,
        query=tuple(query),
        components=writer.components | given.components,
        gives_media="contentMediaType" in str((gives, given.components)),
    )


def lead_input(signature: Signature) -> Parameter | None:
    """The input that a body which is not JSON carries: the one picture, sound, array, file, stream or text (of
    several the one without a default)."""
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

    is_lenient: types without a JSON form are described as anything.
    """

    def __init__(self, service: str, *, is_lenient: bool = False) -> None:
        self.components: dict[str, Any] = {}
        self.is_lenient = is_lenient
        self._service = service

    def schema(self, found: Any) -> dict[str, Any]:
        """Raises NotAService."""
        if found is Any:
            return {}
        try:
            import msgspec

            from oriel_logic.moments import add_examples
        except ImportError as error:
            raise NotAService(
                "typed inputs and answers need the package msgspec in the service's environment"
            ) from error
        template = f"#/components/schemas/{self._service}.{{name}}"
        try:
            (schema,), components = msgspec.json.schema_components(
                [found], schema_hook=self.custom, ref_template=template
            )
            add_examples(found, schema, components, template.removesuffix("{name}"))
        except NotAService:
            raise
        except Exception as error:  # msgspec and pydantic have many words for types they cannot read
            shown = getattr(found, "__name__", str(found))
            what = "an input" if shown == "input" else f"the type {shown[:80]}"
            raise NotAService(f"{what} cannot be read from or written as JSON: {error}") from error
        for name, component in components.items():
            self.components[f"{self._service}.{name}"] = component
        return schema

    def item(self, found: Any) -> dict[str, Any]:
        return {"type": "string"} if found is str else self.schema(found)

    def custom(self, found: Any) -> dict[str, Any]:
        """For types that msgspec does not know."""
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
