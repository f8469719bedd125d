"""Closed-loop load with wrk: requests that repeat byte by byte, or whose heads never do."""

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PATH", "Load", "Run", "drive", "wrk"]

PATH = "/v2/models/digits/infer"
_SCRIPT = """
wrk.method = "POST"
wrk.body = string.rep("x", {size})
wrk.headers["Authorization"] = "Bearer oriel-demo-gold"
wrk.headers["Content-Type"] = "application/json"
"""
# A request id and a trace context of its own in every request.
_VARYING = """
local n = 0
request = function()
  n = n + 1
  wrk.headers["x-request-id"] = string.format("r%016x", n)
  wrk.headers["traceparent"] = string.format("00-%032x-%016x-00", n, n)
  return wrk.format(nil)
end
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """size_bytes: of each body."""

    connections: int = 32
    size_bytes: int = 1024
    varying: bool = False
    tls: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one turn found. requests: answered 200."""

    requests: int
    per_s: float
    p50_ms: float
    p99_ms: float


def drive(load: Load, port: int, seconds: int, folder: Path) -> Run:
    """One turn. Ends the bench if a request failed: what fails is cheap."""
    script = folder / f"{load.size_bytes}-{load.varying}.lua"
    script.write_text(_SCRIPT.format(size=load.size_bytes) + (_VARYING if load.varying else ""))
    return wrk(f"{'https' if load.tls else 'http'}://127.0.0.1:{port}{PATH}", script, load.connections, seconds)


def wrk(url: str, script: Path, connections: int, seconds: int) -> Run:
    """One turn with a script of its own. Ends the bench if a request failed."""
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--latency", "-s", str(script), url]
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "Non-2xx" in out or "Socket errors" in out:
        sys.exit(f"a contender failed requests:\n{out}")
    requests = re.search(r"(\d+) requests in", out)
    rate = re.search(r"Requests/sec:\s+([\d.]+)", out)
    assert requests and rate
    return Run(
        requests=int(requests[1]), per_s=float(rate[1]), p50_ms=_latency_ms(out, "50"), p99_ms=_latency_ms(out, "99")
    )


def _latency_ms(out: str, percent: str) -> float:
    found = re.search(rf"{percent}%\s+([\d.]+)(us|ms|s)", out)
    assert found
    return float(found[1]) * {"us": 0.001, "ms": 1.0, "s": 1000.0}[found[2]]
