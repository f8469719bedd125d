"""A closed loop on one target: `wrk` for HTTP, `h2load` for gRPC. Each connection sends its next request on an answer.

h2load knows HTTP/2, not gRPC: it gets one framed message as a body. That the calls ended well is seen from the bytes
that came back: a call that fails has a status but no message.
"""

import json
import re
import struct
import subprocess
from pathlib import Path

from harness.load import Failed, Run, lua, require, wrk

from inference_bench.targets import Target

__all__ = ["drive", "read_h2load", "variants"]

VARIANTS = 32


def drive(target: Target, connections: int, seconds: int, answer_bytes: int, folder: Path) -> Run:
    """answer_bytes: of one good answer. Raises Failed when requests fail or the tool is missing."""
    if target.protocol == "grpc":
        return _h2load(target, connections, seconds, answer_bytes, folder)
    return _wrk(target, connections, seconds, folder)


def _wrk(target: Target, connections: int, seconds: int, folder: Path) -> Run:
    bodies, script = [], folder / f"{target.name}.lua"
    for number, body in enumerate(variants(target.body)):
        bodies.append(folder / f"{target.name}.{number}.body")
        bodies[-1].write_bytes(body)
    files = ", ".join(lua(str(each)) for each in bodies)
    headers = "".join(f"wrk.headers[{lua(name)}] = {lua(value)}\n" for name, value in target.headers)
    # Requests are formatted once: what Lua does per request would be the generator's own time.
    script.write_text(
        f"wrk.method = 'POST'\n{headers}"
        f"local requests, at = {{}}, 0\nlocal files = {{ {files} }}\n"
        "init = function()\n  for i, name in ipairs(files) do\n    local file = io.open(name, 'rb')\n"
        "    requests[i] = wrk.format(nil, nil, nil, file:read('*a'))\n    file:close()\n  end\nend\n"
        "request = function() at = at % #requests + 1; return requests[at] end\n"
    )
    url = f"http://{target.host}:{target.port}{target.path}"
    return wrk(url, script, connections, seconds, name=target.name, timeout_s=10)


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


def _h2load(target: Target, connections: int, seconds: int, answer_bytes: int, folder: Path) -> Run:
    require("h2load", "nghttp2-client")
    body, log = folder / f"{target.name}.message", folder / f"{target.name}.log"
    body.write_bytes(struct.pack(">BI", 0, len(target.body)) + target.body)
    log.unlink(missing_ok=True)
    headers = [("content-type", "application/grpc"), ("te", "trailers"), *target.headers]
    command = ["h2load", "-t1", f"-c{connections}", "-m1", "-D", str(seconds), f"--log-file={log}", f"--data={body}"]
    command += [part for name, value in headers for part in ("-H", f"{name}: {value}")]
    command.append(f"http://{target.host}:{target.port}{target.path}")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"h2load failed on {target.name}: {done.stderr[-500:]}{done.stdout[-500:]}")
    return read_h2load(done.stdout, log.read_text(), target.name, connections, answer_bytes)


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
