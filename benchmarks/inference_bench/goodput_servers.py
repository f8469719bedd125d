"""The contenders of the goodput table with one model: Oriel, the same server as a FIFO, Triton with priorities."""

import json
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.processes import free_port, inference_command, serving

from inference_bench.contenders import Contender, repository, triton
from inference_bench.goodput_cells import Served
from inference_bench.models import Model
from inference_bench.targets import http_target, is_listening

__all__ = ["Servers", "rows_for_nobody", "running"]

_TRITON = (
    "dynamic_batching {{ max_queue_delay_microseconds: {delay} priority_levels: 2 default_priority_level: 2 "
    "default_queue_policy {{ timeout_action: REJECT default_timeout_microseconds: 60000000 "
    "allow_timeout_override: true }} }}"
)
_FIFO = "dynamic_batching {{ max_queue_delay_microseconds: {delay} }}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Servers:
    """served: contender -> its models by delay in microseconds. audit: written by Oriel when it has ended."""

    served: Mapping[str, Mapping[int, Served]]
    audit: Path


@contextmanager
def running(
    model: Model, file: Path, threads: int, folder: Path, *, fifo_delays: Sequence[int], triton_delays: Sequence[int]
) -> Iterator[Servers]:
    """Start all contenders at once; idle ones cost nothing. A contender without delays is left out."""
    audit = folder / "audit.json"
    made: dict[str, tuple[Contender, Sequence[int]]] = {
        "oriel": (_oriel(folder / "oriel", model, file, threads, {model.name: ""}, ["--audit", str(audit)]), (0,)),
    }
    if fifo_delays:
        copies = _copies(model, _FIFO, fifo_delays)
        made["fifo"] = (_oriel(folder / "fifo", model, file, threads, copies, ["--fifo"]), fifo_delays)
    if triton_delays:
        copies = _copies(model, _TRITON, triton_delays)
        made["triton-python"] = (triton(folder, model, file, threads, copies), triton_delays)
    with ExitStack() as stack:
        served: dict[str, dict[int, Served]] = {}
        for name, (contender, delays) in made.items():
            print(f"starting {name} with model {model.name} ...", file=sys.stderr, flush=True)
            names = {delay: model.name if name == "oriel" else f"{model.name}-{delay}" for delay in delays}
            probes = [http_target(name, contender.http_port, f"/v2/models/{each}/infer", model, binary=True)
                      for each in names.values()]  # fmt: skip
            stack.enter_context(
                serving(contender.command, lambda probes=probes: all(map(is_listening, probes)), contender.environment)  # type: ignore[misc]
            )
            served[name] = {
                delay: Served(port=contender.http_port, name=each, parameters=name == "triton-python")
                for delay, each in names.items()
            }
        yield Servers(served=served, audit=audit)


def _copies(model: Model, scheduling: str, delays: Sequence[int]) -> dict[str, str]:
    return {f"{model.name}-{delay}": scheduling.format(delay=delay) for delay in delays}


def _oriel(
    folder: Path, model: Model, file: Path, threads: int, batching: Mapping[str, str], flags: Sequence[str]
) -> Contender:
    # Without a scheduling of its own Oriel's model has none of the fields, only that it may be batched.
    batching = {name: scheduling or "dynamic_batching { }" for name, scheduling in batching.items()}
    models = repository(folder, model, file, "onnxruntime", threads, batching)
    port = free_port()
    python, *rest = inference_command(models, port)
    command = [python, str(Path(__file__).with_name("serve.py")), *flags, *rest[rest.index("--model-repository") :]]
    return Contender(command=command, http_port=port)


def rows_for_nobody(served: Served) -> int:
    """Rows that Oriel has computed so far and nobody received: their deadline passed meanwhile."""
    url = f"http://127.0.0.1:{served.port}/v2/models/{served.name}/stats"
    with urllib.request.urlopen(url, timeout=10) as answer:
        (found,) = json.load(answer)["model_stats"]
    executed = sum(int(each["batch_size"]) * int(each["compute_infer"]["count"]) for each in found["batch_stats"])
    return executed - int(found["inference_count"])
