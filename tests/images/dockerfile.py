"""A Dockerfile as data. The parser knows as much of the grammar as this project's Dockerfiles use, and refuses the
rest.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["Dockerfile", "Instruction", "Stage", "expand", "parse"]

NAMES = {
    *("ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL", "RUN", "STOPSIGNAL"),
    *("USER", "VOLUME", "WORKDIR", "ADD", "SHELL", "ONBUILD"),
}
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}|\$([A-Za-z_][A-Za-z0-9_]*)")
_PAIR = re.compile(r"([A-Za-z_][\w.-]*)=(\"(?:[^\"\\]|\\.)*\"|\S*)(?:\s+|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One instruction.

    line: the number of its first line, from 1.
    words: the words of an exec form; None for a shell form.
    """

    line: int
    name: str
    text: str
    flags: Mapping[str, str] = field(default_factory=dict)
    words: tuple[str, ...] | None = None

    @property
    def pairs(self) -> dict[str, str]:
        """Return what ENV, LABEL or ARG define: name -> value without quotes. An ARG without a value is left out."""
        if self.name == "ARG" and "=" not in self.text:
            return {}
        found, at = {}, 0
        while match := _PAIR.match(self.text, at):
            name, value = match.groups()
            found[name] = value[1:-1] if value.startswith('"') else value
            at = match.end()
        if at != len(self.text):
            raise ValueError(f"line {self.line}: {self.name} {self.text[at:]!r} is not NAME=VALUE")
        return found

    @property
    def argument(self) -> str:
        """Return the name that an ARG declares."""
        return self.text.partition("=")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One stage. base: what stands behind FROM."""

    name: str
    base: str
    line: int
    instructions: tuple[Instruction, ...]

    def each(self, name: str) -> list[Instruction]:
        return [each for each in self.instructions if each.name == name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dockerfile:
    """All stages. arguments: the ARGs before the first FROM, name -> default."""

    arguments: Mapping[str, str]
    stages: tuple[Stage, ...]

    def stage(self, name: str) -> Stage:
        (found,) = [each for each in self.stages if each.name == name]
        return found

    def chain(self, name: str) -> list[Stage]:
        """Return the stage and the stages it is based on, the lowest first."""
        stage = self.stage(name)
        return [*(self.chain(stage.base) if stage.base in self.names else []), stage]

    @property
    def names(self) -> list[str]:
        return [each.name for each in self.stages]

    @property
    def targets(self) -> list[str]:
        """Return the stages that no other stage is based on or copies from: the images that are kept."""
        used = {each.base for each in self.stages}
        used |= {copy.flags.get("from", "") for each in self.stages for copy in each.each("COPY")}
        return [each for each in self.names if each not in used]


def parse(text: str) -> Dockerfile:
    """Parse a Dockerfile. Raises ValueError with the line for what this grammar does not know."""
    arguments: dict[str, str] = {}
    stages: list[Stage] = []
    for each in _instructions(text):
        if each.name == "FROM":
            words = each.text.split()
            if len(words) != 3 or words[1] != "AS" or each.flags:
                raise ValueError(f"line {each.line}: FROM IMAGE AS NAME is all that is understood")
            stages.append(Stage(name=words[2], base=words[0], line=each.line, instructions=()))
        elif not stages:
            if each.name != "ARG":
                raise ValueError(f"line {each.line}: {each.name} before the first FROM")
            arguments |= each.pairs
        else:
            last = stages[-1]
            stages[-1] = Stage(name=last.name, base=last.base, line=last.line, instructions=(*last.instructions, each))
    return Dockerfile(arguments=arguments, stages=tuple(stages))


def _instructions(text: str) -> list[Instruction]:
    found, joined, begun = [], "", 0
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        begun = begun or number
        joined += line.strip().removesuffix("\\").strip() + " "
        if line.rstrip().endswith("\\"):
            continue
        found.append(_instruction(begun, joined.strip()))
        joined, begun = "", 0
    if joined:
        raise ValueError(f"line {begun}: the file ends within an instruction")
    return found


def _instruction(line: int, text: str) -> Instruction:
    name, _, rest = text.partition(" ")
    if name not in NAMES:
        raise ValueError(f"line {line}: {name} is no instruction")
    flags = {}
    while match := re.match(r"--([a-z-]+)(?:=(\S+))?\s+", rest):
        flags[match[1]] = match[2] or ""
        rest = rest[match.end() :]
    command = rest.removeprefix("CMD ") if name == "HEALTHCHECK" else rest
    return Instruction(line=line, name=name, text=rest, flags=flags, words=_exec_form(command.strip()))


def _exec_form(text: str) -> tuple[str, ...] | None:
    try:
        words = json.loads(text)
    except ValueError:
        return None
    return tuple(words) if isinstance(words, list) and all(isinstance(each, str) for each in words) else None


def expand(text: str, values: Mapping[str, str]) -> str:
    """Replace ${NAME} and $NAME as a builder does in ARG, COPY, ENV, FROM, LABEL, USER and WORKDIR; an unset name gives
    "".
    """
    return _VARIABLE.sub(lambda match: values.get(match[1] or match[2], ""), text)
