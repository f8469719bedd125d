"""`oriel inference`: flags to settings. Anything heavy is imported when the command runs."""

import argparse
import sys
from pathlib import Path

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The unit's flags; tritonserver's spellings are accepted where the meaning is the same."""
    add = parser.add_argument
    add(
        "--model-repository",
        "--model-store",
        dest="model_repository",
        metavar="DIR",
        type=Path,
        action="append",
        required=True,
        help="folder of models, <model>/config.pbtxt and <model>/<version>/model.onnx (repeatable)",
    )
    add("--host", default="127.0.0.1", help="address of every port that has none of its own")
    for name, port in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        add(f"--{name}-port", type=int, default=port, metavar="N", help=f"default {port}; 0 takes any free port")
        add(f"--{name}-address", default=None, metavar="HOST", help=argparse.SUPPRESS)
    add("--cores", type=int, default=0, metavar="N", help="cores that running batches share (default: all available)")
    add("--default-timeout-s", type=float, default=60.0, metavar="S", help="deadline of requests that bring none")
    add(
        "--max-body-bytes",
        "--http-max-input-size",
        dest="max_body_bytes",
        type=int,
        default=64 << 20,
        metavar="N",
        help="largest request (HTTP body or gRPC message)",
    )
    add("--max-queue-items", type=int, default=10_000, metavar="N", help="requests that may wait per model version")
    add("--max-queue-bytes", type=int, default=256 << 20, metavar="N", help="bytes of requests that may wait, likewise")
    add("--max-batch-bytes", type=int, default=64 << 20, metavar="N", help="bytes of the requests of one batch")
    add(
        "--trusted-peer",
        dest="trusted_peers",
        action="append",
        metavar="NETWORK",
        help="address or network whose deadline and tier headers count (repeatable; default: loopback)",
    )
    add(
        "--access-log",
        default="",
        metavar="PATH",
        help="append one JSON line per request to this file, or to standard output for - (default: none)",
    )
    add(
        "--model-control-mode",
        choices=("none", "poll", "explicit"),
        default="none",
        help="none: load everything at start; poll: also follow changes; explicit: load on request only",
    )
    add(
        "--repository-poll-secs",
        type=_seconds,
        default=15.0,
        metavar="S",
        help="how often poll mode looks; a change is taken up when a second look finds it the same",
    )
    add(
        "--load-model",
        dest="load_models",
        action="append",
        metavar="NAME",
        help="explicit mode: load this model at start (repeatable; * for all)",
    )
    add(
        "--strict-readiness",
        type=_switch,
        default=True,
        metavar="BOOL",
        help="ready only while every model of the start serves (default true)",
    )


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.01 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError("must lie between 0.01 and 86400")
    return seconds


def _switch(text: str) -> bool:
    known = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}
    if text.lower() not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return known[text.lower()]


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop; the process's exit code."""
    from oriel_inference.app import serve
    from oriel_inference.settings import Settings, available_cores
    from oriel_wire.engine.process import configure_logging, run_unit

    settings = Settings(
        repositories=tuple(args.model_repository),
        http_host=args.http_address or args.host,
        http_port=args.http_port,
        grpc_host=args.grpc_address or args.host,
        grpc_port=args.grpc_port,
        metrics_host=args.metrics_address or args.host,
        metrics_port=args.metrics_port,
        cores=args.cores or available_cores(),
        default_timeout_s=args.default_timeout_s,
        max_body_bytes=args.max_body_bytes,
        max_queue_items=args.max_queue_items,
        max_queue_bytes=args.max_queue_bytes,
        max_batch_bytes=args.max_batch_bytes,
        trusted_peers=tuple(args.trusted_peers or ("127.0.0.0/8", "::1")),
        control_mode=args.model_control_mode,
        poll_s=args.repository_poll_secs,
        load_models=tuple(args.load_models or ()),
        strict_readiness=args.strict_readiness,
        access_log=args.access_log,
    )
    if settings.load_models and settings.control_mode != "explicit":
        print("--load-model needs --model-control-mode explicit", file=sys.stderr)  # noqa: T201
        return 2
    configure_logging("inference")
    return run_unit(lambda stop: serve(settings, stop), unit="inference")
