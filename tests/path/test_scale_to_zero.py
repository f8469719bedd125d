"""`oriel up --scale-to-zero`: processes that start when calls come and end when there are none."""

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from stacks import EXAMPLES, STOP_S, Stack, key, picture, started

from ..waiting import wait_until

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks processes up in /proc")


class Changes:
    """The lines that `oriel up --json` prints after the first one."""

    def __init__(self, stack: Stack) -> None:
        self.latest: dict[str, dict[str, Any]] = {}
        self._stack = stack
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._stack.process.stdout is not None
        for line in self._stack.process.stdout:
            change = json.loads(line)
            self.latest[change["unit"]] = change

    def state(self, unit: str) -> str:
        return str(self.latest.get(unit, {}).get("state", "asleep"))


@pytest.fixture
def policies(tmp_path: Path) -> Path:
    """The demo's documents with patient tiers and pools that are idle after a second."""
    folder = tmp_path / "policies"
    shutil.copytree(EXAMPLES.parent / "policies" / "examples", folder)
    routes = (folder / "routes.toml").read_text()
    (folder / "routes.toml").write_text(routes.replace("keep_alive_ms = 20000", "keep_alive_ms = 1000"))
    return folder


@pytest.fixture
def asleep(state_folder: Path, policies: Path) -> Iterator[Stack]:
    with started(state_folder / "asleep", ("--scale-to-zero", "--policies", str(policies))) as running:
        yield running


def infer(stack: Stack) -> int:
    body = (EXAMPLES / "digits" / "7.v2.json").read_bytes()
    fields = {**key("gold"), "x-request-timeout-ms": "120000"}
    url = f"{stack.base}/v2/models/digits/infer"
    return httpx.post(url, content=body, headers=fields, timeout=150, trust_env=False).status_code


def served(stack: Stack) -> int:
    fields = {**key("gold"), "content-type": "image/png", "x-request-timeout-ms": "120000"}
    url = f"{stack.base}/v1/services/digits"
    return httpx.post(url, content=picture(7), headers=fields, timeout=150, trust_env=False).status_code


def test_processes_come_with_calls_go_without_them_and_leave_nothing(asleep: Stack) -> None:
    changes = Changes(asleep)
    units = asleep.ready["units"]
    assert {unit["state"] for unit in units if unit["unit"] != "gateway"} <= {"asleep", "spare"}
    assert all(unit["pid"] == 0 for unit in units if unit["unit"] != "gateway")
    with ThreadPoolExecutor(8) as callers:
        assert {each.result() for each in [callers.submit(infer, asleep) for _ in range(8)]} == {200}
    wait_until(lambda: changes.state("inference").startswith("1 running"))
    wait_until(lambda: changes.state("inference") == "asleep")
    assert infer(asleep) == 200
    assert served(asleep) == 200
    wait_until(lambda: changes.state("logic") == changes.state("inference") == "asleep")
    asleep.process.send_signal(signal.SIGINT)
    assert asleep.process.wait(STOP_S) == 0
    wait_until(lambda: not asleep.processes())


def test_a_killed_supervisor_leaves_no_unit_scaled_or_spare_process(asleep: Stack) -> None:
    assert served(asleep) == 200
    os.kill(asleep.process.pid, signal.SIGKILL)
    wait_until(lambda: not asleep.processes())
