"""`make run` is compiled in the background once, and later runs use that for as long as the sources are the same.

A stand-in compiles: it waits for the test, and its wheel holds a module that names it.
"""

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from unittest.mock import patch

import pytest

from oriel_cli.up import demo_assets

ROOT = Path(__file__).resolve().parents[2]
INSTALL = """#!/bin/sh
echo started >>compiled
read answer <gate
[ "$answer" = go ] || exit 3
[ "$VENV $1" = "build/compiler image-build.txt" ] && mkdir -p $VENV/bin && cp hatchling $VENV/bin/python
"""
HATCHLING = """#!{python}
import os, sys, zipfile
assert os.environ["ORIEL_COMPILE"] == "1" and sys.argv[1:5] == ["-m", "hatchling", "build", "-t"], sys.argv
with zipfile.ZipFile(sys.argv[-1] + "/a.whl", "w") as wheel:
    wheel.writestr("oriel_wire/build.py", "NAME = 'compiled'")
    wheel.writestr("oriel_cli/_demo/examples/models_mlp.py", "")
    wheel.writestr("oriel_cli/_demo/policies/tiers.toml", "")
"""
SHOW = "import sys; sys.path.append('wire'); import oriel_wire.build; print(oriel_wire.build.NAME)"


class Checkout:
    """A checkout with one module. `release` lets the stand-in go on, and waits until it has ended."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.module = folder / "wire" / "oriel_wire" / "build.py"
        self.compiled = folder / "build" / "run"
        for name in ("pyproject.toml", "hatch_build.py", "requirements/image-build.txt"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text("")
        (folder / "examples").mkdir()
        shutil.copy(ROOT / "requirements" / "run.py", folder / "requirements")
        self.module.parent.mkdir(parents=True)
        self.module.write_text("NAME = 'pure'")
        for name, text in (("requirements/install", INSTALL), ("hatchling", HATCHLING.format(python=sys.executable))):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        os.mkfifo(folder / "gate")
        self.groups: list[int] = []  # of the processes that compile

    def run(self, command: tuple[str, ...] = (sys.executable, "-S", "-c", SHOW), **environment: str) -> tuple[str, str]:
        """(what the command printed, the line about the build). Ends at once, while the stand-in waits."""
        done = subprocess.run(
            [sys.executable, "requirements/run.py", *command],
            cwd=self.folder,
            env={**os.environ, "CC": "sh", "PYTHONPATH": "", **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stderr.startswith("oriel: ") and done.stderr.count("\n") == 1
        self.groups += map(int, re.findall(r"kill -- -(\d+)", done.stderr))
        return done.stdout.strip(), done.stderr.removeprefix("oriel: ").strip()

    def release(self, answer: str = "go", edited: str = "") -> None:
        """Let the stand-in end. edited: text that the module has since the stand-in began."""
        with (self.folder / "gate").open("w") as gate:  # waits for the stand-in
            if edited:
                self.module.write_text(edited)
            gate.write(answer + "\n")
        self.ended()

    def ended(self) -> None:
        """Wait until nothing compiles."""
        with (self.folder / "build" / "run.lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
        assert sorted(each.name for each in self.compiled.parent.glob("run*")) in (
            *(["run.lock", "run.log"], ["run", "run.lock", "run.log"]),
        ), "nothing half made is left"

    def begun(self) -> int:
        return (self.folder / "compiled").read_text().count("started")


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Checkout]:
    made = Checkout(tmp_path)
    yield made
    for group in made.groups:  # of a test that failed
        with suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def test_the_first_run_is_pure_and_a_later_one_compiled(checkout: Checkout) -> None:
    name, line = checkout.run()
    assert name == "pure" and line.startswith("pure Python: the checkout is compiled in the background, once")
    assert "(build/run.log; `kill -- -" in line
    name, line = checkout.run()
    assert name == "pure" and line.startswith("pure Python: another `make run` has the checkout compiled")
    checkout.release()
    assert checkout.run() == ("compiled", "compiled from these sources (build/run)")
    assert checkout.begun() == 1


def test_compiled_code_serves_the_demo_of_the_checkout_which_may_be_edited(checkout: Checkout) -> None:
    checkout.run()
    checkout.release()
    demo = checkout.compiled / "oriel_cli" / "up" / "demo_assets.py"
    demo.parent.mkdir()
    shutil.copy(demo_assets.__file__, demo)
    (checkout.folder / "examples" / "models_mlp.py").write_text("")
    (checkout.folder / "policies" / "examples").mkdir(parents=True)
    spec = spec_from_file_location("compiled_demo_assets", demo)
    assert spec is not None and spec.loader is not None
    compiled = module_from_spec(spec)
    with patch.dict(sys.modules, {spec.name: compiled}):
        spec.loader.exec_module(compiled)
    assert compiled.find().services == (checkout.folder / "examples" / "services",)


def test_sources_that_were_edited_are_run_as_they_are(checkout: Checkout) -> None:
    checkout.run()
    checkout.release()
    checkout.module.write_text("NAME = 'edited'")
    name, line = checkout.run()
    assert name == "edited" and "the sources, or the Python, changed after they were compiled; `rm -r build" in line
    checkout.module.write_text("NAME = 'pure'")
    assert checkout.run()[0] == "compiled", "they are as they were"
    checkout.module.with_name("more.py").write_text("")
    assert checkout.run()[0] == "pure"
    assert checkout.begun() == 1, "the one who edits is not kept waiting by a compiler each time"


def test_what_is_compiled_while_a_source_is_edited_is_thrown_away(checkout: Checkout) -> None:
    checkout.run()
    checkout.release(edited="NAME = 'edited'")
    assert not checkout.compiled.exists()
    assert checkout.run()[0] == "edited"
    checkout.release()
    assert checkout.run()[0] == "compiled" and checkout.begun() == 2


def test_a_failure_is_said_in_one_line_and_not_repeated(checkout: Checkout) -> None:
    checkout.run()
    checkout.release("fail")
    for _ in range(2):
        name, line = checkout.run()
        assert name == "pure" and line.startswith("pure Python: compiling failed (build/run.log); `rm -r build/run`")
    assert checkout.begun() == 1 and "exit status 3" in (checkout.folder / "build" / "run.log").read_text()
    shutil.rmtree(checkout.compiled)
    checkout.run()
    checkout.release()
    assert checkout.run()[0] == "compiled"


def test_a_wheel_that_cannot_be_unpacked_is_a_failure_as_well(checkout: Checkout) -> None:
    checkout.run()
    wheel = "zipfile.ZipFile(sys.argv[-1] + '/a.whl', 'w').close()"
    (checkout.folder / "hatchling").write_text(f"#!{sys.executable}\nimport sys, zipfile\n{wheel}\n")
    checkout.release()
    assert checkout.run()[1].startswith("pure Python: compiling failed (build/run.log)")


def test_where_nothing_can_be_written_the_command_runs_as_well(checkout: Checkout) -> None:
    checkout.compiled.parent.write_text("no folder")
    name, line = checkout.run()
    assert name == "pure" and line.startswith("pure Python: the checkout cannot be compiled here: ")


def test_compiling_that_is_stopped_leaves_nothing_and_is_begun_again(checkout: Checkout) -> None:
    checkout.run()
    os.killpg(checkout.groups.pop(), signal.SIGTERM)
    with (checkout.folder / "build" / "run.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
    assert not checkout.compiled.exists()
    assert "compiled in the background" in checkout.run()[1]
    checkout.release()
    assert checkout.run()[0] == "compiled"


def test_ctrl_c_is_for_the_command_only(checkout: Checkout) -> None:
    interrupted = "import os, signal; signal.signal(2, lambda *_: print('stopped')); os.killpg(0, signal.SIGINT)"
    command = (sys.executable, "-c", f"import os; os.setpgid(0, 0); {interrupted}")
    assert checkout.run(command)[0] == "stopped"
    checkout.release()
    assert checkout.run()[0] == "compiled"


def test_without_a_compiler_it_says_so(checkout: Checkout) -> None:
    name, line = checkout.run(CC="/none/cc -O1")
    assert name == "pure" and line.startswith("pure Python: with a C compiler (/none/cc) the checkout")


def test_the_makefile_starts_the_demo_with_it() -> None:
    for demo, command in (("digits", ".venv/bin/oriel up --demo"), ("chat", ".venv/bin/python examples/chat/demo.py")):
        done = subprocess.run(
            ["make", "-n", "run", f"DEMO={demo}", "VENV=.venv"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        assert f"requirements/run.py {command}" in done.stdout


def test_a_wheel_is_old_if_a_source_was_edited_while_it_was_compiled(checkout: Checkout) -> None:
    """Its stamp had the time of the end."""
    shutil.copy(ROOT / "Makefile", checkout.folder)
    python = checkout.folder / "bin" / "python"
    python.parent.mkdir()
    edited = "from pathlib import Path; Path('wire/oriel_wire/build.py').write_text('')"
    python.write_text(f"#!{sys.executable}\n{edited}\n")
    python.chmod(0o755)
    stamp = "build/wheels/.made-here"
    command = ["make", "VENV=.", f"PYTHON={sys.executable}", "HERE=here", "-o", "./.dev-here", stamp]
    subprocess.run(command, cwd=checkout.folder, capture_output=True, check=True)
    assert (checkout.folder / stamp).exists()
    assert subprocess.run([*command, "-q"], cwd=checkout.folder, capture_output=True, check=False).returncode == 1
