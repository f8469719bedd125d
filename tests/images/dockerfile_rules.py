"""Rules for our Dockerfiles that no linter knows. `faults` lists what breaks them, with the line."""

import re
from collections.abc import Iterator
from pathlib import Path

from dockerfile import Dockerfile, Instruction, Stage
from dockerignore import Ignore

__all__ = ["faults"]

USER = "65532:65532"
UNIT_PORTS = {"gateway": "8082", "logic": "8092", "inference": "8000"}
LABELS = {f"org.opencontainers.image.{each}" for each in ("title", "description", "version", "revision", "source")}
LABELS |= {"org.opencontainers.image.licenses", "org.opencontainers.image.base.name"}
# Read by a program from the environment of its RUN: uv, hatchling and hatch_build.py.
READ_BY_PROGRAMS = {"UV_DEFAULT_INDEX", "SOURCE_DATE_EPOCH", "ORIEL_COMPILE"}
SHELLS = re.compile(r"(^|/)(sh|bash|dash|ash|busybox|apt|apt-get|apk|dnf|yum|curl|wget|pip|pip3)$")
SECRET = re.compile(r"PASSW|SECRET|TOKEN|CREDENTIAL|PRIVATE|_KEY\b|://[^/\s\"]+:[^/\s\"]+@", re.IGNORECASE)
KEPT = ("ARG", "ENV", "LABEL")  # in the image's configuration or history, where everybody who pulls it reads them
OWN_FOLDERS = ("/src", "/tools", "/dist", "/opt/oriel", "/state", "/uv", "/var/lib", "/srv/services")
_ABSOLUTE = re.compile(r"(?<![\w.:/\]\[)(*|])(/[A-Za-z][\w./-]*)")


def faults(file: Dockerfile, unit: str, root: Path) -> list[str]:
    """List the broken rules. root: the checkout that is the build context."""
    ignore = Ignore((root / ".dockerignore").read_text())
    found: list[str] = []
    found += _bases(file)
    for stage in file.stages:
        for each in stage.instructions:
            found += [f"line {each.line}: {text}" for text in _of_instruction(each)]
        found += _arguments(file, stage)
        found += _copies(file, stage, ignore, root)
    for target in file.targets:
        found += [f"{target}: {text}" for text in _of_target(file, target, unit)]
    return found


def _bases(file: Dockerfile) -> Iterator[str]:
    before: list[str] = []
    for stage in file.stages:
        match = re.fullmatch(r"\$\{(\w+)\}", stage.base)
        if match is None and stage.base not in before:
            yield f"line {stage.line}: FROM {stage.base} is neither a build argument nor an earlier stage"
        if match is not None and match[1] not in file.arguments:
            yield f"line {stage.line}: FROM {stage.base} has no default"
        before.append(stage.name)
    for name, default in file.arguments.items():
        if not default.startswith("${") and not re.search(r":[\w.-]*\d[\w.-]*$|@sha256:", default):
            yield f"{name}: {default} names no version"


def _of_instruction(each: Instruction) -> Iterator[str]:
    if each.name in ("RUN", "CMD", "ENTRYPOINT", "HEALTHCHECK"):
        if each.words is None:
            yield f"{each.name} in shell form needs a shell"
        elif SHELLS.search(each.words[0]):
            yield f"{each.name} needs {each.words[0]}, which a base need not have"
        elif each.name != "CMD" and not each.words[0].startswith("/"):
            yield f"{each.name} looks {each.words[0]} up in the base's PATH"
    if each.name in ("ADD", "SHELL", "ONBUILD", "VOLUME"):
        yield f"{each.name} is not used here"
    if each.name in KEPT and SECRET.search(each.text):
        yield f"{each.name} may carry a secret into the image"
    if each.name == "RUN" and each.words is not None:
        yield from _run(each.words)


def _run(words: tuple[str, ...]) -> Iterator[str]:
    known = [path for word in words for path in _ABSOLUTE.findall(word)]
    for path in known:
        if not path.startswith(OWN_FOLDERS) and not re.search(r"compile\('", " ".join(words)):
            yield f"RUN names {path}, which is not ours"
    if "pip" in words and "-r" in words and "--require-hashes" not in words:
        yield "RUN installs what no hash pins"
    if "'pip'" in words[-1] and "'--require-hashes'" not in words[-1] and "tensorrt.txt" not in words[-1]:
        yield "RUN installs what no hash pins"
    if "pip" in words and "-r" not in words and "--no-index" not in words:
        yield "RUN installs what no lock pins"


def _arguments(file: Dockerfile, stage: Stage) -> Iterator[str]:
    below = [each for part in file.chain(stage.name) for each in part.instructions]
    declared = {each.argument for each in below if each.name == "ARG"}
    known = declared | {name for each in below if each.name == "ENV" for name in each.pairs} | {"PATH"}
    used = set()
    for each in stage.instructions:
        names = set(re.findall(r"\$\{?(\w+)\}?", each.text))
        used |= names
        for name in names - known:
            yield f"line {each.line}: ${{{name}}} is declared nowhere in this stage"
        if each.name == "RUN":
            used |= {name for name in declared if f"'{name}'" in each.text}
    for each in stage.each("ARG"):
        above = [other for other in file.stages if stage.name in (part.name for part in file.chain(other.name))]
        if each.argument in used | READ_BY_PROGRAMS:
            continue
        if not any(f"${{{each.argument}}}" in i.text for part in above for i in part.instructions):
            yield f"line {each.line}: the build argument {each.argument} is used by nothing"


def _copies(file: Dockerfile, stage: Stage, ignore: Ignore, root: Path) -> Iterator[str]:
    earlier = file.names[: file.names.index(stage.name)]
    for each in stage.each("COPY"):
        *sources, _ = each.text.split()
        if "from" in each.flags:
            if each.flags["from"] not in earlier:
                yield f"line {each.line}: COPY --from={each.flags['from']} is no earlier stage"
            continue
        for source in sources:
            if not (root / source).exists():
                yield f"line {each.line}: there is no {source}"
            elif source.strip("./") == "":
                yield f"line {each.line}: COPY of the whole context"
            else:
                inside = [p for p in (root / source).rglob("*") if p.is_file()] or [root / source]
                if not ignore.among(str(path.relative_to(root)) for path in inside):
                    yield f"line {each.line}: .dockerignore keeps {source} out"


def _of_target(file: Dockerfile, target: str, unit: str) -> Iterator[str]:
    chain = [each for stage in file.chain(target) for each in stage.instructions]
    users = [each for each in chain if each.name == "USER"]
    if not users or users[-1].text != USER:
        yield f"does not run as {USER}"
    if any(each.name in ("RUN", "COPY") for each in chain[chain.index(users[-1]) :] if users):
        yield "makes files after USER, which the unit then could write"
    labels = {name for each in chain if each.name == "LABEL" for name in each.pairs}
    if missing := LABELS - labels:
        yield f"lacks the label {sorted(missing)[0]}"
    entry = [each.words for each in chain if each.name == "ENTRYPOINT"]
    if entry != [("/opt/oriel/bin/oriel", unit)]:
        yield f"does not start oriel {unit}"
    checks = [each for each in chain if each.name == "HEALTHCHECK"]
    if len(checks) != 1 or f"'127.0.0.1', {UNIT_PORTS[unit]}," not in checks[0].text:
        yield f"asks no health on port {UNIT_PORTS[unit]}"
    exposed = " ".join(each.text for each in chain if each.name == "EXPOSE").split()
    if UNIT_PORTS[unit] not in exposed:
        yield f"does not expose {UNIT_PORTS[unit]}"
    for each in chain:
        if each.name == "COPY" and "chown" in each.flags and each.text.split()[-1] != "/var/lib/oriel":
            yield "gives the unit more to write than /var/lib/oriel"
