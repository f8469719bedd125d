"""`oriel inference`: turns flags into settings. Heavy modules are imported when the command runs.

The spellings of tritonserver work as they are: the flags with an effect are here, the others in `flags`.
"""

import argparse
import os
from dataclasses import replace

from oriel_inference.flags import add_foreign, settle
from oriel_inference.host import available_cores
from oriel_inference.metrics_choice import from_metrics_config
from oriel_inference.repository.defaults import from_backend_config
from oriel_inference.settings import Settings
from oriel_inference.trace_config import read_flags
from oriel_wire.errors import StartFailed
from oriel_wire.process.flags import add_flags, values
from oriel_wire.process.shared_settings import usage_folder

# Added to the time for finishing requests, because threads and sessions have to end as well.
STOP_MARGIN_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the unit's flags; tritonserver's spellings are accepted where the meaning is the same."""
    add_flags(parser, Settings)
    add_foreign(parser)
    parser.set_defaults(as_triton=False)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; return the exit code of the process. Raises StartFailed."""
    from oriel_inference.app import serve
    from oriel_wire.process.logs import configure_logging, log_to_file
    from oriel_wire.process.process import run_unit

    warnings = list(settle(args.foreign))
    traces, unused = read_flags(args.trace_words)
    os.environ.update(traces.variables)
    defaults, without_effect = from_backend_config(args.backend_config, auto_complete=not args.strict_model_config)
    defaults = replace(defaults, custom_ops=args.custom_ops, config_name=args.config_name)
    wanted = {"log_verbose_level": args.log_verbose, "log_info": args.log_info, "log_warning": args.log_warning}
    form = None if args.log_format in ("text", "json") else args.log_format  # Triton's extension knows its own two
    wanted |= {"log_error": args.log_error, "log_format": form}
    # Vertex AI reaches its own port only.
    in_vertex, aip_port = os.environ.get("AIP_MODE") == "PREDICTION", os.environ.get("AIP_HTTP_PORT")
    chosen = values(Settings, args) | {
        "http_host": args.http_address or args.host,
        "http_port": _port(args.allow_http, not in_vertex, args.http_port),
        "sagemaker_port": _port(args.allow_sagemaker, False, args.sagemaker_port),
        "vertex_port": _port(args.allow_vertex_ai, in_vertex, args.vertex_port or aip_port),
        "grpc_host": args.grpc_address or args.host,
        "grpc_port": _port(args.allow_grpc, not in_vertex, args.grpc_port),
        # Like tritonserver: the address of HTTP unless it is given.
        "metrics_host": args.metrics_address or args.http_address or args.host,
        "metrics_port": _port(args.allow_metrics, True, args.metrics_port),
        "repositories": tuple(args.model_repository),
        "cores": args.cores or available_cores(),
        "log": {name: value for name, value in wanted.items() if value is not None},
        "load_defaults": defaults,
        "metrics": from_metrics_config(args.metrics_config),
        "usage_folder": usage_folder(args.usage),
        "as_triton": args.as_triton,
        "traces": traces,
        "without_effect": (*warnings, *unused, *without_effect),
    }
    settings = Settings(**chosen)
    _check(settings)
    configure_logging("inference")
    if settings.log_file:
        log_to_file(settings.log_file)
    return run_unit(lambda stop: serve(settings, stop), unit="inference", grace_s=settings.drain_s + STOP_MARGIN_S)


def import_ahead() -> None:
    """Import what a server of ONNX models needs, and start the process for its first check, which does the same."""
    import oriel_inference.app
    from oriel_inference.backends import find_backend
    from oriel_inference.errors import LoadFailed
    from oriel_inference.repository.check import start_ahead

    del oriel_inference
    start_ahead("onnxruntime")
    try:
        find_backend("onnxruntime")
    except LoadFailed:
        pass  # it is not installed: models of another backend may be served


def _port(allowed: bool | None, default: bool, port: int | str | None) -> int | None:
    if not (default if allowed is None else allowed):
        return None
    if isinstance(port, str) and not port.isdecimal():
        raise StartFailed(f"AIP_HTTP_PORT has to be the number of a port: {port[:80]!r}")
    return int(8080 if port is None else port)


def _check(settings: Settings) -> None:
    if settings.load_models and settings.control_mode not in ("explicit", "demand"):
        raise StartFailed("--load-model needs --model-control-mode explicit or demand")
    if "*" in settings.load_models and len(set(settings.load_models)) > 1:
        raise StartFailed("--load-model '*' means all models: it must be the only --load-model")
    ports = settings.http_port, settings.grpc_port, settings.sagemaker_port, settings.vertex_port
    if ports == (None, None, None, None):
        raise StartFailed("neither HTTP nor gRPC is allowed: leave out --allow-http=false or --allow-grpc=false")
