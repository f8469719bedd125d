"""Describes the inputs and answers of a declared pipeline for OpenAPI: the fields that its file names.

The file declares no types: they come from the annotations of the functions of its steps; models declare none here.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from oriel_logic.bodies.schemas import Writer
from oriel_logic.bodies.signature import NotAService
from oriel_logic.graph.plan import Alternatives, Answering, Plan
from oriel_logic.graph.references import Reference


def input_of(plan: Plan) -> dict[str, Any] | None:
    """Return media type -> schema of the body; None if the pipeline does not read it as fields of JSON.

    A field is required if a step that always runs reads it; others may never be read.
    """
    read: list[tuple[Reference, bool]] = []
    for step in plan.steps.values():
        for sources in step.inputs.values():
            read += [(each, not step.when and len(sources) == 1) for each in requested(sources)]
        read += [(each.source, False) for each in step.when if each.source.root == "request"]
    for answer in plan.answers:
        read += [(each, False) for sources in answer.values.values() for each in requested(sources)]
        read += [(each.source, False) for each in answer.when if each.source.root == "request"]
    bodies = [(reference, required) for reference, required in read if reference.path != ("query",)]
    if not bodies or any(reference.path[:1] != ("json",) or len(reference.path) < 2 for reference, _ in bodies):
        return None
    schema: dict[str, Any] = {"type": "object"}
    for reference, required in bodies:
        add(schema, reference.path[1:], required)
    return {"application/json": {"schema": schema}}


def requested(sources: Iterable[object]) -> list[Reference]:
    return [each for each in sources if isinstance(each, Reference) and each.root == "request"]


def add(schema: dict[str, Any], path: tuple[str, ...], required: bool) -> None:
    name, *rest = path
    properties = schema.setdefault("properties", {})
    inner = properties.setdefault(name, {})
    if required and name not in schema.setdefault("required", []):
        schema["required"].append(name)
    if rest:
        inner["type"] = "object"
        add(inner, tuple(rest), required)


def output_of(plan: Plan, returns: Mapping[str, Any], writer: Writer) -> dict[str, Any]:
    """Return media type -> schema of the answer: one of those in the file. returns: the types of `run` steps."""
    schemas = [answer_schema(each, returns, writer) for each in plan.answers]
    return {"application/json": {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}}


def answer_schema(answer: Answering, returns: Mapping[str, Any], writer: Writer) -> dict[str, Any]:
    schemas = {name: source_schema(sources, returns, writer) for name, sources in answer.values.items()}
    if answer.whole:
        return schemas[""]
    return {
        "type": "object",
        "properties": schemas,
        "required": list(schemas),
        "additionalProperties": False,
    }


def source_schema(sources: Alternatives, returns: Mapping[str, Any], writer: Writer) -> dict[str, Any]:
    """Return the schema of a fixed value, or of all that a typed function returns; else of any value."""
    if len(sources) != 1:
        return {}
    source = sources[0]
    if not isinstance(source, Reference):
        return {"const": source.value}
    try:
        return writer.schema(returns.get(source.root, Any)) if not source.path else {}
    except NotAService:
        return {}
