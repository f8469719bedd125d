"""Runs promtool, Prometheus's own judge of rules. Tests are skipped where it is missing."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest


def promtool(*words: str, cwd: Path) -> None:
    """Run a check that has to succeed. ORIEL_TEST_PROMTOOL=1: a missing promtool is a failure."""
    if shutil.which("promtool") is None:
        if os.environ.get("ORIEL_TEST_PROMTOOL") == "1":
            pytest.fail("ORIEL_TEST_PROMTOOL=1, and promtool is not on PATH")
        pytest.skip("promtool is not on PATH (Debian: apt-get install prometheus)")
    done = subprocess.run(["promtool", *words], cwd=cwd, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def run_cases(folder: Path, groups: list[dict[str, Any]], cases: list[dict[str, Any]], every: str) -> None:
    """Run `promtool test rules`. groups: of the rules file; every: how often samples are read and rules evaluated."""
    cases = [{"interval": every, **case} for case in cases]
    # Otherwise the order of groups is random, and an alert sees what another group records one turn later.
    order = [group["name"] for group in groups]
    plan = {"rule_files": ["rules.json"], "evaluation_interval": every, "group_eval_order": order, "tests": cases}
    (folder / "rules.json").write_text(json.dumps({"groups": groups}))  # JSON is YAML too
    (folder / "test.json").write_text(json.dumps(plan))
    promtool("test", "rules", "test.json", cwd=folder)


def counter(steps: Iterable[tuple[int, float]]) -> str:
    """The values of a counter. steps: (samples, growth from one sample to the next)."""
    value, written = 0.0, ["0"]
    for count, growth in steps:
        if count:
            written.append(f"{value + growth:.12g}+{growth:g}x{count - 1}")
        value += growth * count
    return " ".join(written)
