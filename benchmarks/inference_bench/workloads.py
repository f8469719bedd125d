"""The workloads, and how they are measured: all contenders of a model run at once and take turns."""

import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import onnxruntime as ort
from harness.load import Failed
from harness.processes import cpu_s, pss_mb, serving

from inference_bench.closed_loop import drive
from inference_bench.contenders import CONTENDERS, Contender
from inference_bench.in_process import alone
from inference_bench.models import MODELS, Model, write
from inference_bench.targets import Target, Wrong, ask, grpc_target, http_target, is_listening

__all__ = ["IN_PROCESS", "WORKLOADS", "Measured", "Workload", "measure", "side_by_side"]

IN_PROCESS = "in-process ONNX Runtime"
AGAIN_S = 2.0
WARM_UP_S = 1

Figures = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """json: over HTTP, whether everyone gets JSON; else whoever can gets binary tensors."""

    name: str
    model: str
    protocol: str
    contenders: tuple[str, ...]
    connections: tuple[int, ...]
    json: bool = False


_ALL = ("oriel", "oriel compiled", "triton-python", "mlserver")
WORKLOADS = {
    each.name: each
    for each in (
        Workload(name="tiny-http", model="tiny", protocol="http", contenders=_ALL, connections=(1, 64), json=True),
        Workload(
            name="tiny-grpc",
            model="tiny",
            protocol="grpc",
            contenders=("oriel", "oriel compiled", "grpc.aio echo", *_ALL[2:]),
            connections=(1, 64),
        ),
        Workload(name="encoder-http", model="encoder", protocol="http", contenders=_ALL, connections=(64,)),
        Workload(name="encoder-grpc", model="encoder", protocol="grpc", contenders=_ALL, connections=(64,)),
        Workload(name="image-http", model="image", protocol="http", contenders=_ALL[:3], connections=(16,)),
        Workload(name="image-json", model="image", protocol="http", contenders=_ALL, connections=(16,), json=True),
        Workload(name="image-grpc", model="image", protocol="grpc", contenders=_ALL, connections=(16,)),
    )
}


@dataclass(slots=True)
class Measured:
    """One workload's outcome. runs: connections -> contender -> figures of each turn. left_out: contender -> why."""

    workload: str
    encodings: dict[str, str] = field(default_factory=dict)
    runs: dict[int, dict[str, list[Figures]]] = field(default_factory=dict)
    pss_mb: dict[str, float] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def medians(self) -> dict[int, dict[str, Figures]]:
        return {
            connections: {
                name: {what: statistics.median(run[what] for run in turns) for what in turns[0]}
                for name, turns in found.items()
                if turns
            }
            for connections, found in self.runs.items()
        }


def measure(
    workloads: Sequence[Workload],
    *,
    only: Sequence[str],
    threads: int,
    seconds: int,
    rounds: int,
    folder: Path,
) -> list[Measured]:
    """Measure workloads that share a model."""
    model = MODELS[workloads[0].model]
    file = write(model, folder / f"{model.name}.onnx")
    expected = ort.InferenceSession(str(file), providers=["CPUExecutionProvider"]).run(None, {"x": model.row()})[0]
    wanted = [name for name in only if any(name in each.contenders for each in workloads)]
    left_out: dict[str, str] = {}
    with ExitStack() as stack:
        pids: dict[str, int] = {}
        made: dict[str, Contender] = {}
        for name in wanted:
            home = folder / f"{model.name}-{name.replace(' ', '-')}"
            home.mkdir()
            try:
                made[name] = CONTENDERS[name](home, model, file, threads)
            except (OSError, ValueError, subprocess.CalledProcessError) as error:
                left_out[name] = f"its environment cannot be made: {error}"
                continue
            print(f"starting {name} with model {model.name} ...", file=sys.stderr, flush=True)
            probe = _targets(name, made[name], model, json_only=True)[0]
            pids[name] = stack.enter_context(
                serving(made[name].command, lambda probe=probe: is_listening(probe), made[name].environment)  # type: ignore[misc]
            )
        found: list[Measured] = []
        for workload in workloads:
            targets = [
                replace(target, pid=pids[name])
                for name in wanted
                if name in made and name in workload.contenders
                for target in _targets(name, made[name], model, json_only=workload.json)
                if target.protocol == workload.protocol
            ]
            measured = side_by_side(
                workload.name, targets, workload.connections, seconds=seconds, rounds=rounds, folder=folder,
                expected=expected, in_process=None if model.name == "tiny" else (model, file, threads),
            )  # fmt: skip
            measured.left_out |= {name: why for name, why in left_out.items() if name in workload.contenders}
            found.append(measured)
        return found


def _targets(name: str, contender: Contender, model: Model, *, json_only: bool) -> list[Target]:
    found = []
    if contender.http_port:
        binary = contender.binary and not json_only
        found.append(http_target(name, contender.http_port, contender.path, model, binary=binary))
    if contender.grpc_port:
        found.append(grpc_target(name, contender.grpc_port, model))
    return found


def side_by_side(
    title: str,
    targets: Sequence[Target],
    connections: Sequence[int],
    *,
    seconds: int,
    rounds: int,
    folder: Path,
    expected: Any = None,
    in_process: tuple[Model, Path, int] | None = None,
) -> Measured:
    """Measure targets in turns (A B C, A B C, ...), so that a machine whose speed drifts is unfair to nobody.

    expected: what an answer must hold. in_process: also ONNX Runtime alone, in a turn of its own.
    """
    measured = Measured(title, {target.name: target.encoding for target in targets})
    answers: dict[str, int] = {}
    for target in targets:
        try:
            answers[target.name] = ask(target, None if target.name == "grpc.aio echo" else expected)
        except Wrong as wrong:
            measured.left_out[target.name] = str(wrong)[:300]
    targets = [target for target in targets if target.name in answers]
    for target in targets:
        try:
            drive(target, max(connections), WARM_UP_S, answers[target.name], folder)
        except Failed as failed:
            # Some servers refuse their first crowd; who refuses a second one as well is not measured.
            print(f"{title}: {failed}\nonce more ...", file=sys.stderr, flush=True)
            time.sleep(AGAIN_S)
            try:
                drive(target, max(connections), WARM_UP_S, answers[target.name], folder)
            except Failed as again:
                _leave_out(measured, target, again)
    targets = [target for target in targets if target.name not in measured.left_out]
    for number in range(rounds):
        for many in connections:
            by_name = measured.runs.setdefault(many, {})
            if in_process is not None:
                by_name.setdefault(IN_PROCESS, []).append(_in_process(*in_process, seconds=2 * seconds))
                _say(title, number, IN_PROCESS, many, by_name[IN_PROCESS][-1])
            for target in targets:
                if target.name in measured.left_out:
                    continue
                try:
                    figures = _turn(target, many, seconds, answers[target.name], folder)
                except Failed as failed:
                    _leave_out(measured, target, failed)
                    continue
                by_name.setdefault(target.name, []).append(figures)
                _say(title, number, target.name, many, figures)
    measured.pss_mb = {target.name: pss_mb(target.pid) for target in targets if target.pid is not None}
    return measured


def _leave_out(measured: Measured, target: Target, failed: Failed) -> None:
    """A peer that fails requests has no figures; ours and the one it is judged by may not fail any."""
    if target.name.startswith(("oriel", "triton")):
        sys.exit(str(failed))
    measured.left_out[target.name] = str(failed)[:300]
    for by_name in measured.runs.values():
        by_name.pop(target.name, None)


def _turn(target: Target, connections: int, seconds: int, answer_bytes: int, folder: Path) -> Figures:
    before = cpu_s(target.pid) if target.pid is not None else 0.0
    run = drive(target, connections, seconds, answer_bytes, folder)
    figures = {"rate": run.rate, "p50_ms": run.p50_ms, "p99_ms": run.p99_ms}
    if target.pid is not None:
        figures["cpu_us"] = (cpu_s(target.pid) - before) * 1e6 / run.requests
    return figures


def _in_process(model: Model, file: Path, threads: int, *, seconds: int) -> Figures:
    found = alone(file, threads, seconds, model.max_batch)
    return {"rate": found["rate"], "cpu_us": found["cpu_us"], "best_batch": found["best_batch"],
            "batch_1_ms": found["batch_s"]["1"] * 1e3}  # fmt: skip


def _say(title: str, number: int, name: str, connections: int, figures: Mapping[str, float]) -> None:
    cpu = f"{figures['cpu_us']:8.1f} us" if "cpu_us" in figures else ""
    where = f"round {number + 1} {title:13} at {connections:3}"
    print(f"{where} {name:24} {figures['rate']:8.0f}/s {cpu}", file=sys.stderr, flush=True)
