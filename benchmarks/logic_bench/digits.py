"""The example service `digits` whole, a PNG in and a label out: CPU-us per call of front, logic and inference.

`oriel` is the three units as they lie here, `oriel compiled` the same from the compiled wheel, and `nginx + fastapi`
the same work on a thread pool behind nginx, with Triton's asyncio client before an inference server of `oriel
compiled`. All processes share all cores, and so does wrk. A median with its range, of turns that alternate.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

from gateway_bench.contenders import start as start_proxy
from harness.environments import compiled_python, python_of
from harness.load import post, wrk
from harness.pages import table
from harness.processes import ROOT, accepts, cpu_s, free_port, free_ports, inference_command, serving, status_of

from logic_bench.contenders import FILES

CONTENDERS = ("oriel", "oriel compiled", "nginx + fastapi")
EXAMPLE = ROOT / "examples" / "services"
SERVICE = "/v1/services/digits"
KEY = {"authorization": "Bearer oriel-demo-gold", "content-type": "image/png"}


@contextmanager
def started(name: str, folder: Path) -> Iterator[tuple[str, list[int]]]:
    """The address of a contender that answers, and the processes of its front, logic and inference."""
    python = sys.executable if name == "oriel" else str(compiled_python())
    http, grpc, port = free_ports(3)
    with ExitStack() as stack:
        command = [python, *inference_command(ROOT / "examples" / "models", http, grpc_port=grpc)[1:]]
        ready = f"http://127.0.0.1:{http}/v2/health/ready"
        inference = stack.enter_context(serving(command, lambda: status_of(ready) == 200))
        if name == "nginx + fastapi":
            command = [str(python_of("logic-digits")), "-m", "uvicorn", "digits_app:app", "--app-dir", str(FILES)]
            command += ["--loop", "uvloop", "--http", "httptools", "--no-access-log", "--port", str(port)]
        else:
            command = [python, "-m", "oriel_cli.main", "logic", "--services", str(EXAMPLE)]
            command += ["--inference", f"127.0.0.1:{http}", "--http-port", str(port), "--admin-port", str(free_port())]
        environment = {"TARGET": f"127.0.0.1:{grpc}", "EXAMPLE": str(EXAMPLE)}
        logic = stack.enter_context(serving(command, lambda: accepts(port), environment))
        proxy = "nginx" if name == "nginx + fastapi" else name
        front, at = stack.enter_context(start_proxy(proxy, folder, port, pool="logic"))
        yield f"http://127.0.0.1:{at}{SERVICE}", [front, logic, inference]


def measure(names: Sequence[str], connections: Sequence[int], seconds: int, rounds: int, folder: Path) -> str:
    """Return the table of all contenders."""
    rows = []
    script = post(folder / "digits.lua", (ROOT / "examples" / "digits" / "7.png").read_bytes(), KEY)
    with ExitStack() as stack:
        running = {name: stack.enter_context(started(name, folder)) for name in names}
        for url, _ in running.values():
            wrk(url, script, 16, 2, refusals=True)  # warm-up; a server may listen before all its workers are ready
        for count in connections:
            runs: dict[str, list[tuple[float, ...]]] = {name: [] for name in names}
            for _ in range(rounds):
                for name, (url, pids) in running.items():
                    before = [cpu_s(pid) for pid in pids]
                    turn = wrk(url, script, count, seconds)
                    used = [(cpu_s(pid) - at) * 1e6 / turn.requests for pid, at in zip(pids, before, strict=True)]
                    runs[name].append((*used, sum(used), turn.rate, turn.p50_ms, turn.p99_ms))
            for name, found in runs.items():
                cells = [[format(one(row), ".4g") for one in (median, min, max)] for row in zip(*found, strict=True)]
                rows.append((name, str(count), *(f"{middle} ({least}-{most})" for middle, least, most in cells)))
    return table(("contender", "callers", "front", "logic", "inference", "sum", "req/s", "p50 ms", "p99 ms"), rows)
