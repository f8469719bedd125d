"""The inference server of the phases, with one model, and its audit."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.processes import free_port, inference_command, serving

from inference_bench.contenders import repository
from inference_bench.goodput_cells import Served
from inference_bench.models import Model
from inference_bench.targets import http_target, is_listening

__all__ = ["running"]


@contextmanager
def running(model: Model, file: Path, threads: int, folder: Path) -> Iterator[tuple[Served, Path]]:
    """The model on a server, and the file of `serve.py --audit`, which is written when the server has ended."""
    audit, port = folder / "audit.json", free_port()
    models = repository(folder / "oriel", model, file, "onnxruntime", threads)
    python, *rest = inference_command(models, port)
    command = [python, str(Path(__file__).with_name("serve.py")), "--audit", str(audit)]
    probe = http_target("oriel", port, f"/v2/models/{model.name}/infer", model, binary=True)
    print(f"starting oriel with model {model.name} ...", file=sys.stderr, flush=True)
    with serving([*command, *rest[rest.index("--model-repository") :]], lambda: is_listening(probe)):
        yield Served(port=port, name=model.name), audit
