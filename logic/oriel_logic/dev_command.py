"""`oriel logic dev FILE_OR_FOLDER`: runs one service while it is being written."""

import argparse
import os
from pathlib import Path

from oriel_logic.command import address, launch, worker_count
from oriel_wire.errors import StartFailed

HTTP_PORT = 8090
INFERENCE = ("127.0.0.1", 8000)
INFERENCE_GRPC = ("127.0.0.1", 8001)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("target", type=Path, metavar="FILE_OR_FOLDER", help="a service, or a folder of services")
    parser.add_argument("--inference", action="append", metavar="HOST:PORT", help="use this running v2 server (HTTP)")
    parser.add_argument("--inference-grpc", action="append", metavar="HOST:PORT", help="its gRPC, for models.stream")
    parser.add_argument(
        "--model-repository", type=Path, metavar="DIR", help="start 'oriel inference' with these models"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument(
        "--http-port", type=int, metavar="N", help=f"exactly this one ({HTTP_PORT}, or the next that is free)"
    )
    parser.add_argument("--workers", type=int, default=1, help="worker processes for CPU work (1)")


def run(args: argparse.Namespace) -> int:
    """Run the server; return 0 if it was stopped, 1 if it crashed. Raises StartFailed."""
    if args.inference and args.model_repository:
        raise StartFailed("--inference and --model-repository are two ways to the models: pass one of them")
    if args.model_repository is not None and not args.model_repository.is_dir():
        raise StartFailed(f"there is no folder {args.model_repository}: pass --model-repository DIR")
    from oriel_logic.dev.session import Session
    from oriel_logic.dev.target import find
    from oriel_logic.settings import Settings

    target = find(args.target)
    grpc = [address(text, "--inference-grpc") for text in args.inference_grpc or ()]
    inference = tuple(address(text) for text in args.inference or ())
    session = Session(target, inference=inference, repository=args.model_repository)
    session.may_move = args.http_port is None
    settings = Settings(
        services=(target.root,),
        inference=session.addresses or (INFERENCE,),
        inference_grpc=session.grpc_addresses or tuple(grpc) or (INFERENCE_GRPC,),
        host=args.host,
        http_port=HTTP_PORT if args.http_port is None else args.http_port,
        admin_port=0,
        workers=worker_count(args.workers),
        drain_s=2.0,
        poll_s=0.1,
    )
    os.environ.setdefault("PYTHONUNBUFFERED", "1")  # so that output of workers appears at once
    return launch(settings, session)
