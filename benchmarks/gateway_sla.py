"""Judges which of its promises the gateway keeps under load: R1 to R5 and R8, in front of two inference servers.

    python benchmarks/gateway_sla.py [--seconds 20] [--servers oriel triton] [--controls direct fifo] [--layers 60]
        [--out benchmarks/results]

The servers: Oriel's own, and an unmodified Triton from the nvidia-pytriton wheel, which gets an environment of its own
under build/ on first use. Both run one ONNX model on one thread, batches of at most four; one row is at least 10 ms of
matrix products, and a batch saves next to nothing. The gateway has its default bounds. `oriel load` offers Poisson
arrivals in a process of its own. All of them share the machine, so the generator's and the gateway's CPU are reported
and taken off what the server could have answered (R2).

The capacity C is the closed-loop rate at the server itself, twelve connections. Gold always offers 0.3 C, silver
0.2 C; bronze makes up the rest to 1, 2, 5 and 10 times C. Before that the gateway's concurrency is learned under 2 C,
for half a phase and at least LEARNING_S. After the flood at 10 C, half of C is offered: two seconds to recover, then it
is measured. R4: a quiet and a noisy tenant of one tier, then both with more than their share. R8: a flood of gold and a
little bronze.

C is measured again after every phase, once the server is idle. A phase around which it differed by more than a tenth
is offered again, twice at most, and then nothing is judged by it.

Controls: the same four loads straight to the server, and behind HAProxy, which holds as many calls at the server as the
closed loop did, queues the others in order of arrival and refuses those that waited as long as bronze may.

R3: how long refusals (429, 503) took at 5 C; R5: by how much the 504s of calls given up were late at up to 2 C; both
from sending, so that the generator's own delays are in them. What the generator could not quote is offered again, twice
at most.

Targets are multiples of one row's time, but at least 50 ms. `--layers 5` is a model of about 1 ms: the promises are
made for service times from 10 ms (benchmarks/README.md says what shorter ones and short phases show).

Writes DATE-gateway-sla.json, .md and the plot DATE-gateway-sla.svg.
"""

import argparse
import datetime
import http.client
import json
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from harness.environments import commit, machine, python_of, versions
from harness.load import open_loop
from harness.processes import ROOT, cpu_s
from inference_bench.models import Model
from inference_bench.targets import http_target
from sla_bench.promises import DRIFT, drift, judge
from sla_bench.report import CONTROLS, markdown, plot
from sla_bench.stack import CONNECTIONS, LAYERS, MODEL, SERVERS, TENANTS, Stack, Tier, started, write_model

FACTORS = (1.0, 2.0, 5.0, 10.0)
GOLD, SILVER = 0.3, 0.2
CORES = 2
LEAD_S = 2.0
LEARNING_S = 8.0
IDLE_S = 60.0
ATTEMPTS = 3
TITLES = {"oriel": "Oriel's inference server", "triton": "an unmodified Triton"}
Rates = Mapping[str, float]


def tiers_for(service_s: float) -> dict[str, Tier]:
    """Targets as multiples of one row's time."""
    times = {"gold": 12.0, "silver": 30.0, "bronze": 60.0}
    return {
        name: Tier(band=band, target_ms=max(50, round(factor * service_s * 1e3)))
        for band, (name, factor) in enumerate(times.items())
    }


def closed_loop(url: str, model: Model, seconds: float, connections: int = CONNECTIONS) -> tuple[float, float]:
    """Answers per second, and the smallest time one took."""
    target = http_target("direct", urlsplit(url).port or 80, urlsplit(url).path, model, binary=True)
    ends = time.monotonic() + seconds
    times: list[float] = []

    def one() -> None:
        connection = http.client.HTTPConnection(target.host, target.port)
        began = time.monotonic()
        while not times or began < ends:  # at least one answer, however slow the machine is
            connection.request("POST", target.path, target.body, dict(target.headers))
            answer = connection.getresponse()
            answer.read()
            if answer.status != 200:
                sys.exit(f"the server answers {answer.status}")
            times.append(time.monotonic() - began)
            began = time.monotonic()
        connection.close()

    threads = [threading.Thread(target=one) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(times) / seconds, sorted(times)[len(times) // 10]


class Bench:
    """One server's run."""

    def __init__(self, stack: Stack, tiers: Mapping[str, Tier], service_s: float, folder: Path, seconds: float) -> None:
        self.stack = stack
        self.tiers = tiers
        self.service_s = service_s
        self.folder = folder
        self.seconds = seconds
        row = MODEL.row()
        tensor = {"name": "x", "shape": list(row.shape), "datatype": MODEL.datatype, "data": row.ravel().tolist()}
        (folder / "body.json").write_text(json.dumps({"inputs": [tensor]}))
        closed_loop(stack.direct, MODEL, 1.0)
        before = cpu_s(stack.server_pid)
        self.measure_s = max(3.0, seconds / 4)
        self.capacity, _ = closed_loop(stack.direct, MODEL, self.measure_s)
        self.server_cores = (cpu_s(stack.server_pid) - before) / self.measure_s
        self.latest = self.capacity

    def capacity_again(self) -> float:
        """The server's rate once it has nothing left of the phase before."""
        ends = time.monotonic() + IDLE_S
        while time.monotonic() < ends:
            began = time.monotonic()
            closed_loop(self.stack.direct, MODEL, 1e-3, 1)
            if time.monotonic() - began < 3.0 * self.service_s + 0.01:
                break
        self.latest, _ = closed_loop(self.stack.direct, MODEL, self.measure_s)
        return self.latest

    def offer(self, url: str, phases: Sequence[tuple[str, float, Rates, bool]]) -> dict[str, Any]:
        """name, seconds, rates by tenant in shares of C, whether it is a warm-up -> `oriel load`'s document.

        With `cores`: how much of a core the gateway and the server used meanwhile.
        """
        used = sorted({tenant for _, _, rates, _ in phases for tenant in rates}, key=list(TENANTS).index)
        lines = ["seed = 3", "max_in_flight = 16384"]
        for tenant in used:
            target_ms = self.tiers[TENANTS[tenant]].target_ms
            lines += ["[[stream]]", f'name = "{tenant}"', f'url = "{url}"', f'key = "bench-{tenant}"']
            lines += ['body = "body.json"', 'encoding = "binary"', f"target_ms = {target_ms}"]
            lines += [f"timeout_s = {4 * target_ms / 1e3 + 2}"]
        for name, seconds, rates, warm_up in phases:
            written = ", ".join(f"{tenant} = {share * self.capacity:.3f}" for tenant, share in rates.items())
            lines += ["[[phase]]", f'name = "{name}"', f"seconds = {seconds}", f"rates = {{ {written} }}"]
            lines += [f"warm_up = {str(warm_up).lower()}"]
        before = cpu_s(self.stack.gateway_pid), cpu_s(self.stack.server_pid)
        document = open_loop(lines, self.folder)
        seconds = sum(phase[1] for phase in phases)
        document["cores"] = {
            "gateway": (cpu_s(self.stack.gateway_pid) - before[0]) / seconds,
            "server": (cpu_s(self.stack.server_pid) - before[1]) / seconds,
        }
        return document

    def measured(
        self, load: str, rates: Rates, factor: float = 0.0, control: str = "", then: Rates | None = None
    ) -> list[dict[str, Any]]:
        """One cell: a lead-in that is not quoted, then `seconds` at these rates.

        control: where the load goes instead of through the gateway. then: offered after two seconds of recovery in
        the same run, as a second cell.
        """
        url = self.stack.controls[control] if control else self.stack.url
        phases = [("lead", LEAD_S, rates, True), (load, self.seconds, rates, False)]
        if then is not None:
            phases += [("recovering", 2.0, then, True), ("after", max(4.0, self.seconds / 2), then, False)]
        for attempt in range(ATTEMPTS):
            print(f"  {load}{f', {CONTROLS[control]}' if control else ''} ...", file=sys.stderr, flush=True)
            before = self.latest
            document = self.offer(url, phases)
            about = {
                "control": control,
                "capacity_before": before,
                "permits": None if control else self.stack.permits(),
                "capacity_after": self.capacity_again(),
            }
            cells = [_cell(load, factor, document, 1, about)]
            if then is not None:
                cells.append(_cell("0.5x after the flood", 0.0, document, 3, about))
            moved = drift(self.capacity, cells[0])
            if all(cell["quoted"] for cell in cells) and moved <= DRIFT:
                break
            if attempt + 1 < ATTEMPTS:
                why = f"capacity moved by {moved * 100:.0f} %" if moved > DRIFT else cells[0]["objection"]
                print(f"    again: {why}", file=sys.stderr, flush=True)
        return cells


def _cell(
    load: str, factor: float, document: Mapping[str, Any], index: int, about: Mapping[str, Any]
) -> dict[str, Any]:
    phase = document["phases"][index]
    return {
        "load": load,
        "factor": factor,
        "tiers": {name: found for name, found in phase["streams"].items() if found["scheduled"]},
        "quoted": phase["quoted"],
        "objection": phase["objection"],
        "generator_cores": phase["generator_busy"],
        "gateway_cores": document["cores"]["gateway"],
        "server_cores": document["cores"]["server"],
        "answered_per_s": phase["all"]["good"] / phase["seconds"],
        "goodput_per_s": phase["all"]["goodput_per_s"],
        **about,
    }


def run(server: str, file: Path, folder: Path, seconds: float, controls: Sequence[str], workers: int) -> dict[str, Any]:
    """Everything for one server."""
    # The targets have to be in the gateway's documents before it starts: one row is timed at a server of its own.
    with started(server, file, folder / "probe", tiers_for(0.01), ()) as stack:
        closed_loop(stack.direct, MODEL, 1.0, 1)
        _, service_s = closed_loop(stack.direct, MODEL, 2.0, 1)
    tiers = tiers_for(service_s)
    with started(server, file, folder / "stack", tiers, controls, workers) as stack:
        bench = Bench(stack, tiers, service_s, folder, seconds)
        learning_s = max(LEARNING_S, seconds / 2)
        print(f"  learning for {learning_s:g} s under 2 C ...", file=sys.stderr, flush=True)
        learning = {"gold": GOLD, "silver": SILVER, "bronze": 2.0 - GOLD - SILVER}
        bench.offer(stack.url, [("learning", learning_s, learning, True)])
        bench.capacity_again()
        loads: list[dict[str, Any]] = []
        for control in ("", *controls):
            for factor in FACTORS:
                rates = {"gold": GOLD, "silver": SILVER, "bronze": factor - GOLD - SILVER}
                calm = {"gold": 0.2, "silver": 0.15, "bronze": 0.15}
                then = calm if factor == FACTORS[-1] and not control else None
                loads += bench.measured(f"{factor:g}x", rates, factor, control, then)
            if not control:
                loads += bench.measured("R4 quiet 0.4x, noisy 3x", {"quiet": 0.4, "noisy": 3.0})
                loads += bench.measured("R4 quiet 1.5x, noisy 3x", {"quiet": 1.5, "noisy": 3.0})
                loads += bench.measured("R8 gold 5x, bronze 0.2x", {"gold": 5.0, "bronze": 0.2})
    found = {
        "title": TITLES[server],
        "service_ms": service_s * 1e3,
        "capacity": bench.capacity,
        "server_cores": bench.server_cores,
        "learning_s": learning_s,
        "tiers": {name: {"target_ms": tier.target_ms} for name, tier in tiers.items()},
        "loads": [cell for cell in loads if not cell["control"]],
        "controls": [cell for cell in loads if cell["control"]],
    }
    return {**found, "verdicts": judge(found)}


def prepare(out: Path, servers: Sequence[str], controls: Sequence[str]) -> None:
    """Exit now for reasons that would otherwise end a run of many minutes half way."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        sys.exit(f"--out {out} cannot be written: {error.strerror}")
    if "fifo" in controls and shutil.which("haproxy") is None:
        sys.exit(
            "haproxy is not on PATH; on Debian: apt-get install haproxy, or leave that control out: --controls direct"
        )
    if "triton" in servers:
        python_of("triton-python")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measured phase")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--controls", nargs="*", choices=list(CONTROLS), default=list(CONTROLS), help="(all)")
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the model; as many are 10 ms or more")
    parser.add_argument("--workers", type=int, default=1, help="processes of the gateway")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    prepare(args.out, args.servers, args.controls)
    where = machine(CORES)
    servers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = write_model(folder / "work.onnx", args.layers)
        for server in args.servers:
            place = folder / server
            (place / "probe").mkdir(parents=True)
            (place / "stack").mkdir()
            servers[server] = run(server, file, place, args.seconds, args.controls, args.workers)
    date = datetime.date.today().isoformat()
    first = next(iter(servers.values()))
    document = {
        "date": date,
        "machine": where,
        "commit": commit(),
        "versions": versions(["triton-python"] if "triton" in servers else []),
        "seconds": args.seconds,
        "layers": args.layers,
        "workers": args.workers,
        "tiers": first["tiers"],
        "servers": servers,
    }
    base = args.out / f"{date}-gateway-sla"
    base.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    base.with_suffix(".md").write_text(markdown(document))
    base.with_suffix(".svg").write_text(plot(document))
    print(markdown(document))


if __name__ == "__main__":
    main()
