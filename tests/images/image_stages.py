"""Executes a Dockerfile's stages without a container engine: one folder stands for the root of all its stages.

The paths that a Dockerfile makes (/opt/oriel, /src, ...) lie under that folder; all else, Python and glibc, is this
machine's. The words of each RUN, the ENV, the ARG and the order are the Dockerfile's own.
"""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from dockerfile import Dockerfile, Instruction, expand
from dockerfile_rules import OWN_FOLDERS
from dockerignore import Ignore

__all__ = ["Root", "RunFailed"]

_OWN = re.compile("(?<![\\w/.])(" + "|".join((*map(re.escape, OWN_FOLDERS), "/etc/oriel", "/models")) + r")(?![\w-])")
# A builder starts without this machine's; how the index is reached is kept, as an engine keeps its proxy's.
_KEPT = re.compile(r"(?i)(https?|no|all)_proxy|SSL_CERT_(FILE|DIR)|UV_(INDEX|DEFAULT_INDEX|CACHE_DIR)|LANG")
_UNREACHABLE = ("error sending request", "dns error", "Could not connect", "tcp connect error")


class RunFailed(Exception):
    """A RUN ended with an exit code other than 0."""

    @property
    def without_index(self) -> bool:
        """Whether the package index could not be reached and nothing else was wrong."""
        return any(word in str(self) for word in _UNREACHABLE)


class Root:
    """The folder that stands for the root of all stages; stages are built into it one after the other.

    folder: created if needed.
    context: the checkout.
    uv: the executable that stands for the image of uv.
    """

    def __init__(
        self,
        folder: Path,
        context: Path,
        file: Dockerfile,
        *,
        build_args: Mapping[str, str] = {},
        uv: Path | None = None,
    ) -> None:
        self.folder = folder
        self._uv = uv or Path(sys.executable).with_name("uv")
        self._context = context
        self._file = file
        self._given = {"PYTHON": getattr(sys, "_base_executable", sys.executable), **build_args}
        self._ignore = Ignore((context / ".dockerignore").read_text())
        self._globals: dict[str, str] = {}
        for name, default in file.arguments.items():
            self._globals[name] = self._given.get(name, expand(default, self._globals))
        folder.mkdir(parents=True, exist_ok=True)

    def at(self, path: str) -> Path:
        return self.folder / path.lstrip("/")

    def words(self, words: Sequence[str]) -> list[str]:
        """Return the words of an exec form, with the image's own paths replaced by those below the folder."""
        return [_OWN.sub(lambda match: f"{self.folder}{match[1]}", word) for word in words]

    def environment(self, target: str) -> dict[str, str]:
        """Return the environment that a container engine would give the stage's process."""
        values: dict[str, str] = {"PATH": os.defpath}
        for each in (i for stage in self._file.chain(target) for i in stage.instructions):
            self._declare(each, values, set())
        return dict(zip(values, self.words(list(values.values())), strict=True))

    def build(self, name: str) -> None:
        """Run the instructions of stage `name` alone. Raises RunFailed."""
        values: dict[str, str] = {"PATH": os.defpath}
        arguments: set[str] = set()
        where = self.folder
        for stage in self._file.chain(name):
            for each in stage.instructions:
                self._declare(each, values, arguments)
                if each.name == "WORKDIR":
                    where = self.at(each.text)
                    where.mkdir(parents=True, exist_ok=True)
                if stage.name != name:
                    continue
                if each.name == "COPY":
                    self._copy(each, where)
                if each.name == "RUN":
                    self._run(each, values, where)

    def _declare(self, each: Instruction, values: dict[str, str], arguments: set[str]) -> None:
        if each.name == "ARG":
            given = {**self._globals, **self._given}
            default = each.pairs.get(each.argument)
            if each.argument in given or default is not None:
                values[each.argument] = given.get(each.argument, expand(default or "", values))
                arguments.add(each.argument)
        if each.name == "ENV":
            values |= {name: expand(value, values) for name, value in each.pairs.items()}

    def _copy(self, each: Instruction, where: Path) -> None:
        *sources, target = each.text.split()
        into = self.at(target) if target.startswith("/") else where / target
        for source in sources:
            if source == "/uv":
                if not into.is_symlink():
                    into.symlink_to(self._uv)
                continue
            found = self.at(source) if "from" in each.flags else self._context / source
            if into.resolve() == found.resolve():
                continue  # from one stage to the same place in another: here they are one folder
            for path in [found] if found.is_file() else sorted(found.rglob("*")):
                if not path.is_file() or not ("from" in each.flags or self._sent(path)):
                    continue
                copied = into / path.relative_to(found) if found.is_dir() else into
                copied = into / path.name if found.is_file() and target.endswith("/") else copied
                copied.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, copied)
            if found.is_dir():
                into.mkdir(parents=True, exist_ok=True)

    def _sent(self, path: Path) -> bool:
        return self._ignore.lets_in(str(path.relative_to(self._context)))

    def _run(self, each: Instruction, values: Mapping[str, str], where: Path) -> None:
        assert each.words is not None, "a shell form"
        own = dict(zip(values, self.words(list(values.values())), strict=True))
        # The cache is this machine's: an engine starts without, and asks the index for everything.
        own.pop("UV_NO_CACHE", None)
        # Bytecode of the base's library goes beside, never into this machine's Python.
        if "compileall" in " ".join(each.words):
            own["PYTHONPYCACHEPREFIX"] = str(self.folder / "bytecode")
        kept = {name: value for name, value in os.environ.items() if _KEPT.fullmatch(name)}
        kept["HOME"] = os.environ.get("HOME", "/")
        done = subprocess.run(
            self.words(each.words), cwd=where, env=kept | own, capture_output=True, text=True, timeout=600, check=False
        )
        if done.returncode:
            raise RunFailed(f"line {each.line}: RUN {' '.join(each.words)[:120]}: {done.stdout}{done.stderr}")
