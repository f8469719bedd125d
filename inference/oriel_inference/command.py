"""`oriel inference`: flags to settings. Anything heavy is imported when the command runs.

tritonserver's spellings work as they are: what is honoured is here, what is not is in `flags`.
"""

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from oriel_inference.flags import add_foreign, settle
from oriel_wire.errors import StartFailed

if TYPE_CHECKING:
    from oriel_inference.settings import Settings

__all__ = ["add_arguments", "run"]

_log = logging.getLogger(__name__)

# Added to the time for finishing requests: threads and sessions have to end as well.
STOP_MARGIN_S = 5.0
# tritonserver's flags that are gRPC's own settings.
_GRPC = {
    "--grpc-keepalive-time": "grpc.keepalive_time_ms",
    "--grpc-keepalive-timeout": "grpc.keepalive_timeout_ms",
    "--grpc-keepalive-permit-without-calls": "grpc.keepalive_permit_without_calls",
    "--grpc-http2-max-pings-without-data": "grpc.http2.max_pings_without_data",
    "--grpc-http2-min-recv-ping-interval-without-data": "grpc.http2.min_ping_interval_without_data_ms",
    "--grpc-http2-max-ping-strikes": "grpc.http2.max_ping_strikes",
    "--grpc-max-connection-age": "grpc.max_connection_age_ms",
    "--grpc-max-connection-age-grace": "grpc.max_connection_age_grace_ms",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The unit's flags; tritonserver's spellings are accepted where the meaning is the same."""
    _add_models(parser)
    _add_ports(parser)
    _add_bounds(parser)
    _add_log(parser)
    add_foreign(parser)


def _add_models(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("models").add_argument
    add(
        "--model-repository",
        "--model-store",
        dest="model_repository",
        metavar="DIR|URL",
        type=_repository,
        action="append",
        required=True,
        help="folder of models, <model>/config.pbtxt and <model>/<version>/model.onnx, or the same in an object store: "
        "s3://bucket/prefix, gs://bucket/prefix, az://account/container/prefix (repeatable)",
    )
    add(
        "--model-cache",
        type=Path,
        default=None,
        metavar="DIR",
        help="where versions from object stores are kept, one server per folder (default: ~/.cache/oriel/models)",
    )
    add(
        "--model-cache-bytes",
        dest="max_cache_bytes",
        type=_bytes,
        default=32 << 30,
        metavar="N",
        help="bytes of that folder; what was not used for longest makes room, never what serves (default 32 GiB)",
    )
    add(
        "--access-log",
        default="",
        metavar="PATH",
        help="append one JSON line per request to this file, or to standard output for - (default: none)",
    )
    add(
        "--model-control-mode",
        type=str.lower,
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
        "--model-load-thread-count",
        type=_whole,
        default=0,
        metavar="N",
        help="models that are loaded at once, at most 16 (default: as many as cores, at least 2)",
    )
    add(
        "--exit-on-error",
        type=_switch,
        default=False,
        metavar="BOOL",
        help="end with code 2 if a model of the start cannot be loaded (default false: the others serve)",
    )
    add(
        "--strict-readiness",
        type=_readiness,
        default=True,
        metavar="BOOL",
        help="ready only while every model of the start serves (default true); false: once the first load has ended; "
        "any: then, if one model serves or the start had none",
    )
    add(
        "--disable-auto-complete-config",
        dest="strict_model_config",
        action="store_true",
        help="take no model whose configuration leaves inputs or outputs to the model file",
    )
    add("--strict-model-config", dest="strict_model_config", type=_switch, metavar="BOOL", help=argparse.SUPPRESS)
    add(
        "--backend-config",
        action="append",
        default=[],
        metavar="B,K=V",
        help="default of a backend, as onnxruntime,intra_op_thread_count=2 (also inter_op_thread_count, "
        "default-max-batch-size; repeatable)",
    )


def _add_ports(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("ports").add_argument
    add("--host", default="127.0.0.1", help="address of every port that has none of its own")
    for name, port in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        add(f"--{name}-port", type=int, default=port, metavar="N", help=f"default {port}; 0 takes any free port")
        add(f"--{name}-address", default=None, metavar="HOST", help=argparse.SUPPRESS)
        add(f"--allow-{name}", type=_switch, default=True, metavar="BOOL", help="false: the port is not opened")
    for flag, option in _GRPC.items():
        add(flag, dest=option, type=_whole, default=None, metavar="N", help=argparse.SUPPRESS)
    add(
        "--trusted-peer",
        dest="trusted_peers",
        action="append",
        metavar="NETWORK",
        help="address or network whose deadline and tier headers count (repeatable; default: loopback)",
    )
    add("--id", dest="server_id", default="oriel", metavar="NAME", help="name in the server's metadata (default oriel)")


def _add_bounds(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("bounds").add_argument
    add("--cores", type=int, default=0, metavar="N", help="cores that running batches share (default: all available)")
    add("--default-timeout-s", type=float, default=60.0, metavar="S", help="deadline of requests that bring none")
    add(
        "--max-body-bytes",
        "--http-max-input-size",
        dest="max_body_bytes",
        type=_whole,
        default=64 << 20,
        metavar="N",
        help="largest request (HTTP body or gRPC message)",
    )
    add("--max-queue-items", type=int, default=10_000, metavar="N", help="requests that may wait per model version")
    add("--max-queue-bytes", type=int, default=256 << 20, metavar="N", help="bytes of requests that may wait, likewise")
    add("--max-batch-bytes", type=int, default=64 << 20, metavar="N", help="bytes of the requests of one batch")
    add(
        "--exit-timeout-secs",
        type=_timeout,
        default=25.0,
        metavar="S",
        help="stop: how long requests in flight may take to finish (default 25)",
    )


def _add_log(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("log").add_argument
    add("--log-verbose", type=_level, metavar="N", help="above 0: debug lines as well")
    for name in ("info", "warning", "error"):
        add(f"--log-{name}", type=_switch, metavar="BOOL", help=f"{name} lines (default true)")
    add("--log-file", default="", metavar="FILE", help="append to this file instead of stderr")
    add("--log-format", choices=("default", "ISO8601"), help=argparse.SUPPRESS)


def _repository(text: str) -> Path | str:
    if "://" not in text:
        return Path(text)
    from oriel_inference.errors import LoadFailed
    from oriel_inference.stores.objects import location_of

    try:
        location_of(text)
    except LoadFailed as failure:
        raise argparse.ArgumentTypeError(failure.reason) from failure
    return text


def _bytes(text: str) -> int:
    number = int(text)
    if not 1 << 20 <= number < 1 << 50:
        raise argparse.ArgumentTypeError("must lie between 1048576 and 2**50")
    return number


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0.01 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError("must lie between 0.01 and 86400")
    return seconds


def _timeout(text: str) -> float:
    seconds = float(text)
    if not 0 <= seconds <= 86_400:
        raise argparse.ArgumentTypeError("must lie between 0 and 86400")
    return seconds


def _whole(text: str) -> int:
    number = int(text)
    if not 0 <= number < 2**31:
        raise argparse.ArgumentTypeError("must lie between 0 and 2147483647")
    return number


def _switch(text: str) -> bool:
    known = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}
    if text.lower() not in known:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is neither true nor false")
    return known[text.lower()]


def _readiness(text: str) -> bool | Literal["any"]:
    try:
        return "any" if text.lower() == "any" else _switch(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is neither true, false nor any") from error


def _level(text: str) -> int:
    return {"true": 1, "false": 0}[text.lower()] if text.lower() in ("true", "false") else _whole(text)


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop; the process's exit code. Raises StartFailed."""
    from oriel_wire.engine.large_messages import share_memory

    share_memory()  # before imports begin threads
    from oriel_inference.app import serve
    from oriel_inference.repository.defaults import from_backend_config
    from oriel_inference.settings import Settings, available_cores
    from oriel_wire.engine.process import configure_logging, log_to_file, run_unit

    warnings = list(settle(args.foreign))
    defaults, without_effect = from_backend_config(args.backend_config, auto_complete=not args.strict_model_config)
    wanted = {"log_verbose_level": args.log_verbose, "log_info": args.log_info, "log_warning": args.log_warning}
    wanted |= {"log_error": args.log_error, "log_format": args.log_format}
    options = {option: getattr(args, option) for option in _GRPC.values()}
    settings = Settings(
        repositories=tuple(args.model_repository),
        model_cache=args.model_cache,
        max_cache_bytes=args.max_cache_bytes,
        http_host=args.http_address or args.host,
        http_port=args.http_port if args.allow_http else None,
        grpc_host=args.grpc_address or args.host,
        grpc_port=args.grpc_port if args.allow_grpc else None,
        # As tritonserver: where HTTP is, unless it is said.
        metrics_host=args.metrics_address or args.http_address or args.host,
        metrics_port=args.metrics_port if args.allow_metrics else None,
        cores=args.cores or available_cores(),
        default_timeout_s=args.default_timeout_s,
        max_body_bytes=args.max_body_bytes,
        max_queue_items=args.max_queue_items,
        max_queue_bytes=args.max_queue_bytes,
        max_batch_bytes=args.max_batch_bytes,
        trusted_peers=tuple(args.trusted_peers or ("127.0.0.0/8", "::1")),
        drain_s=args.exit_timeout_secs,
        control_mode=args.model_control_mode,
        poll_s=args.repository_poll_secs,
        load_models=tuple(args.load_models or ()),
        strict_readiness=args.strict_readiness,
        exit_on_error=args.exit_on_error,
        server_id=args.server_id,
        log={name: value for name, value in wanted.items() if value is not None},
        log_file=args.log_file,
        grpc_options=tuple((option, value) for option, value in options.items() if value is not None),
        load_threads=args.model_load_thread_count,
        load_defaults=defaults,
        access_log=args.access_log,
    )
    _check(settings)
    configure_logging("inference")
    if settings.log_file:
        log_to_file(settings.log_file)
    for warning in (*warnings, *without_effect):
        _log.warning(warning)
    return run_unit(lambda stop: serve(settings, stop), unit="inference", grace_s=settings.drain_s + STOP_MARGIN_S)


def _check(settings: "Settings") -> None:
    if settings.load_models and settings.control_mode != "explicit":
        raise StartFailed("--load-model needs --model-control-mode explicit")
    if "*" in settings.load_models and len(set(settings.load_models)) > 1:
        raise StartFailed("--load-model '*' means all models: it must be the only --load-model")
    if settings.http_port is None and settings.grpc_port is None:
        raise StartFailed("neither HTTP nor gRPC is allowed: leave out --allow-http=false or --allow-grpc=false")
