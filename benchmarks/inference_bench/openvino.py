"""Compares OpenVINO with ONNX Runtime's plain CPU provider, on the same ONNX files, in one process and in turns.

    python benchmarks/inference_server.py openvino [--models tiny encoder ...] [--batches 1 8 32] [--runs 200]
        [--seconds 20] [--threads 1] [--precision FP32] [--json FILE]

For each model and batch size: the median time of a run and the CPU time that the process used for it, of both, and the
largest error of OpenVINO's outputs. What is measured is what serves: the sessions of the reference and of the artefact,
built and checked as a server does it (`oriel models compare` with a compiler). Nothing else should use the machine.
Needs the package openvino: pip install 'oriel-serving[openvino-compiler]'.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness.pages import table

from inference_bench.models import MODELS, Model, write
from oriel_inference.artefacts.compare import Comparison, Contestant, compare
from oriel_inference.backends.openvino_cpu import OpenVino
from oriel_inference.errors import CompilerMissing
from oriel_inference.model import EngineOptions

HEADING = ("model", "rows", "CPU provider ms", "OpenVINO ms", "faster", "CPU ms", "OpenVINO CPU ms", "largest error")
CONFIG = """
backend: "onnxruntime" max_batch_size: {model.max_batch}
input [ {{ name: "x" data_type: TYPE_{model.datatype} dims: {dims} }} ]
output [ {{ name: "y" data_type: TYPE_FP32 dims: {outputs} }} ]
parameters {{ key: "oriel.compile" value {{ string_value: "openvino" }} }}
parameters {{ key: "oriel.compile.precision" value {{ string_value: "{precision}" }} }}
"""


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 8, 32], help="rows; larger ones are left out")
    parser.add_argument("--runs", type=int, default=200, help="of each, per model and batch size (200)")
    parser.add_argument("--seconds", type=float, default=20.0, help="begin no further runs after this time (20)")
    parser.add_argument("--threads", type=int, default=1, help="of each (1)")
    parser.add_argument("--precision", choices=("FP32", "BF16", "FP16"), default="FP32", help="OpenVINO's (FP32)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    return parser.parse_args()


def write_model(root: Path, model: Model, precision: str) -> None:
    """Write a repository's folder of the model, which asks for OpenVINO."""
    (root / model.name / "1").mkdir(parents=True)
    write(model, root / model.name / "1" / "model.onnx")
    dims, outputs = list(model.dims), list(model.outputs)
    config = CONFIG.format(model=model, dims=dims, outputs=outputs, precision=precision)
    (root / model.name / "config.pbtxt").write_text(config)


def rows_of(found: Comparison) -> list[list[str]]:
    """Return the lines of the table for one model; a single one with the reason if OpenVINO could not be measured."""
    reference, openvino = found.contestants
    if not openvino.median_ms:
        return [[found.model, openvino.state, openvino.reason, *[""] * (len(HEADING) - 3)]]
    return [
        [
            found.model,
            str(rows),
            f"{reference.median_ms[rows]:.3f}",
            f"{openvino.median_ms[rows]:.3f}",
            f"{reference.median_ms[rows] / openvino.median_ms[rows]:.2f}x",
            f"{reference.cpu_ms[rows]:.3f}",
            f"{openvino.cpu_ms[rows]:.3f}",
            _error(openvino),
        ]
        for rows in reference.median_ms
    ]


def _error(one: Contestant) -> str:
    largest = max((each.absolute for each in one.errors), default=0.0)
    return f"{largest:.2g}" if one.state == "agrees" else f"{largest:.2g}, {one.state}"


def document(found: Comparison) -> dict[str, Any]:
    """Return the figures of one model."""
    return {
        "model": found.model,
        "contestants": [
            {"name": each.name, "state": each.state, "median_ms": each.median_ms, "cpu_ms": each.cpu_ms}
            for each in found.contestants
        ],
    }


def main() -> int:
    args = arguments()
    try:
        version = OpenVino().identity(EngineOptions()).compiler_version
    except CompilerMissing as missing:
        print(missing.reason, file=sys.stderr)
        return 2
    print(f"OpenVINO {version}, {args.precision}, {args.threads} thread(s)\n")
    lines: list[list[str]] = []
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        for name in args.models:
            model = MODELS[name]
            write_model(Path(folder), model, args.precision)
            print(f"{name} ...", file=sys.stderr, flush=True)
            found = compare(
                Path(folder),
                name,
                batches=[rows for rows in args.batches if rows <= model.max_batch],
                runs=args.runs,
                seconds=args.seconds,
                cores=args.threads,
            )
            lines += rows_of(found)
            figures.append(document(found))
    print(table(HEADING, lines))
    if args.json is not None:
        args.json.write_text(json.dumps({"openvino": version, "threads": args.threads, "models": figures}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
