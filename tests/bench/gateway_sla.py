"""What the gateway keeps of its promises under load: R1 to R5 and R8, before two inference servers.

    python tests/bench/gateway_sla.py [--seconds 20] [--servers oriel triton] [--layers 60] [--out docs/benchmarks]

The servers: Oriel's own, and an unmodified Triton from the nvidia-pytriton wheel, which gets an environment of its own
under build/ on first use. Both run one ONNX model on one thread, batches of at most four; one row is at least 10 ms of
matrix products, and a batch saves next to nothing. The gateway has its default bounds. `oriel load` offers Poisson
arrivals in a process of its own. All of them share the machine, so the generator's and the gateway's CPU are reported
and taken off what the server could have answered (R2).

The capacity C is the closed-loop rate at the server itself, twelve connections. Gold always offers 0.3 C, silver
0.2 C; bronze makes up the rest to 1, 2, 5 and 10 times C. Before that the gateway's concurrency is learned under 2 C.
After the flood at 10 C, half of C is offered: two seconds to recover, then it is measured. R4: a quiet and a noisy
tenant of one tier, then both with more than their share. R8: a flood of gold and a little bronze.

R3: how long refusals (429, 503) took at 5 C; R5: by how much the 504s of calls given up were late at up to 2 C; both
from sending, so that the generator's own delays are in them. What the generator could not quote is offered again, twice
at most.

Writes DATE-gateway-sla.json, .md and the plot DATE-gateway-sla.svg.
"""

import argparse
import datetime
import http.client
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gateway_bench.contenders import ROOT, cpu_s
from inference_bench.environments import machine, versions
from inference_bench.models import Model
from inference_bench.targets import http_target
from sla_bench.report import lowest, markdown, plot, verdict
from sla_bench.stack import LAYERS, MODEL, SERVERS, TENANTS, Stack, Tier, started, write_model

FACTORS = (1.0, 2.0, 5.0, 10.0)
GOLD, SILVER = 0.3, 0.2
CORES = 2
LEAD_S = 2.0
ATTEMPTS = 3
GIVE_UP = 4  # times the target
TITLES = {"oriel": "Oriel's inference server", "triton": "an unmodified Triton"}
Rates = Mapping[str, float]


def tiers_for(service_s: float) -> dict[str, Tier]:
    """Targets as multiples of one row's time."""
    times = {"gold": 12.0, "silver": 30.0, "bronze": 60.0}
    return {
        name: Tier(band=band, target_ms=max(50, round(factor * service_s * 1e3)))
        for band, (name, factor) in enumerate(times.items())
    }


def closed_loop(url: str, model: Model, seconds: float, connections: int) -> tuple[float, float]:
    """Answers per second, and the smallest time one took."""
    target = http_target("direct", urlsplit(url).port or 80, urlsplit(url).path, model, binary=True)
    ends = time.monotonic() + seconds
    times: list[float] = []

    def one() -> None:
        connection = http.client.HTTPConnection(target.host, target.port)
        while (began := time.monotonic()) < ends:
            connection.request("POST", target.path, target.body, dict(target.headers))
            answer = connection.getresponse()
            answer.read()
            if answer.status != 200:
                sys.exit(f"the server answers {answer.status}")
            times.append(time.monotonic() - began)
        connection.close()

    threads = [threading.Thread(target=one) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return len(times) / seconds, sorted(times)[len(times) // 10]


class Bench:
    """One server's run."""

    def __init__(self, stack: Stack, tiers: Mapping[str, Tier], capacity: float, folder: Path, seconds: float) -> None:
        self.stack = stack
        self.tiers = tiers
        self.capacity = capacity
        self.folder = folder
        self.seconds = seconds
        row = MODEL.row()
        tensor = {"name": "x", "shape": list(row.shape), "datatype": MODEL.datatype, "data": row.ravel().tolist()}
        (folder / "body.json").write_text(json.dumps({"inputs": [tensor]}))

    def offer(self, phases: Sequence[tuple[str, float, Rates, bool]]) -> dict[str, Any]:
        """name, seconds, rates by tenant in shares of C, whether it is a warm-up -> `oriel load`'s document.

        With `cores`: how much of a core the gateway and the server used meanwhile.
        """
        used = sorted({tenant for _, _, rates, _ in phases for tenant in rates}, key=list(TENANTS).index)
        lines = ["seed = 3", "max_in_flight = 16384"]
        for tenant in used:
            target_ms = self.tiers[TENANTS[tenant]].target_ms
            lines += ["[[stream]]", f'name = "{tenant}"', f'url = "{self.stack.url}"', f'key = "bench-{tenant}"']
            lines += ['body = "body.json"', 'encoding = "binary"', f"target_ms = {target_ms}"]
            lines += [f"timeout_s = {4 * target_ms / 1e3 + 2}"]
        for name, seconds, rates, warm_up in phases:
            written = ", ".join(f"{tenant} = {share * self.capacity:.3f}" for tenant, share in rates.items())
            lines += ["[[phase]]", f'name = "{name}"', f"seconds = {seconds}", f"rates = {{ {written} }}"]
            lines += [f"warm_up = {str(warm_up).lower()}"]
        scenario, answer = self.folder / "scenario.toml", self.folder / "answer.json"
        scenario.write_text("\n".join(lines) + "\n")
        answer.unlink(missing_ok=True)
        before = cpu_s(self.stack.gateway_pid), cpu_s(self.stack.server_pid)
        command = [sys.executable, "-m", "oriel_cli.main", "load", str(scenario), "--no-plot", "--quiet"]
        done = subprocess.run([*command, "--json", str(answer)], capture_output=True, text=True, check=False, cwd=ROOT)
        if not answer.exists():
            sys.exit(f"oriel load failed: {done.stderr[-1000:]}")
        document: dict[str, Any] = json.loads(answer.read_text())
        seconds = sum(phase[1] for phase in phases)
        document["cores"] = {
            "gateway": (cpu_s(self.stack.gateway_pid) - before[0]) / seconds,
            "server": (cpu_s(self.stack.server_pid) - before[1]) / seconds,
        }
        return document

    def measured(self, load: str, rates: Rates, factor: float = 0.0) -> dict[str, Any]:
        """One cell: a lead-in that is not quoted, then `seconds` at these rates."""
        for _ in range(ATTEMPTS):
            document = self.offer([("lead", LEAD_S, rates, True), (load, self.seconds, rates, False)])
            if document["phases"][1]["quoted"]:
                break
        return _cell(load, document["phases"][1], document["cores"], factor)

    def flood_and_after(self, load: str, rates: Rates, factor: float) -> tuple[dict[str, Any], dict[str, Any]]:
        calm = {"gold": 0.2, "silver": 0.15, "bronze": 0.15}
        for _ in range(ATTEMPTS):
            document = self.offer(
                [
                    ("lead", LEAD_S, rates, True),
                    (load, self.seconds, rates, False),
                    ("recovering", 2.0, calm, True),
                    ("after the flood", max(4.0, self.seconds / 2), calm, False),
                ]
            )
            if document["phases"][1]["quoted"] and document["phases"][3]["quoted"]:
                break
        flood = _cell(load, document["phases"][1], document["cores"], factor)
        return flood, _cell("0.5x after the flood", document["phases"][3], document["cores"], 0.0)


def _cell(load: str, phase: Mapping[str, Any], cores: Mapping[str, float], factor: float) -> dict[str, Any]:
    return {
        "load": load,
        "factor": factor,
        "tiers": {name: found for name, found in phase["streams"].items() if found["scheduled"]},
        "quoted": phase["quoted"],
        "objection": phase["objection"],
        "generator_cores": phase["generator_busy"],
        "gateway_cores": cores["gateway"],
        "server_cores": cores["server"],
        "answered_per_s": phase["all"]["good"] / phase["seconds"],
        "goodput_per_s": phase["all"]["goodput_per_s"],
    }


def run(server: str, file: Path, folder: Path, seconds: float) -> dict[str, Any]:
    """Everything for one server."""
    # The targets have to be in the gateway's documents before it starts: one row is timed at a server of its own.
    with started(server, file, folder / "probe", tiers_for(0.01)) as stack:
        closed_loop(stack.direct, MODEL, 1.0, 1)
        _, service_s = closed_loop(stack.direct, MODEL, 2.0, 1)
    tiers = tiers_for(service_s)
    with started(server, file, folder / "stack", tiers) as stack:
        closed_loop(stack.direct, MODEL, 1.0, 12)
        before = cpu_s(stack.server_pid)
        capacity, _ = closed_loop(stack.direct, MODEL, max(3.0, seconds / 4), 12)
        server_cores = (cpu_s(stack.server_pid) - before) / max(3.0, seconds / 4)
        bench = Bench(stack, tiers, capacity, folder, seconds)
        learning = {"gold": GOLD, "silver": SILVER, "bronze": 2.0 - GOLD - SILVER}
        bench.offer([("learning", max(4.0, seconds / 2), learning, True)])
        loads: list[dict[str, Any]] = []
        for factor in FACTORS:
            rates = {"gold": GOLD, "silver": SILVER, "bronze": factor - GOLD - SILVER}
            print(f"  {factor:g}x ...", file=sys.stderr, flush=True)
            if factor == FACTORS[-1]:
                loads += bench.flood_and_after(f"{factor:g}x", rates, factor)
            else:
                loads.append(bench.measured(f"{factor:g}x", rates, factor))
        loads.append(bench.measured("R4 quiet 0.4x, noisy 3x", {"quiet": 0.4, "noisy": 3.0}))
        loads.append(bench.measured("R4 quiet 1.5x, noisy 3x", {"quiet": 1.5, "noisy": 3.0}))
        loads.append(bench.measured("R8 gold 5x, bronze 0.2x", {"gold": 5.0, "bronze": 0.2}))
    found = {
        "title": TITLES[server],
        "service_ms": service_s * 1e3,
        "capacity": capacity,
        "server_cores": server_cores,
        "tiers": {name: {"target_ms": tier.target_ms} for name, tier in tiers.items()},
        "loads": loads,
    }
    return {**found, "verdicts": judge(found)}


def judge(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """What of PROMISES a run kept."""
    by_load = {cell["load"]: cell for cell in found["loads"]}
    one = by_load["1x"]["tiers"]["gold"]
    verdicts = []
    for load, least in (("1x", 0.995), ("2x", 0.995), ("5x", 0.99), ("10x", 0.97)):
        attainment = by_load[load]["tiers"]["gold"]["attainment"]
        verdicts.append(
            verdict(
                f"R1 gold in target at {load}",
                _share(attainment),
                f">= {least * 100:g} %",
                None if attainment is None else attainment >= least,
            )
        )
    refused = sum(sum(by_load[load]["tiers"]["gold"]["refused"].values()) for load in ("1x", "2x", "5x", "10x"))
    verdicts.append(verdict("R1 gold refusals", str(refused), "0", refused == 0))
    ten = by_load["10x"]["tiers"]["gold"]
    if one["latency_ms"] and ten["latency_ms"] and one["latency_ms"]["p99"] and ten["latency_ms"]["p99"]:
        bound = 2.0 * one["latency_ms"]["p99"] + MODEL.max_batch * found["service_ms"]
        p99 = ten["latency_ms"]["p99"]
        verdicts.append(
            verdict("R1 gold p99 at 10x", f"{p99:.0f} ms", f"<= 2 x at 1x + a batch: {bound:.0f} ms", p99 <= bound)
        )
    verdicts.append(_goodput(found, by_load["10x"]))
    after = by_load["0.5x after the flood"]
    slowest = lowest([each["attainment"] for each in after["tiers"].values()])
    verdicts.append(
        verdict(
            "R2 in target, all tiers, from 2 s after the flood",
            _share(slowest),
            ">= 99 %",
            None if slowest is None else slowest >= 0.99,
        )
    )
    verdicts += _refusals(by_load, found["tiers"])
    verdicts += _tenants(by_load, found["capacity"])
    floor = by_load["R8 gold 5x, bronze 0.2x"]
    answered = sum(each["good"] for each in floor["tiers"].values())
    share = floor["tiers"]["bronze"]["good"] / max(1, answered)
    verdicts.append(verdict("R8 bronze's share of what is executed", _share(share), ">= 5 %", share >= 0.0495))
    return verdicts


def _goodput(found: Mapping[str, Any], ten: Mapping[str, Any]) -> dict[str, Any]:
    free = max(0.0, CORES - ten["generator_cores"] - ten["gateway_cores"])
    left = found["capacity"] * min(1.0, free / max(found["server_cores"], 1e-9))
    goodput = ten["goodput_per_s"]
    name = "R2 goodput at 10x of what generator and gateway leave of C"
    if goodput is None:
        return verdict(name, "-", ">= 85 %", None)
    return verdict(
        name, f"{goodput:.1f} of {left:.1f} per s = {goodput / left * 100:.0f} %", ">= 85 %", goodput >= 0.85 * left
    )


def _refusals(by_load: Mapping[str, Any], tiers: Mapping[str, Mapping[str, float]]) -> list[dict[str, Any]]:
    """R3 and R5, of every tier and reason of which there were enough."""
    taken = [
        found["p99"]
        for each in by_load["5x"]["tiers"].values()
        for reason, found in (each["refused_ms"] or {}).items()
        if reason[:3] in ("429", "503") and found["p99"] is not None
    ]
    late = [
        found["p99"] - GIVE_UP * tiers[name]["target_ms"]
        for load in ("1x", "2x")
        for name, each in by_load[load]["tiers"].items()
        for reason, found in (each["refused_ms"] or {}).items()
        if reason == "504 deadline_exceeded" and found["p99"] is not None
    ]
    worst, latest = max(taken, default=None), max(late, default=None)
    return [
        verdict(
            "R3 p99 of refusals at 5x",
            "-" if worst is None else f"{worst:.1f} ms",
            "<= 50 ms",
            None if worst is None else worst <= 50.0,
        ),
        verdict(
            "R5 p99 of 504s at up to 2x",
            "-" if latest is None else f"deadline + {latest:.1f} ms",
            "<= deadline + 20 ms",
            None if latest is None else latest <= 20.0,
        ),
    ]


def _tenants(by_load: Mapping[str, Any], capacity: float) -> list[dict[str, Any]]:
    calm, full = by_load["R4 quiet 0.4x, noisy 3x"], by_load["R4 quiet 1.5x, noisy 3x"]
    attainment = calm["tiers"]["quiet"]["attainment"]
    rest = max(1e-9, calm["answered_per_s"] - 0.4 * capacity)
    noisy = calm["tiers"]["noisy"]["good"] / max(1e-9, sum(each["good"] for each in calm["tiers"].values()))
    share = full["tiers"]["noisy"]["good"] / max(1, sum(each["good"] for each in full["tiers"].values()))
    idle = noisy * calm["answered_per_s"] / rest
    conserved = calm["answered_per_s"] / max(1e-9, full["answered_per_s"])
    return [
        verdict("R4 quiet tenant in target", _share(attainment), ">= 99 %",
                None if attainment is None else attainment >= 0.99),
        verdict("R4 noisy tenant's share while both want more", _share(share), "<= 60 % (half x 1.2)", share <= 0.6),
        verdict("R4 noisy tenant's part of what the quiet one leaves", _share(idle), ">= 95 %", idle >= 0.95),
        verdict("R4 answers of the pool meanwhile, of those when both want more", _share(conserved), ">= 95 %",
                conserved >= 0.95),
    ]  # fmt: skip


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value * 100:.2f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measured phase")
    parser.add_argument("--servers", nargs="+", choices=SERVERS, default=list(SERVERS))
    parser.add_argument("--layers", type=int, default=LAYERS, help="of the model; as many are 10 ms or more")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks")
    args = parser.parse_args()
    servers: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = write_model(folder / "work.onnx", args.layers)
        for server in args.servers:
            place = folder / server
            (place / "probe").mkdir(parents=True)
            (place / "stack").mkdir()
            servers[server] = run(server, file, place, args.seconds)
    date = datetime.date.today().isoformat()
    first = next(iter(servers.values()))
    document = {
        "date": date,
        "machine": machine(CORES),
        "versions": versions(["triton-python"] if "triton" in servers else []),
        "seconds": args.seconds,
        "layers": args.layers,
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
