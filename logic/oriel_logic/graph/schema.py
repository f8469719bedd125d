"""What a declared pipeline takes and gives, for the OpenAPI document: the fields that its file names.

Of their types the file says nothing: those are the models', or what the functions of its steps are annotated with.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from oriel_logic.graph.plan import Alternatives, Answering, Plan
from oriel_logic.graph.references import Reference
from oriel_logic.schemas import Writer
from oriel_logic.signature import NotAService

__all__ = ["input_of", "output_of"]


def input_of(plan: Plan) -> dict[str, Any] | None:
    """media type -> schema of the body; None if the pipeline reads it otherwise than as fields of JSON.

    Required is what a step reads that always runs; other fields may never be looked at.
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
    """media type -> schema of the answer: one of those that the file lists. returns: the types of `run` steps."""
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
    """Of a value that stands in the file, or of all that a typed function gives; else of anything."""
    if len(sources) != 1:
        return {}
    source = sources[0]
    if not isinstance(source, Reference):
        return {"const": source.value}
    try:
        return writer.schema(returns.get(source.root, Any)) if not source.path else {}
    except NotAService:
        return {}
