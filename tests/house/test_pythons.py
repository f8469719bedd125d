"""Which Pythons are supported is the same everywhere, and any other is refused in one line."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import oriel_cli

ROOT = Path(__file__).resolve().parents[2]
SUPPORTED = ["3.11", "3.12", "3.13", "3.14"]
FAKE = """#!/bin/sh
# Stands for Python VERSION, also in the environments that it makes.
case "$*" in
*_base_executable*) echo "$0" ;;
*version_info*) echo VERSION ;;
"-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && cp "$0" "$3/bin/pip" && cp "$0" "$3/bin/uv" ;;
esac
"""


def fake(folder: Path, version: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    python = folder / f"python{version}"
    python.write_text(FAKE.replace("VERSION", version))
    python.chmod(0o755)
    return python


def ran(*words: object, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the checkout, without what an outer make passes down."""
    handed = ("MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTHON", "VENV")
    environ = {name: value for name, value in os.environ.items() if name not in handed} | more
    return subprocess.run([*map(str, words)], cwd=ROOT, env=environ, capture_output=True, text=True, check=False)


def test_the_supported_versions_are_the_same_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    classified = [each.rpartition(" ")[2] for each in project["project"]["classifiers"] if " :: 3." in each]
    assert classified == SUPPORTED == [f"3.{minor}" for minor in range(oriel_cli.OLDEST[1], oriel_cli.NEWEST[1] + 1)]
    assert project["project"]["requires-python"] == f">={SUPPORTED[0]}"
    assert project["tool"]["mypy"]["python_version"] == SUPPORTED[0]
    for script in ("install", "test-pythons"):
        text = (ROOT / "requirements" / script).read_text()
        assert set(re.findall(r"\b3\.1\d\b", text)) == set(SUPPORTED) and " | ".join(SUPPORTED) in text
    assert f"Python {SUPPORTED[0]} to {SUPPORTED[-1]}" in (ROOT / "README.md").read_text()


@pytest.mark.parametrize("version", [(3, 10), (3, 15), (4, 0)])
def test_the_command_refuses_another_python_in_one_line(version: tuple[int, int]) -> None:
    code = f"import sys; sys.version_info = {(*version, 1)}; from oriel_cli.main import main; main(['version'])"
    done = ran(sys.executable, "-c", code, PYTHONPATH=os.pathsep.join(sys.path))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert done.stderr.startswith(f"oriel: this is Python {version[0]}.{version[1]}, which this version was not tried")


def older() -> list[str]:
    """Return the Pythons of this machine that are too old."""
    versions = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    found = [str(path / "bin" / "python3") for minor in (8, 9, 10) for path in versions.glob(f"3.{minor}.*")]
    return [each for each in (*found, *map(shutil.which, ("python3.9", "python3.10"))) if each and Path(each).exists()]


def test_a_real_older_python_says_no_more_either() -> None:
    refused = []
    for python in older():
        done = ran(python, "-m", "oriel_cli.main", "version", PYTHONPATH=os.pathsep.join(("cli", "wire")))
        if "pyenv" not in done.stderr:  # a shim without the version behind it
            refused.append((done.returncode, done.stdout, done.stderr.count("\n"), done.stderr[:21]))
    if not refused:
        pytest.skip("this machine has no Python older than 3.11")
    assert set(refused) == {(1, "", 1, "oriel: this is Python")}


@pytest.mark.parametrize("version", ["2.7", "3.10", "3.15"])
@pytest.mark.parametrize("how", ["requirements/install", "make run", "make test"])
def test_set_up_refuses_another_python_in_one_line(tmp_path: Path, how: str, version: str) -> None:
    python, venv = fake(tmp_path, version), tmp_path / "venv"
    if how.startswith("make"):
        done = ran("make", "--no-print-directory", how.removeprefix("make "), f"PYTHON={python}", f"VENV={venv}")
    else:
        done = ran(how, "base.txt", PYTHON=str(python), VENV=str(venv))
    lines = [line for line in done.stderr.splitlines() if not line.startswith("make: ***")]
    advice = "pass PYTHON=python3.12, or another Python from 3.11 to 3.14"
    assert lines == [f"oriel: {python} is Python {version}, which Oriel was not tried with: {advice}"]
    assert done.returncode == 2 and done.stdout == "" and not venv.exists()


def test_set_up_names_a_python_that_is_not_there(tmp_path: Path) -> None:
    done = ran("requirements/install", "base.txt", PYTHON="python3.99", VENV=str(tmp_path / "venv"))
    assert done.returncode == 2 and done.stderr.startswith("oriel: there is no Python at python3.99: pass PYTHON=")
    assert done.stderr.count("\n") == 1


def test_another_python_gets_a_new_environment_and_its_own_stamp(tmp_path: Path) -> None:
    venv, stamps = tmp_path / "venv", set()
    for version, told in (("3.12", 0), ("3.13", 1), ("3.13", 0)):
        python = fake(tmp_path, version)
        done = ran("requirements/install", "base.txt", PYTHON=str(python), VENV=str(venv))
        assert done.returncode == 0, done.stderr
        assert done.stderr.count(f"has another Python, making a new one with Python {version}\n") == told
        assert version in (venv / "bin" / "python").read_text()
        dry = ran("make", "-n", "setup", f"PYTHON={python}", f"VENV={venv}")
        stamps.update(re.findall(r"\.dev-\d+", dry.stdout))
    assert len(stamps) == 2
    # Without PYTHON the environment keeps the one it has.
    kept = set(re.findall(r"\.dev-\d+", ran("make", "-n", "setup", f"VENV={venv}").stdout))
    assert kept == set(re.findall(r"\.dev-\d+", dry.stdout))


def test_an_environment_that_set_up_did_not_make_is_left_alone(tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    shutil.copy(fake(tmp_path, "3.10"), venv / "bin" / "python")
    done = ran("requirements/install", "base.txt", PYTHON=str(fake(tmp_path, "3.12")), VENV=str(venv))
    assert done.returncode == 2 and done.stderr.startswith(f"oriel: {venv} is not an environment of Python 3.12: ")
    assert done.stderr.count("\n") == 1 and (venv / "bin" / "python").exists()


def test_one_target_tries_every_supported_python(tmp_path: Path) -> None:
    """One of each version: of those that are named, of pyenv's the newest, of PATH; a failed suite is a failure."""
    tools = tmp_path / "bin"
    named, passed_over = fake(tmp_path / "named", "3.12"), fake(tools, "3.12")
    newest = [fake(tmp_path / f"pyenv/versions/{each}/bin", "3.13") for each in ("3.13.9", "3.13.10")][1]
    for version, python in (("3.13", "3.13.9"), ("3.13", "3.13.10")):
        folder = tmp_path / f"pyenv/versions/{python}/bin"
        (folder / f"python{version}").rename(folder / "python3")
    beside = fake(tools, "3.14")
    for tool in ("sh", "ls", "sort", "grep", "tail", "mkdir"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    make = tools / "make"
    make.write_text('#!/bin/sh\necho "$*"\ncase "$*" in *3.14*) echo "1 failed"; exit 2 ;; esac\necho "7 passed"\n')
    make.chmod(0o755)
    script = tmp_path / "test-pythons"
    shutil.copy(ROOT / "requirements" / "test-pythons", script)
    environ = {"PATH": str(tools), "PYENV_ROOT": str(tmp_path / "pyenv"), "MAKE": str(make)}
    done = subprocess.run([script, named], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == [
        f"Python 3.12 ({named}): passed: 7 passed (build/python3.12.log)",
        f"Python 3.13 ({newest.parent / 'python3'}): passed: 7 passed (build/python3.13.log)",
        "Python 3.14 (python3.14): failed: 1 failed (build/python3.14.log)",
        "Python 3.11: not found, not tried",
    ]
    assert done.returncode == 1 and done.stderr == "" and passed_over.exists() and beside.exists()
    log = (tmp_path / "build/python3.12.log").read_text()
    assert log.startswith(f"--no-print-directory test SUITE=all VENV=build/python3.12 PYTHON={named}\n")
