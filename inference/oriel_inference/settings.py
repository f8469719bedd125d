"""The settings of an inference server, with the flags of `oriel inference` in their metadata.

tritonserver's spellings are honoured where the meaning is the same. `oriel_inference.flags` lists those that are not.
"""

import argparse
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from oriel_inference.metrics_choice import MetricsChoice
from oriel_inference.repository.defaults import LoadDefaults
from oriel_inference.servers.forwarded_headers import header_pattern
from oriel_inference.servers.restrictions import GRPC_PREFIX, Restriction, restriction_flag
from oriel_inference.trace_config import TraceStart, trace_flags
from oriel_policies.upstreams.model_memory import YOUNG_LOADS, YOUNG_S
from oriel_wire.objects.client import Location
from oriel_wire.process.flags import Flag, Group, flags, number, switch
from oriel_wire.process.shared_settings import LOOPBACK, object_store, trusted_peer_flag, usage_flag, usage_store_flag

_DEVICE = re.compile(r"host|gpu[0-9]{1,3}")
_CLASS = re.compile(r"[a-z0-9][a-z0-9_-]{0,31}")
MODELS, PORTS, BOUNDS, LOG, USAGE = map(Group, ("models", "ports", "bounds", "log", "usage"))
_whole = number(int, 0, 2**31 - 1)
_whole_bytes = number(int, 1, (1 << 50) - 1)
_cache_size = number(int, 0, (1 << 50) - 1)


def _repository(text: str) -> Path | str:
    if "://" not in text:
        return Path(text)
    from oriel_wire.objects.client import location_of
    from oriel_wire.objects.errors import BadStoreUrl

    try:
        location_of(text)
    except BadStoreUrl as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _folder(text: str) -> Path:
    if not (path := Path(text).expanduser()).is_dir():
        raise argparse.ArgumentTypeError(f"{text[:200]!r} is not a folder")
    return path


def _readiness(text: str) -> bool | Literal["any"]:
    try:
        return "any" if text.lower() == "any" else switch(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is neither true, false nor any") from error


def _level(text: str) -> int:
    level: int = {"true": 1, "false": 0}[text.lower()] if text.lower() in ("true", "false") else _whole(text)
    return level


def _device_class(text: str) -> tuple[str, str]:
    device, given, name = text.partition("=")
    if not given or not _DEVICE.fullmatch(device) or not _CLASS.fullmatch(name):
        raise argparse.ArgumentTypeError(
            f"{text[:40]!r} is not of the form host=CLASS or gpu0=CLASS (a-z, 0-9, - and _)"
        )
    return device, name


def _rate_limited(text: str) -> bool:
    if text.lower() not in ("off", "execution_count"):
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is neither execution_count nor off")
    return text.lower() != "off"


def _resource(text: str) -> tuple[tuple[str, int | None], int]:
    name, _, numbers = text.partition(":")
    count, given, device = numbers.partition(":")
    try:
        return (name, _whole(device) if given else None), _whole(count)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not of the form NAME:COUNT or NAME:COUNT:DEVICE") from None


def _local_cache(text: str) -> int:
    name, _, size = text.partition(",size=")
    if name != "local":
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not local,size=BYTES, and the server has no other cache")
    return int(_cache_size(size))


def _listener(name: str, port: int) -> int | None:
    number = PORTS.flag(f"--{name}-port", help=f"default {port}; 0 takes any free port")
    address = PORTS.flag(f"--{name}-address", dest=f"{name}_address", metavar="HOST", help=argparse.SUPPRESS)
    allow = PORTS.flag(f"--allow-{name}", dest=f"allow_{name}", type=switch, help="false: the port is not opened")
    return field(default=port, metadata=flags(number, address, allow))


def _cloud(name: str, cloud: str) -> int | None:
    allow, text = f"allow_{name.replace('-', '_')}", f"true: also serve the paths of containers of {cloud}"
    port = PORTS.flag(f"--{name}-port", type=int, metavar="N", help="default 8080")
    return field(default=None, metadata=flags(PORTS.flag(f"--allow-{name}", dest=allow, type=switch, help=text), port))


def _restrict(flag: str, what: str, prefix: str = "") -> tuple[Restriction, ...]:
    text = f"callers of these groups have to send the {'metadata ' + prefix if prefix else 'header '}KEY (repeatable)"
    kind = restriction_flag(what, prefix)
    return PORTS.setting((), flag, type=kind, action="append", metavar="GROUP,..:KEY=VALUE", help=text)


def _forward(flag: str) -> re.Pattern[str] | None:
    text = "headers whose names match this regular expression become parameters of the request"
    return PORTS.setting(None, flag, type=header_pattern, metavar="REGEX", help=text)


def _pem(flag: str, text: str) -> Path | None:
    return PORTS.setting(None, flag, type=Path, metavar="FILE", help=text)


def _log(name: str) -> dict[str, tuple[Flag, ...]]:
    return LOG.flag(f"--log-{name}", dest=f"log_{name}", type=switch, help=f"{name} lines (default true)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The help of each flag describes its field; this is the rest. Bounds of the queues are per model version.

    repositories: folders, and URLs of object stores as text. model_cache: a folder; None for the user's.
    http_port, grpc_port, metrics_port: 0 takes any free port, None opens none.
    cores: cores that running batches share. max_batch_bytes: a single request may have more.
    load_models: the models of the start in control modes "explicit" and "demand"; "*" loads all. load_threads: 0 lets
    the server choose.
    strict_readiness: True, False, or "any"; see the flag. access_log: a path, "-" for standard output, "" for none.
    log: the logging settings that differ from their defaults.
    check_timeout_s: time to open one model file in the process that tries it first.
    usage_folder: folder for usage records; None records none. usage_store, artefact_store: URLs; None for none.
    without_effect: one sentence for each flag that is accepted and does nothing.
    as_triton: True if the log also has the lines by which scripts see that Triton has started.
    young_s, young_loads: a model stays in memory for the longer of young_s and that many times its load.
    """

    repositories: tuple[Path | str, ...] = field(
        metadata=MODELS.flag(
            "--model-repository",
            "--model-store",
            dest="model_repository",
            metavar="DIR|URL",
            type=_repository,
            action="append",
            required=True,
            help="folder of models, <model>/config.pbtxt and <model>/<version>/model.onnx, or the same in an object "
            "store: s3://bucket/prefix, gs://bucket/prefix, az://account/container/prefix (repeatable)",
        )
    )
    model_cache: Path | None = MODELS.setting(
        None,
        "--model-cache",
        metavar="DIR",
        help="where versions from object stores are kept, one server per folder (default: ~/.cache/oriel/models)",
    )
    max_cache_bytes: int = MODELS.setting(
        32 << 30,
        "--model-cache-bytes",
        type=number(int, 1 << 20, (1 << 50) - 1),
        help="size limit of that folder; the least recently used versions are removed, never those that serve "
        "(default 32 GiB)",
    )
    links_to: tuple[Path, ...] = MODELS.setting(
        (),
        "--allow-links-to",
        type=_folder,
        metavar="DIR",
        help="links of repositories in folders may lead into this folder, such as ~/.cache/huggingface (repeatable)",
    )
    artefact_folder: Path | None = MODELS.setting(
        None,
        "--artefact-folder",
        metavar="DIR",
        help="where compiled artefacts of models with oriel.compile are kept; servers may share it (default: "
        "~/.cache/oriel/artefacts)",
    )
    max_artefact_bytes: int = MODELS.setting(
        16 << 30,
        "--artefact-folder-bytes",
        type=_whole_bytes,
        help="size limit of that folder; the least recently used artefacts are removed, never those in use here "
        "(default 16 GiB)",
    )
    artefact_store: Location | None = MODELS.setting(
        None,
        "--artefact-store",
        type=object_store,
        metavar="URL",
        help="object store through which servers that share no folder share their artefacts: "
        "s3://bucket/prefix, gs://bucket/prefix, az://account/container/prefix (default: none)",
    )
    artefact_build_s: float = MODELS.setting(
        600.0,
        "--artefact-build-secs",
        type=number(float, 1, 86_400),
        help="time for one build, and for one check of its outputs (default 600)",
    )
    artefact_build_bytes: int = MODELS.setting(
        0,
        "--artefact-build-memory",
        type=_whole_bytes,
        help="address space of the process that builds or checks (default: 2 GiB and 8 times the model's files)",
    )
    access_log: str = MODELS.setting(
        "",
        "--access-log",
        metavar="PATH",
        help="append one JSON line per request to this file, or to standard output for - (default: none)",
    )
    control_mode: str = MODELS.setting(
        "none",
        "--model-control-mode",
        type=str.lower,
        choices=("none", "poll", "explicit", "demand"),
        help="none: load everything at start; poll: also follow changes; explicit: load on request only; demand: "
        "load a model when the first call for it comes, and follow changes",
    )
    model_memory_bytes: int = MODELS.setting(
        0,
        "--model-memory-budget",
        type=_whole_bytes,
        help="bytes of memory for all models; those on demand are taken out of memory for one another (default: no "
        "limit)",
    )
    gpu_memory_bytes: int = MODELS.setting(
        0,
        "--gpu-model-memory-budget",
        type=_whole_bytes,
        help="the same for the memory of each GPU (default: no limit)",
    )
    poll_s: float = MODELS.setting(
        15.0,
        "--repository-poll-secs",
        type=number(float, 0.01, 86_400),
        help="time between scans in modes poll and demand; a change counts when a second scan finds the same files",
    )
    namespacing: bool = MODELS.setting(
        False,
        "--model-namespacing",
        help="true: repositories may hold models of the same name, which are then called NAME@1 for the first "
        "repository and so on; ensembles prefer models of their own repository (default false)",
    )
    load_models: tuple[str, ...] = MODELS.setting(
        (),
        "--load-model",
        metavar="NAME",
        help="modes explicit and demand: load this model at start (repeatable; * for all)",
    )
    load_threads: int = MODELS.setting(
        0,
        "--model-load-thread-count",
        type=_whole,
        help="models that are loaded at once, at most 16 (default: as many as cores, at least 2)",
    )
    rate_limited: bool = MODELS.setting(
        False,
        "--rate-limit",
        type=_rate_limited,
        metavar="MODE",
        help="execution_count: instances run only while they hold the resources of their rate_limiter (default off)",
    )
    rate_limit_resources: tuple[tuple[tuple[str, int | None], int], ...] = MODELS.setting(
        (),
        "--rate-limit-resource",
        type=_resource,
        metavar="NAME:COUNT[:DEVICE]",
        help="count of a resource, on each device or on one; one that is global has the largest count that is given "
        "(repeatable; default: what the instance that needs most asks for)",
    )
    exit_on_error: bool = MODELS.setting(
        False,
        "--exit-on-error",
        help="end with code 2 if a model of the start cannot be loaded (default false: the others serve)",
    )
    strict_readiness: bool | Literal["any"] = MODELS.setting(
        True,
        "--strict-readiness",
        type=_readiness,
        metavar="BOOL",
        help="ready only while every model of the start serves (default true); false: once the first load has "
        "ended; any: then, if one model serves or the start had none",
    )
    load_defaults: LoadDefaults = field(
        default_factory=LoadDefaults,
        metadata=flags(
            MODELS.flag(
                "--disable-auto-complete-config",
                dest="strict_model_config",
                action="store_true",
                help="refuse models whose configuration leaves out inputs or outputs",
            ),
            MODELS.flag("--strict-model-config", dest="strict_model_config", type=switch, help=argparse.SUPPRESS),
            MODELS.flag(
                "--backend-config",
                dest="backend_config",
                action="append",
                default=[],
                metavar="B,K=V",
                help="default of a backend, as onnxruntime,intra_op_thread_count=2 (also inter_op_thread_count, "
                "default-max-batch-size; tensorrt,version-compatible=true lets plans carry code; repeatable)",
            ),
            MODELS.flag("--allow-custom-ops", dest="custom_ops", type=_folder, metavar="DIR", help="custom operators"),
            MODELS.flag("--model-config-name", dest="config_name", default="", help="read configs/NAME.pbtxt"),
        ),
    )
    http_host: str = PORTS.setting(
        "127.0.0.1",
        "--host",
        dest="host",
        default="127.0.0.1",
        help="address of every port without an address flag of its own",
    )
    http_port: int | None = _listener("http", 8000)
    grpc_host: str = "127.0.0.1"
    grpc_port: int | None = _listener("grpc", 8001)
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = _listener("metrics", 8002)
    metrics: MetricsChoice = field(
        default=MetricsChoice(),
        metadata=PORTS.flag(
            "--metrics-config",
            dest="metrics_config",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="latencies on the metrics port: counter_latencies, histogram_latencies (default true), "
            "summary_latencies (default false), summary_quantiles=0.5:0.05,0.99:0.001 (repeatable)",
        ),
    )
    sagemaker_port: int | None = _cloud("sagemaker", "SageMaker")
    vertex_port: int | None = _cloud("vertex-ai", "Vertex AI")
    vertex_model: str = PORTS.setting("", "--vertex-ai-default-model", metavar="NAME", help="default: the only model")
    gpu_metrics: bool = PORTS.setting(
        True,
        "--allow-gpu-metrics",
        help="false: the metrics port does not show the load of GPUs (default true)",
    )
    client_shm: bool = PORTS.setting(
        False,
        "--allow-client-shm",
        help="true: clients on this machine may exchange tensors through files under /dev/shm that the server's user "
        "may read and write (default false)",
    )
    http_restrictions: tuple[Restriction, ...] = _restrict("--http-restricted-api", "api")
    grpc_restrictions: tuple[Restriction, ...] = _restrict("--grpc-restricted-protocol", "protocol", GRPC_PREFIX)
    http_header_pattern: re.Pattern[str] | None = _forward("--http-header-forward-pattern")
    grpc_header_pattern: re.Pattern[str] | None = _forward("--grpc-header-forward-pattern")
    reuse_http: bool = PORTS.setting(False, "--reuse-http-port", help="true: share it with other servers")
    reuse_grpc: bool = PORTS.setting(False, "--reuse-grpc-port", help="true: share it with other servers")
    grpc_tls: bool = PORTS.setting(False, "--grpc-use-ssl", help="true: gRPC over TLS 1.2 or later")
    grpc_mutual_tls: bool = PORTS.setting(
        False, "--grpc-use-ssl-mutual", help="true: also demand a certificate of --grpc-root-cert's"
    )
    grpc_cert: Path | None = _pem("--grpc-server-cert", "certificate chain of the gRPC port, PEM")
    grpc_key: Path | None = _pem("--grpc-server-key", "its key, PEM; both are reloaded when they change")
    grpc_authority: Path | None = _pem("--grpc-root-cert", "authority that signed the certificates of clients, PEM")
    grpc_max_age_ms: int | None = PORTS.setting(
        None,
        "--grpc-max-connection-age",
        type=_whole,
        metavar="MS",
        help="age at which the client of a gRPC connection is asked to open another (default: none)",
    )
    trusted_peers: tuple[str, ...] = field(default=LOOPBACK, metadata=trusted_peer_flag(PORTS))
    server_id: str = PORTS.setting(
        "oriel", "--id", metavar="NAME", help="name in the server's metadata (default oriel)"
    )
    cores: int = BOUNDS.setting(
        1,
        "--cores",
        default=0,
        help="cores that running batches share (default: all available)",
    )
    default_timeout_s: float = BOUNDS.setting(60.0, "--default-timeout-s", help="deadline of requests that set none")
    max_body_bytes: int = BOUNDS.setting(
        64 << 20,
        "--max-body-bytes",
        "--http-max-input-size",
        type=_whole,
        help="largest request (HTTP body or gRPC message)",
    )
    max_queue_items: int = BOUNDS.setting(
        10_000,
        "--max-queue-items",
        help="requests that may wait per model version",
    )
    max_queue_bytes: int = BOUNDS.setting(
        256 << 20,
        "--max-queue-bytes",
        help="bytes of requests that may wait per model version",
    )
    max_batch_bytes: int = BOUNDS.setting(64 << 20, "--max-batch-bytes", help="bytes of the requests of one batch")
    cache_bytes: int = field(
        default=0,
        metadata=flags(
            BOUNDS.flag(
                "--cache-config",
                type=_local_cache,
                metavar="local,size=N",
                help="response cache of N bytes for models with response_cache { enable: true } (default: none)",
            ),
            BOUNDS.flag("--response-cache-byte-size", type=_cache_size, help=argparse.SUPPRESS),
        ),
    )
    drain_s: float = BOUNDS.setting(
        25.0,
        "--exit-timeout-secs",
        type=number(float, 0, 86_400),
        help="stop: how long requests in flight may take to finish (default 25)",
    )
    log: Mapping[str, bool | int | str] = field(
        default_factory=dict,
        metadata=flags(
            LOG.flag(
                "--log-verbose",
                dest="log_verbose",
                type=_level,
                metavar="N",
                help="above 0: debug lines as well",
            ),
            _log("info"),
            _log("warning"),
            _log("error"),
        ),
    )
    log_file: str = field(
        default="",
        metadata=flags(
            LOG.flag("--log-file", metavar="FILE", help="append to this file instead of stderr"),
            LOG.flag(
                "--log-format",
                dest="log_format",
                choices=("default", "ISO8601", "text", "json"),
                help="lines for people, or JSON (default: ORIEL_LOG_FORMAT, else text; Triton's two names mean text)",
            ),
        ),
    )
    traces: TraceStart = field(default_factory=TraceStart, metadata=trace_flags(LOG))
    device_classes: tuple[tuple[str, str], ...] = BOUNDS.setting(
        (),
        "--device-class",
        type=_device_class,
        metavar="DEVICE=CLASS",
        help="the class for which a device has a price: host=c7i or gpu0=h100 (repeatable; default: cpu, gpu)",
    )
    usage_folder: Path | None = field(default=None, metadata=usage_flag(USAGE))
    usage_store: Location | None = field(default=None, metadata=usage_store_flag(USAGE))
    without_effect: tuple[str, ...] = ()
    as_triton: bool = False
    check_timeout_s: float = 60.0
    young_s: float = YOUNG_S
    young_loads: float = YOUNG_LOADS
