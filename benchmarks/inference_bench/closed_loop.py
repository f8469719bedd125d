"""A closed loop on one target: `wrk` for HTTP, `h2load` for gRPC. Each connection sends its next request on an answer.

h2load knows HTTP/2, not gRPC: it gets one framed message as a body. That the calls ended well is seen from the bytes
that came back: a call that fails has a status but no message.
"""

import json
import re
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

from inference_bench.targets import Target

__all__ = ["TOOLS", "Failed", "Run", "drive", "read_h2load", "read_wrk", "variants"]

TOOLS = {"http": ("wrk", "wrk"), "grpc": ("h2load", "nghttp2-client")}
VARIANTS = 32
_SCALE_MS = {"us": 0.001, "ms": 1.0, "s": 1000.0}


class Failed(Exception):
    """Requests of a turn were not answered as they should: what fails is cheap, so there is no figure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """requests: answered. rate: per second. p50_ms, p99_ms: from sending to the last byte."""

    requests: int
    rate: float
    p50_ms: float
    p99_ms: float


def drive(target: Target, connections: int, seconds: int, answer_bytes: int, folder: Path) -> Run:
    """answer_bytes: of one good answer. Exits when requests fail or the tool is missing."""
    tool, package = TOOLS[target.protocol]
    if shutil.which(tool) is None:
        raise Failed(f"{tool} is not on PATH; on Debian: apt-get install {package}")
    run = _h2load if target.protocol == "grpc" else _wrk
    return run(target, connections, seconds, answer_bytes, folder)


def _wrk(target: Target, connections: int, seconds: int, _: int, folder: Path) -> Run:
    bodies, script = [], folder / f"{target.name}.lua"
    for number, body in enumerate(variants(target.body)):
        bodies.append(folder / f"{target.name}.{number}.body")
        bodies[-1].write_bytes(body)
    files = ", ".join(_lua(str(each)) for each in bodies)
    headers = "".join(f"wrk.headers[{_lua(name)}] = {_lua(value)}\n" for name, value in target.headers)
    # Requests are formatted once: what Lua does per request would be the generator's own time.
    script.write_text(
        f"wrk.method = 'POST'\n{headers}"
        f"local requests, at = {{}}, 0\nlocal files = {{ {files} }}\n"
        "init = function()\n  for i, name in ipairs(files) do\n    local file = io.open(name, 'rb')\n"
        "    requests[i] = wrk.format(nil, nil, nil, file:read('*a'))\n    file:close()\n  end\nend\n"
        "request = function() at = at % #requests + 1; return requests[at] end\n"
    )
    url = f"http://{target.host}:{target.port}{target.path}"
    command = [
        "wrk",
        "-t1",
        f"-c{connections}",
        f"-d{seconds}s",
        "--timeout",
        "10s",
        "--latency",
        "-s",
        str(script),
        url,
    ]
    out = _output(command, target)
    return read_wrk(out, target.name)


def variants(body: bytes) -> list[bytes]:
    """The same JSON request with other numbers, so that nobody is asked one thing all the time; others as they are."""
    try:
        document = json.loads(body)
        data = document["inputs"][0]["data"]
        data[0]
    except (ValueError, LookupError, TypeError):
        return [body]
    found = []
    for number in range(VARIANTS):
        if isinstance(data[0], int):  # ids mean something: the same ones in another order
            turned = number % len(data)
            document["inputs"][0]["data"] = data[turned:] + data[:turned]
        else:
            document["inputs"][0]["data"] = [value * (1 + number / VARIANTS) for value in data]
        found.append(json.dumps(document).encode())
    return found


def read_wrk(out: str, name: str) -> Run:
    """Raises Failed."""
    if "Non-2xx" in out or "Socket errors" in out:
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
    )


def _h2load(target: Target, connections: int, seconds: int, answer_bytes: int, folder: Path) -> Run:
    body, log = folder / f"{target.name}.message", folder / f"{target.name}.log"
    body.write_bytes(struct.pack(">BI", 0, len(target.body)) + target.body)
    log.unlink(missing_ok=True)
    headers = [("content-type", "application/grpc"), ("te", "trailers"), *target.headers]
    command = ["h2load", "-t1", f"-c{connections}", "-m1", "-D", str(seconds), f"--log-file={log}", f"--data={body}"]
    command += [part for name, value in headers for part in ("-H", f"{name}: {value}")]
    out = _output([*command, f"http://{target.host}:{target.port}{target.path}"], target)
    return read_h2load(out, log.read_text(), target.name, connections, answer_bytes)


def read_h2load(out: str, log: str, name: str, connections: int, answer_bytes: int) -> Run:
    """log: a line per request, its last field the microseconds it took. Raises Failed."""
    counts = re.search(r"(\d+) succeeded, (\d+) failed, (\d+) errored, (\d+) timeout", out)
    rate = re.search(r"finished in [\d.]+s, ([\d.]+) req/s", out)
    data = re.search(r"headers \(space savings.*?\), .*?\((\d+)\) data", out)
    if not (counts and rate and data) or not int(counts[1]):
        raise Failed(f"{name} answered nothing:\n{out}")
    requests = int(counts[1])
    expected = requests * (answer_bytes + 5)
    # Answers that were on their way when the time was over may have left their bytes.
    surplus = 2 * connections * (answer_bytes + 5)
    if any(int(number) for number in counts.groups()[1:]) or not expected <= int(data[1]) <= expected + surplus:
        raise Failed(f"{name} failed calls: {requests} answers in {data[1]} bytes, {expected} expected\n{out}")
    taken = sorted(int(fields[2]) for line in log.splitlines() if len(fields := line.split()) == 3)
    return Run(
        requests=requests,
        rate=float(rate[1]),
        p50_ms=taken[len(taken) // 2] / 1e3,
        p99_ms=taken[len(taken) * 99 // 100] / 1e3,
    )


def _output(command: list[str], target: Target) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"{command[0]} failed on {target.name}: {done.stderr[-500:]}{done.stdout[-500:]}")
    return done.stdout


def _lua(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
