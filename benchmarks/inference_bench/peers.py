"""Compares v2 inference servers in a closed loop: CPU per request, rate, latency, memory.

    python benchmarks/inference_server.py peers [--workloads tiny-http encoder-grpc ...]
        [--only oriel triton-python ...] [--seconds 3] [--rounds 3] [--threads 1] [--json FILE]
    python benchmarks/inference_server.py peers --url a=http://host:port/v2/models/M/infer
        --url b=grpc://host:port/v2/models/M
        [--pid a=123] [--rows 1 | --body FILE] [--encoding binary] [--connections 1 64]

Workloads: a tiny perceptron (JSON over HTTP; gRPC) at 1 and 64 connections, a transformer of about 5 ms at 64, a 602
KB image at 16, the last two binary over HTTP and raw over gRPC, the image as JSON over HTTP as well. Contenders:
Oriel, pure and from the wheel of `make compiled`; Triton with its Python backend (the server binary inside the
nvidia-pytriton wheel, dynamic batching on); MLServer (custom runtime); LitServe (its own batching, /predict, JSON
only); for gRPC a no-op ModelInfer on grpc.aio; beside the larger models ONNX Runtime alone, in a process of its own,
at its best batch. All of them run the same ONNX file on the same ONNX Runtime with as many threads; each one's answer
is checked before it is measured. They take turns, medians are compared, CPU is that of the contender's own processes
from /proc.

With --url any v2 servers are measured, with the same body for each: alone, or, with --workloads, beside the contenders
(then they must serve that workload's model). CPU and memory need --pid.

A contender whose environment cannot be made is left out and named. Needs Linux, `wrk` and `h2load` (package
nghttp2-client) on PATH; environments of their own under build/ are made on first use (some hundred MB each).
"""

import argparse
import json
import sys
import tempfile
from itertools import groupby
from pathlib import Path

from inference_bench.contenders import CONTENDERS
from inference_bench.report import as_document, as_text
from inference_bench.targets import Target, from_url, is_listening
from inference_bench.workloads import WORKLOADS, Measured, measure, side_by_side
from oriel_cli.errors import CommandFailed


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), help="(all; none with --url)")
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), default=list(CONTENDERS))
    parser.add_argument("--seconds", type=int, default=3, help="of one turn (3)")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender (3)")
    parser.add_argument("--threads", type=int, default=1, help="ONNX Runtime's threads, everywhere (1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    urls = parser.add_argument_group("any v2 servers")
    urls.add_argument("--url", action="append", default=[], metavar="NAME=URL", help="may be given several times")
    urls.add_argument("--pid", action="append", default=[], metavar="NAME=PID", help="whose CPU and memory to read")
    urls.add_argument("--connections", type=int, nargs="+", default=[1, 64])
    urls.add_argument("--rows", type=int, default=1, help="random inputs of so many rows (1)")
    urls.add_argument("--body", default="", metavar="FILE", help="instead: what is sent")
    urls.add_argument("--encoding", choices=("json", "binary"), default="binary", help="of random inputs (binary)")
    return parser.parse_args()


def given(args: argparse.Namespace) -> list[Target]:
    """The targets of --url. Raises CommandFailed."""
    pids = dict(each.split("=", 1) for each in args.pid)
    found = []
    for each in args.url:
        name, equals, url = each.partition("=")
        if not equals:
            raise CommandFailed(f"--url {each!r}: write NAME=URL")
        pid = int(pids[name]) if name in pids else None
        target = from_url(name, url, rows=args.rows, body=args.body, encoding=args.encoding, pid=pid)
        if not is_listening(target):
            raise CommandFailed(f"{url} does not answer this request well")
        found.append(target)
    return found


def main() -> None:
    args = arguments()
    try:
        targets = given(args)
    except CommandFailed as failure:
        sys.exit(str(failure))
    names = args.workloads or ([] if targets else list(WORKLOADS))
    found: list[Measured] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if targets and not names:
            found.append(
                side_by_side(
                    "given", targets, args.connections, seconds=args.seconds, rounds=args.rounds, folder=folder
                )
            )
        chosen = [WORKLOADS[name] for name in WORKLOADS if name in names]
        for _, together in groupby(chosen, lambda each: each.model):
            found += measure(
                list(together),
                only=args.only,
                threads=args.threads,
                seconds=args.seconds,
                rounds=args.rounds,
                folder=folder,
                more=targets,
            )
    document = as_document(found, threads=args.threads, seconds=args.seconds, rounds=args.rounds)
    print(as_text(document))
    if args.json:
        args.json.write_text(json.dumps(document, indent=1) + "\n")
