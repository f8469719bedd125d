"""Compares v2 inference servers in a closed loop: CPU per request, rate, latency, memory.

    python benchmarks/inference_server.py [--workloads tiny-http encoder-grpc ...] [--only oriel triton-python ...]
        [--seconds 3] [--rounds 3] [--threads 1] [--out benchmarks/results]

Workloads: a tiny perceptron (JSON over HTTP; gRPC) at 1 and 64 connections, a transformer of about 5 ms at 64, a 602
KB image at 16, the last two binary over HTTP and raw over gRPC, the image as JSON over HTTP as well. Contenders:
Oriel, pure and from the wheel of `make compiled`; Triton with its Python backend (the server binary inside the
nvidia-pytriton wheel, dynamic batching on); MLServer (custom runtime); for gRPC a no-op ModelInfer on grpc.aio; beside
the larger models ONNX Runtime alone, in a process of its own, at its best batch. All of them run the same ONNX file on
the same ONNX Runtime with as many threads; each one's answer is checked before it is measured. They take turns, medians
are compared, CPU is that of the contender's own processes from /proc.

A contender whose environment cannot be made is left out and named. Needs Linux, `wrk` and `h2load` (package
nghttp2-client) on PATH; environments of their own under build/ are made on first use (some hundred MB each).
"""

import argparse
import sys
import tempfile
from itertools import groupby
from pathlib import Path

from harness.environments import PACKAGES, commit, machine, versions
from harness.pages import conditions, write_page
from inference_bench.contenders import CONTENDERS
from inference_bench.report import as_document, as_markdown, as_text
from inference_bench.workloads import WORKLOADS, Measured, measure

from oriel_inference.host import available_cores


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--seconds", type=int, default=3, help="of one turn (3)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender (3)")
    parser.add_argument("--threads", type=int, default=1, help="ONNX Runtime's threads, everywhere (1)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="write a page and its figures there")
    return parser.parse_args()


def main() -> None:
    """Measure the workloads, those of one model together."""
    args = arguments()
    where = machine(available_cores())
    found: list[Measured] = []
    with tempfile.TemporaryDirectory() as folder:
        chosen = [WORKLOADS[name] for name in WORKLOADS if name in args.workloads]
        for _, together in groupby(chosen, lambda each: each.model):
            found += measure(
                list(together),
                only=args.only,
                threads=args.threads,
                seconds=args.seconds,
                rounds=args.rounds,
                folder=Path(folder),
            )
    document = as_document(found, threads=args.threads, seconds=args.seconds, rounds=args.rounds)
    print(as_text(document))
    if args.out:
        used = versions([name for name in args.only if name in PACKAGES])
        said = ", ".join(f"{name} {version}" for name, version in used.items())
        held = conditions(where, commit(), "the columns `min-max`")
        about = f"`python benchmarks/inference_server.py`, {args.rounds} rounds of {args.seconds} s, medians; "
        about += f"{args.threads} threads of ONNX Runtime in every contender; {said}."
        title = "The inference server beside others"
        write_page(args.out, "inference", title, f"{held}\n\n{about}", as_markdown(document), document)


if __name__ == "__main__":
    sys.exit(main())
