"""Load generators.

Closed loop over HTTP with `wrk`: each connection sends its next request when the last one is answered. Open loop with
`oriel load`, in a process of its own: requests are sent on schedule, whatever comes back.
"""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.processes import ROOT

__all__ = ["Failed", "Run", "lua", "open_loop", "post", "read_wrk", "require", "wrk"]

_SCALE_MS = {"us": 0.001, "ms": 1.0, "s": 1000.0}


class Failed(SystemExit):
    """Requests were not answered as they should be, so there is no figure: what fails is cheap.

    It ends the benchmark with its text unless a caller goes on without this contender.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """requests: answered. rate: per second. p50_ms, p99_ms: from sending to the last byte. refused: of the requests."""

    requests: int
    rate: float
    p50_ms: float
    p99_ms: float
    refused: int = 0


def require(tool: str, package: str = "") -> None:
    """End the benchmark if a tool is not installed. package: its name on Debian, if it is another one."""
    if shutil.which(tool) is None:
        raise Failed(f"{tool} is not on PATH; on Debian: apt-get install {package or tool}")


def post(script: Path, body: bytes, headers: Mapping[str, str], then: str = "") -> Path:
    """Write a script that posts one body again and again; the body goes into a file beside it.

    then: more Lua.
    """
    content = script.with_suffix(".body")
    content.write_bytes(body)
    lines = [f"wrk.headers[{lua(name)}] = {lua(value)}" for name, value in headers.items()]
    lines += ["wrk.method = 'POST'", f"wrk.body = io.open({lua(str(content))}, 'rb'):read('*a')"]
    script.write_text("\n".join(lines) + f"\n{then}")
    return script


def wrk(
    url: str,
    script: Path,
    connections: int,
    seconds: int,
    *,
    name: str = "",
    timeout_s: int = 2,
    refusals: bool = False,
) -> Run:
    """One turn with one thread. refusals: answers other than 2xx are counted and do not fail. Raises Failed."""
    require("wrk")
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--timeout", f"{timeout_s}s", "--latency"]
    done = subprocess.run([*command, "-s", str(script), url], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"wrk failed on {name or url}: {done.stderr[-500:]}{done.stdout[-500:]}")
    return read_wrk(done.stdout, name or url, refusals=refusals)


def read_wrk(out: str, name: str, *, refusals: bool = False) -> Run:
    """Read what wrk printed about `name`. Raises Failed."""
    refused = re.search(r"Non-2xx or 3xx responses: (\d+)", out)
    if "Socket errors" in out or (refused and not refusals):
        raise Failed(f"{name} failed requests:\n{out}")
    found = {quantile: re.search(rf"{quantile}%\s+([\d.]+)(us|ms|s)", out) for quantile in (50, 99)}
    requests = re.search(r"(\d+) requests in", out)
    rate = re.search(r"Requests/sec:\s+([\d.]+)", out)
    p50, p99 = found[50], found[99]
    if not (requests and rate and p50 and p99) or not int(requests[1]):
        raise Failed(f"{name} answered nothing:\n{out}")
    return Run(
        requests=int(requests[1]),
        rate=float(rate[1]),
        p50_ms=float(p50[1]) * _SCALE_MS[p50[2]],
        p99_ms=float(p99[1]) * _SCALE_MS[p99[2]],
        refused=int(refused[1]) if refused else 0,
    )


def lua(text: str) -> str:
    """A Lua string."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def open_loop(lines: Sequence[str], folder: Path) -> dict[str, Any]:
    """Offer a scenario until all of it has ended; the document that `oriel load` writes about it."""
    scenario, answer = folder / "scenario.toml", folder / "answer.json"
    scenario.write_text("\n".join(lines) + "\n")
    answer.unlink(missing_ok=True)
    command = [sys.executable, "-m", "oriel_cli.main", "load", str(scenario), "--no-plot", "--quiet"]
    done = subprocess.run([*command, "--json", str(answer)], capture_output=True, text=True, check=False, cwd=ROOT)
    if not answer.exists():
        sys.exit(f"oriel load failed: {done.stderr[-1000:]}")
    document: dict[str, Any] = json.loads(answer.read_text())
    return document
