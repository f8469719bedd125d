"""The real helm, of the package helm-binary, and the objects that it makes of deploy/chart; kubectl for Kustomize."""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

CHART = Path(__file__).resolve().parents[2] / "deploy/chart"
# Given in place of those that are made at random.
KEYS = {name: f"{name}-{'0' * 32}" for name in ("admin", "redis", "tickets")}
# Far more than any command here takes.
COMMAND_S = 60


class HelmFailed(Exception):
    """A command failed. Its text is what helm printed."""


def binary(name: str) -> str:
    """Return the path of helm or kubectl, of this environment or on PATH."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not here: its package is for Linux on x86-64")
    return found


def helm(*arguments: str, values: Mapping[str, Any], namespace: str = "oriel") -> str:
    """Return what the command printed. Raises HelmFailed."""
    done = subprocess.run(
        [binary("helm"), *arguments, "--namespace", namespace, "--values", "-"],
        input=json.dumps(values),
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
    )
    if done.returncode:
        raise HelmFailed(done.stdout + done.stderr)
    return done.stdout


def rendered(values: Mapping[str, Any], *, namespace: str = "oriel", chart: Path = CHART) -> list[dict[str, Any]]:
    """Return the objects of the chart, in the order in which they are installed. Raises HelmFailed."""
    text = helm("template", "oriel", str(chart), values=values, namespace=namespace)
    return [each for each in yaml.load_all(text, Loader=yaml.CSafeLoader) if each is not None]
