"""Runs a program on a copy of units of the product whose sources were edited, as somebody edits them for a feature."""

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


def output_of(folder: Path, edits: Mapping[str, Sequence[tuple[str, str]]], program: str) -> str:
    """Copy the packages that are edited into `folder`, and return what `program` prints with these in force.

    edits: for each file of the repository, texts that stand in it exactly once, each with the text in its place.
    """
    for file, changes in edits.items():
        unit, package, *_ = Path(file).parts
        if not (folder / package).exists():
            ignored = shutil.ignore_patterns("__pycache__", "*.so")
            shutil.copytree(ROOT / unit / package, folder / package, ignore=ignored)
        copy = folder / Path(file).relative_to(unit)
        text = copy.read_text()
        for old, new in changes:
            assert text.count(old) == 1, f"{file} has {text.count(old)} times: {old}"
            text = text.replace(old, new)
        copy.write_text(text)
    path = os.pathsep.join((str(folder), str(ROOT), *sys.path))
    done = subprocess.run(
        (sys.executable, "-c", program), env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
