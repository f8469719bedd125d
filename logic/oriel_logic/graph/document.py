"""Reads and checks the file of a declared pipeline; every error names the file, the step and the key."""

import re
import tomllib
from typing import Annotated, Any

import msgspec

from oriel_logic.bodies.signature import NotAService
from oriel_logic.graph.references import ROOTS
from oriel_logic.services.definition import Options, options_of

MAX_BYTES = 64 * 1024
MAX_STEPS = 64
STEP_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}\Z")
RUN = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\.py:([A-Za-z_][A-Za-z0-9_]*)\Z")
MEDIA = r"^[a-z*]+/[A-Za-z0-9*.+-]{1,127}$"
PLACE = re.compile(r"\$\.(step|answer)\[(\d+)\](?:\.(.*))?")


class GraphError(ValueError):
    """The file cannot be served; the text says where and what to change."""


class Fallback(msgspec.Struct, forbid_unknown_fields=True):
    """Another model, for requests with less time left, or of these tiers."""

    model: str
    version: str = ""
    min_remaining_ms: float = 0.0
    tiers: list[str] = []


class StepTable(msgspec.Struct, forbid_unknown_fields=True):
    """One step. run: `file.py:function`, beside the file. when: conditions that must all hold."""

    name: str
    inputs: dict[str, Any]
    model: str = ""
    version: str = ""
    run: str = ""
    outputs: list[str] | None = None
    when: str | list[str] = []
    fallback: Fallback | None = None


class AnswerTable(msgspec.Struct, forbid_unknown_fields=True):
    """One answer. value: answer field -> reference, or one reference."""

    value: dict[str, Any] | str
    when: str | list[str] = []


class Document(msgspec.Struct, forbid_unknown_fields=True):
    """A pipeline as its TOML file declares it.

    options: as in the decorator of a handler.
    takes: media type -> JSON Schema of a body, for descriptions of steps that read the whole `request`.
    """

    step: list[StepTable]
    answer: list[AnswerTable] | AnswerTable
    description: str = ""
    options: dict[str, Any] = {}
    takes: dict[Annotated[str, msgspec.Meta(pattern=MEDIA)], dict[str, Any]] = {}


def parse(text: bytes, label: str) -> tuple[Document, list[AnswerTable], Options]:
    """Parse the file. label: its name, for messages. Raises GraphError."""
    if len(text) > MAX_BYTES:
        raise GraphError(f"{label} has {len(text)} bytes, at most {MAX_BYTES} are read")
    try:
        found = tomllib.loads(text.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise GraphError(f"{label} is not TOML: {error}") from error
    if isinstance(found.get("answer"), dict):
        found["answer"] = [found["answer"]]
    try:
        document = msgspec.convert(found, Document)
        options = options_of(document.options)
    except msgspec.ValidationError as error:
        raise GraphError(f"{label}: {placed(found, str(error))}") from error
    except NotAService as error:
        raise GraphError(f"{label}: options: {str(error).removeprefix('@service: ')}") from error
    answers = document.answer if isinstance(document.answer, list) else [document.answer]
    check(document, answers, label)
    return document, answers, options


def placed(found: dict[str, Any], message: str) -> str:
    """Rewrite msgspec's error text with our names for the place."""
    sentence, _, path = message.partition(" - at ")
    match = PLACE.match(path.strip("`"))
    if match is None:
        return message.replace("`$.", "`")
    kind, index, key = match[1], int(match[2]), match[3]
    table = found[kind][index]
    name = table.get("name") if isinstance(table, dict) else None
    where = f"{kind} '{name}'" if isinstance(name, str) and kind == "step" else f"{kind} {index + 1}"
    return f"{where}: {key}: {sentence}" if key else f"{where}: {sentence}"


def check(document: Document, answers: list[AnswerTable], label: str) -> None:
    if not 0 < len(document.step) <= MAX_STEPS:
        raise GraphError(f"{label}: step: there are {len(document.step)}, 1 to {MAX_STEPS} are possible")
    if not 0 < len(answers) <= MAX_STEPS:
        raise GraphError(f"{label}: answer: there are {len(answers)}, 1 to {MAX_STEPS} are possible")
    seen: set[str] = set()
    for step in document.step:
        where = f"{label}: step '{step.name[:64]}'"
        if STEP_NAME.match(step.name) is None or step.name in ROOTS:
            raise GraphError(f"{where}: name: letters, digits, '_' and '-', at most 64, and not {' or '.join(ROOTS)}")
        if step.name in seen:
            raise GraphError(f"{where}: name: another step has it")
        seen.add(step.name)
        if bool(step.model) == bool(step.run):
            raise GraphError(f"{where}: give it either `model` or `run`")
        if step.run:
            if RUN.match(step.run) is None:
                raise GraphError(f"{where}: run: '{step.run[:64]}' is not file.py:function, of a file beside this one")
            for key in ("version", "outputs", "fallback"):
                if getattr(step, key):
                    raise GraphError(f"{where}: {key}: goes with `model`, not with `run`")
        elif not step.inputs:
            raise GraphError(f"{where}: inputs: a model needs some")
        if step.fallback is not None and not (step.fallback.tiers or step.fallback.min_remaining_ms > 0):
            raise GraphError(f"{where}: fallback: say when, with min_remaining_ms or tiers")
    for index, answer in enumerate(answers[:-1]):
        if not answer.when:
            raise GraphError(f"{label}: answer {index + 1}: only the last one goes without `when`: it is always given")
