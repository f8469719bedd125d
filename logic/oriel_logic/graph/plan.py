"""Decides which steps of a declared pipeline may run, and what it answers. Pure: `run` executes it.

A step *settles* when it is done or skipped. It starts once everything it refers to has settled; it is skipped if one of
its conditions does not hold, or if a value it needs comes from a skipped step and has no alternative. Steps that refer
to nothing unsettled start together. Answers are tried in the order of the file: an answer waits until all before it are
ruled out, so that the answer does not depend on which step was faster. Once there is an answer nothing else starts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from oriel_logic.graph.document import AnswerTable, Document, GraphError, StepTable
from oriel_logic.graph.references import ROOTS, Condition, Fixed, Reference, parse_condition, parse_source

Source = Reference | Fixed
Alternatives = tuple[Source, ...]
Read = Callable[[Reference], Any]


class _Nothing:
    """Marks a missing value: pending or absent."""


PENDING: Final = _Nothing()
ABSENT: Final = _Nothing()


@dataclass(frozen=True, slots=True)
class Step:
    """One step. inputs: name -> sources, the first available of which counts. needs: the steps it refers to."""

    table: StepTable
    inputs: Mapping[str, Alternatives]
    when: tuple[Condition, ...]
    needs: frozenset[str]


@dataclass(frozen=True, slots=True)
class Answering:
    """One possible answer. whole: the value is the answer, not one field of it."""

    values: Mapping[str, Alternatives]
    whole: bool
    when: tuple[Condition, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    steps: Mapping[str, Step]
    answers: tuple[Answering, ...]


class Progress:
    """One run. read: returns what `request` and `ctx` refer to, and the scalar of a condition's value; it may raise."""

    def __init__(self, plan: Plan, read: Read, scalar: Callable[[Reference, Any], Any]) -> None:
        self._plan = plan
        self._read = read
        self._scalar = scalar
        self._waiting = dict(plan.steps)
        self._done: dict[str, Mapping[str, Any]] = {}
        self.skipped: set[str] = set()

    def startable(self) -> list[tuple[Step, dict[str, Any]]]:
        """Return the steps to start now, each with its inputs; each step is returned once."""
        found: list[tuple[Step, dict[str, Any]]] = []
        more = True
        while more:  # a step that is skipped may settle what others wait for
            more = False
            for name, step in list(self._waiting.items()):
                if not all(need in self._done or need in self.skipped for need in step.needs):
                    continue
                del self._waiting[name]
                inputs = self._values(step.inputs) if self._holds(step.when) is True else ABSENT
                if isinstance(inputs, dict):
                    found.append((step, inputs))
                else:
                    self.skipped.add(name)
                    more = True
        return found

    def settle(self, name: str, outputs: Mapping[str, Any]) -> None:
        """Record the outputs of a started step."""
        self._done[name] = outputs

    def answer(self) -> tuple[Any] | None:
        """Return the answer, once there is one. Raises LookupError if there never will be."""
        for each in self._plan.answers:
            holds = self._holds(each.when)
            if holds is PENDING:
                return None
            values = self._values(each.values) if holds is True else ABSENT
            if values is PENDING:
                return None
            if isinstance(values, dict):
                return (values[""],) if each.whole else (values,)
        raise LookupError("no answer is left")

    def _holds(self, conditions: Sequence[Condition]) -> Any:
        """Return True, False, or PENDING; False as soon as one condition is."""
        pending = False
        for each in conditions:
            found = self._value((each.source,))
            if found is PENDING:
                pending = True
            elif found is ABSENT or not each.holds(self._scalar(each.source, found)):
                return False
        return PENDING if pending else True

    def _values(self, wanted: Mapping[str, Alternatives]) -> Any:
        """Return all values, ABSENT if one is, else PENDING if one is."""
        found = {name: self._value(sources) for name, sources in wanted.items()}
        missing = [each for each in found.values() if isinstance(each, _Nothing)]
        return found if not missing else ABSENT if ABSENT in missing else PENDING

    def _value(self, sources: Alternatives) -> Any:
        for each in sources:
            if isinstance(each, Fixed):
                return each.value
            if each.root in ROOTS:
                return self._read(each)
            if each.root in self.skipped:
                continue
            outputs = self._done.get(each.root)
            if outputs is None:
                return PENDING
            return outputs[each.path[0]] if each.path else outputs
        return ABSENT


def plan_of(document: Document, answers: Sequence[AnswerTable], label: str) -> Plan:
    """Make the plan of a document. Raises GraphError."""
    steps = {step.name: step_of(step, label) for step in document.step}
    answering = tuple(answering_of(each, f"{label}: answer {place + 1}") for place, each in enumerate(answers))
    used: set[str] = set()
    for name, step in steps.items():
        known(step.needs, steps, f"{label}: step '{name}'")
        used |= step.needs
    for place, each in enumerate(answering):
        needs = needs_of(each.values, each.when)
        known(needs, steps, f"{label}: answer {place + 1}")
        used |= needs
    for name in steps:
        if name not in used:
            raise GraphError(f"{label}: step '{name}': nothing uses it: refer to it in an answer, or leave it out")
    check_order(steps, label)
    return Plan(steps, answering)


def step_of(table: StepTable, label: str) -> Step:
    where = f"{label}: step '{table.name}'"
    inputs = {name: alternatives(each, f"{where}: inputs.{name}") for name, each in table.inputs.items()}
    when = conditions(table.when, where)
    return Step(table, inputs, when, needs_of(inputs, when))


def answering_of(table: AnswerTable, where: str) -> Answering:
    whole = isinstance(table.value, str)
    given = {"": table.value} if isinstance(table.value, str) else table.value
    values = {name: alternatives(each, f"{where}: value.{name}".rstrip(".")) for name, each in given.items()}
    return Answering(values, whole, conditions(table.when, where))


def alternatives(given: object, where: str) -> Alternatives:
    listed = given if isinstance(given, list) and given and all(isinstance(each, str) for each in given) else [given]
    try:
        return tuple(parse_source(each) for each in listed)
    except ValueError as error:
        raise GraphError(f"{where}: {error}") from error


def conditions(given: str | Sequence[str], where: str) -> tuple[Condition, ...]:
    try:
        return tuple(parse_condition(each) for each in ([given] if isinstance(given, str) else given))
    except ValueError as error:
        raise GraphError(f"{where}: when: {error}") from error


def needs_of(values: Mapping[str, Alternatives], when: Iterable[Condition]) -> frozenset[str]:
    sources = [each for sources in values.values() for each in sources if isinstance(each, Reference)]
    return frozenset(each.root for each in (*sources, *(one.source for one in when)) if each.root not in ROOTS)


def known(needs: Iterable[str], steps: Mapping[str, Step], where: str) -> None:
    for need in sorted(needs):
        if need not in steps:
            raise GraphError(f"{where}: there is no step '{need}': there are {', '.join(steps)}")


def check_order(steps: Mapping[str, Step], label: str) -> None:
    """Check that no step waits for itself (Kahn, 1962)."""
    left = dict(steps)
    while ready := [name for name, step in left.items() if not step.needs & left.keys()]:
        for name in ready:
            del left[name]
    if left:
        raise GraphError(f"{label}: step '{next(iter(left))}': it waits for itself, by way of {', '.join(left)}")
