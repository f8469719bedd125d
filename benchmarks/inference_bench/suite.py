"""Measures everything about the inference server's speed and writes its page into benchmarks/results.

    python benchmarks/inference_server.py suite [--seconds 2] [--rounds 2] [--goodput-seconds 5] [--threads 1]
        [--skip peers goodput] [--out benchmarks/results/DATE-inference]

Makes the peers' environments (some minutes, the first time), then runs `inference_server.py peers` and
`goodput.py servers`, at most a quarter of an hour with the defaults, and writes OUT.md, OUT.json and OUT.html. Longer
turns and more rounds give better figures.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.environments import PACKAGES, commit, machine, python_of, versions
from harness.pages import Bar, Panel, conditions, html_page, table, today, word
from harness.processes import ROOT

from inference_bench import goodput_report, report
from inference_bench.contenders import CONTENDERS
from oriel_inference.settings import available_cores

TITLE = "The inference server beside others"


def run(script: str, case: str, flags: list[str]) -> dict[str, Any]:
    """The document of one of the two commands, whose output goes to the terminal."""
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "figures.json"
        subprocess.run(
            [sys.executable, str(ROOT / "benchmarks" / script), case, *flags, "--json", str(answer)], check=True
        )
        found: dict[str, Any] = json.loads(answer.read_text())
        return found


def environments() -> list[str]:
    """The peers that can be made here."""
    made = []
    for peer in (name for name in CONTENDERS if name in PACKAGES):
        try:
            python_of(peer)
            made.append(peer)
        except (OSError, subprocess.CalledProcessError) as error:
            print(f"{peer} is left out: {error}", file=sys.stderr)
    return made


def markdown(document: Mapping[str, Any]) -> str:
    about = document["about"]
    shown = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    parts = [
        f"# {TITLE}, {about['date']}",
        conditions(about["machine"], about["commit"], "not noted (medians)"),
        f"`benchmarks/inference_server.py suite`, commit {about['commit']}. {about['machine']}; load generators on the "
        f"same cores. {shown}.",
    ]
    if peers := document.get("peers"):
        parts.append(
            f"Threads of ONNX Runtime in every contender: {peers['threads']}. Medians of {peers['rounds']} x "
            f"{peers['seconds']} s, contenders in turns; CPU-us per request of the contender's own processes."
        )
        parts.append(report.as_markdown(peers).strip())
    if goodput := document.get("goodput"):
        parts.append(
            "# Goodput\n\nAnswers within their deadline per second, offered by `oriel load` on schedule; 30 % gold, "
            f"70 % bronze; {goodput['rounds']} x {goodput['seconds']:g} s a cell. `-`: the generator lagged: "
            "not quoted."
        )
        for name, model in goodput["models"].items():
            cells = table(goodput_report.HEADING, goodput_report.rows(model))
            parts.append(f"## {name}\n\n{goodput_report.about(name, model)}.\n\n{cells}")
        judged = [(text, found, word(met)) for text, found, met in goodput_report.verdicts(goodput)]
        parts.append(f"## Targets of goodput\n\n{table(('target', 'found', ''), judged)}")
    return "\n\n".join(parts) + "\n"


def html(document: Mapping[str, Any]) -> str:
    about = document["about"]
    panels = []
    for name, workload in document.get("peers", {}).get("workloads", {}).items():
        for connections, medians in workload["medians"].items():
            for what, unit in (("rate", "req/s"), ("cpu_us", "CPU-us")):
                bars = [Bar(label=who, value=m.get(what), own=who == "oriel") for who, m in medians.items()]
                panels.append(Panel(title=f"{name} at {connections} connections, {unit}", unit=unit, bars=bars))
    for name, model in document.get("goodput", {}).get("models", {}).items():
        for cell in model["cells"]:
            found = {who: goodput_report.best(by_delay)[1] for who, by_delay in cell["contenders"].items()}
            bars = [Bar(label=who, value=m["goodput"], own=who == "oriel") for who, m in found.items()]
            load = f"{cell['factor']:g} x {cell['arrivals']}"
            panels.append(Panel(title=f"{name}, {load}: answers in time", unit="/s", bars=bars, mark=model["capacity"]))
    text = f"{about['machine']}; commit {about['commit']}. Dashed: the capacity, closed loop."
    return html_page(f"{TITLE}, {about['date']}", text, panels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    day = today()
    parser.add_argument("--seconds", type=int, default=2, help="of one closed-loop turn (2)")
    parser.add_argument("--rounds", type=int, default=2, help="turns of each contender (2)")
    parser.add_argument("--goodput-seconds", type=float, default=5.0, help="of one open-loop phase (5)")
    parser.add_argument("--goodput-rounds", type=int, default=1)
    parser.add_argument("--all-delays", action="store_true", help="all of Triton's delays in every cell of goodput")
    parser.add_argument("--threads", type=int, default=1, help="ONNX Runtime's threads, everywhere (1)")
    parser.add_argument("--skip", nargs="+", choices=("peers", "goodput"), default=[])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / f"{day}-inference")
    args = parser.parse_args()
    made = environments()
    about = {"date": day, "commit": commit(), "machine": machine(available_cores()), "versions": versions(made)}
    document: dict[str, Any] = {"about": about}
    threads = ["--threads", str(args.threads)]
    if "peers" not in args.skip:
        flags = [*threads, "--seconds", str(args.seconds), "--rounds", str(args.rounds)]
        document["peers"] = run("inference_server.py", "peers", flags)
    if "goodput" not in args.skip:
        flags = [*threads, "--seconds", str(args.goodput_seconds), "--rounds", str(args.goodput_rounds)]
        flags += ["--all-delays"] if args.all_delays else []
        flags += [] if "triton-python" in made else ["--no-triton"]
        document["goodput"] = run("goodput.py", "servers", flags)
    args.out.with_suffix(".json").write_text(json.dumps(document, indent=1) + "\n")
    args.out.with_suffix(".md").write_text(markdown(document))
    args.out.with_suffix(".html").write_text(html(document))
    print(f"written: {args.out}.md, .json, .html", file=sys.stderr)
