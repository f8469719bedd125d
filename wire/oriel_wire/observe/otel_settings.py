"""Reads OpenTelemetry's environment variables: where spans go, what describes this process, which traces are kept."""

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote
from uuid import UUID, uuid4, uuid5

from oriel_wire.distribution import installed_version
from oriel_wire.errors import StartFailed
from oriel_wire.observe.sampling import Sampling
from oriel_wire.process.flags import split_url

__all__ = [
    "BUFFER_VARIABLE",
    "COLLECTOR_VARIABLES",
    "Collector",
    "Queue",
    "collector_of",
    "queue_of",
    "resource_of",
    "sampling_of",
]

BUFFER_VARIABLE = "ORIEL_TRACE_BUFFER"
COLLECTOR_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
DEFAULT_RATIO = 0.01
MAX_QUEUED_SPANS = 16384
MAX_QUEUED_LIMIT = 1 << 20
COLLECTOR_DELAY_S = 1.0
EXPORT_TIMEOUT_S = 10.0
_PROTOCOLS = {"http/protobuf": False, "http/json": True}
_COMPRESSIONS = {"gzip": True, "none": False}
_POD_UID = "k8s.pod.uid"
_INSTANCES = UUID("4d63009a-8d0f-11ee-aad7-4c796ed8e320")  # OpenTelemetry's namespace of service.instance.id

Environ = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Collector:
    """An OTLP/HTTP receiver. url: the receiver's URL with its path. timeout_s: seconds allowed for one request with all
    its retries.
    """

    url: str
    json: bool
    gzip: bool
    headers: Mapping[str, str]
    timeout_s: float
    tls: ssl.SSLContext | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Queue:
    """Bounds of the queue to one receiver. delay_s: seconds in which spans are gathered for one request."""

    max_spans: int = MAX_QUEUED_SPANS
    delay_s: float = COLLECTOR_DELAY_S


def collector_of(environ: Environ = os.environ) -> Collector | None:
    """Return the collector that the environment names, or None. Raises StartFailed if it cannot be used."""
    if _is_disabled(environ) or not _exports(environ):
        return None
    url = environ.get(COLLECTOR_VARIABLES[1], "")
    if not url:
        base = environ.get(COLLECTOR_VARIABLES[0], "")
        if not base:
            return None
        url = f"{base.rstrip('/')}/v1/traces"
    parts = split_url(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise StartFailed(
            f"the collector's address is not http(s)://HOST[:PORT]: fix OTEL_EXPORTER_OTLP_ENDPOINT ({url})"
        )
    protocol = _option(environ, "PROTOCOL") or "http/protobuf"
    if protocol == "grpc":
        raise StartFailed(
            "spans are not sent over gRPC: set OTEL_EXPORTER_OTLP_PROTOCOL to http/protobuf or http/json, and the "
            "endpoint to the collector's port for HTTP, usually 4318"
        )
    if protocol not in _PROTOCOLS:
        raise StartFailed(f"OTEL_EXPORTER_OTLP_PROTOCOL is neither http/protobuf nor http/json: {protocol}")
    compression = _option(environ, "COMPRESSION") or "gzip"
    if compression not in _COMPRESSIONS:
        raise StartFailed(f"OTEL_EXPORTER_OTLP_COMPRESSION is neither gzip nor none: {compression}")
    return Collector(
        url=url,
        json=_PROTOCOLS[protocol],
        gzip=_COMPRESSIONS[compression],
        headers=_pairs(_option(environ, "HEADERS")),
        timeout_s=_milliseconds(environ, "OTEL_EXPORTER_OTLP_TIMEOUT", _option(environ, "TIMEOUT"), EXPORT_TIMEOUT_S),
        tls=_tls(environ) if parts.scheme == "https" else None,
    )


def queue_of(environ: Environ = os.environ) -> Queue:
    """Return the bounds of the queue. Raises StartFailed if they are not numbers."""
    most = environ.get("OTEL_BSP_MAX_QUEUE_SIZE", "")
    if most and not (most.isascii() and most.isdigit() and 0 < int(most) <= MAX_QUEUED_LIMIT):
        raise StartFailed(f"OTEL_BSP_MAX_QUEUE_SIZE is not a number of spans from 1 to {MAX_QUEUED_LIMIT}: {most}")
    delay = environ.get("OTEL_BSP_SCHEDULE_DELAY", "")
    return Queue(
        max_spans=int(most or MAX_QUEUED_SPANS),
        delay_s=_milliseconds(environ, "OTEL_BSP_SCHEDULE_DELAY", delay, COLLECTOR_DELAY_S),
    )


def resource_of(unit: str, environ: Environ = os.environ) -> dict[str, str]:
    """Return the attributes that describe this process. unit: "gateway", "logic" or "inference".

    OTEL_RESOURCE_ATTRIBUTES adds to them and replaces them, and OTEL_SERVICE_NAME replaces the name. The id of the
    instance follows from the uid of the pod, where that is among the attributes.
    """
    given = _pairs(environ.get("OTEL_RESOURCE_ATTRIBUTES", ""))
    name = environ.get("OTEL_SERVICE_NAME", "") or given.get("service.name", f"oriel-{unit}")
    pod = given.get(_POD_UID, "")
    instance = uuid5(_INSTANCES, f"{pod}.{name}") if pod else uuid4()
    return {
        "service.namespace": "oriel",
        "service.version": installed_version(),
        "service.instance.id": str(instance),
        "oriel.unit": unit,
        **given,
        "service.name": name,
    }


def sampling_of(environ: Environ = os.environ) -> Sampling:
    """Return how traces that begin here are sampled. Raises StartFailed.

    Without OTEL_TRACES_SAMPLER the decision of a caller is kept and 1 trace of 100 that begin here; under `oriel up`,
    whose trace buffer is set, each of them.
    """
    name = environ.get("OTEL_TRACES_SAMPLER", "") or "parentbased_traceidratio"
    kind = name.removeprefix("parentbased_")
    ratios = {"always_on": 1.0, "always_off": 0.0, "traceidratio": _ratio(environ)}
    if kind not in ratios:
        raise StartFailed(
            f"OTEL_TRACES_SAMPLER is {name}: always_on, always_off and traceidratio are known, also with "
            "parentbased_ before them"
        )
    return Sampling.by_ratio(ratios[kind], parent_based=kind != name)


def buffer_of(environ: Environ = os.environ) -> str:
    """Return the address of the supervisor's trace buffer; "" if there is none."""
    return "" if _is_disabled(environ) else environ.get(BUFFER_VARIABLE, "")


def _ratio(environ: Environ) -> float:
    given = environ.get("OTEL_TRACES_SAMPLER_ARG", "")
    if not given:
        return 1.0 if environ.get(BUFFER_VARIABLE) or environ.get("OTEL_TRACES_SAMPLER") else DEFAULT_RATIO
    try:
        ratio = float(given)
    except ValueError:
        ratio = -1.0
    if not 0.0 <= ratio <= 1.0:
        raise StartFailed(f"OTEL_TRACES_SAMPLER_ARG is not a share of traces from 0 to 1: {given}")
    return ratio


def _is_disabled(environ: Environ) -> bool:
    return environ.get("OTEL_SDK_DISABLED", "").lower() == "true"


def _exports(environ: Environ) -> bool:
    names = {name.strip() for name in environ.get("OTEL_TRACES_EXPORTER", "otlp").split(",") if name.strip()}
    if not names <= {"otlp", "none"}:
        raise StartFailed(f"OTEL_TRACES_EXPORTER is neither otlp nor none: {', '.join(sorted(names))}")
    return "none" not in names


def _option(environ: Environ, name: str) -> str:
    """Return a setting of the exporter: the one for traces before the one for all signals."""
    return environ.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}", "") or environ.get(f"OTEL_EXPORTER_OTLP_{name}", "")


def _pairs(text: str) -> dict[str, str]:
    """Read `name=value,name=value`, values percent-encoded; what is not such a pair is left out."""
    pairs = (part.partition("=") for part in text.split(","))
    return {name.strip(): unquote(value.strip()) for name, found, value in pairs if found and name.strip()}


def _milliseconds(environ: Environ, name: str, given: str, otherwise_s: float) -> float:
    if not given:
        return otherwise_s
    if not (given.isascii() and given.isdigit() and 0 < int(given) <= 3_600_000):
        raise StartFailed(f"{name} is not a number of milliseconds from 1 to 3600000: {given}")
    return int(given) / 1000.0


def _tls(environ: Environ) -> ssl.SSLContext:
    authorities, chain, key = (_option(environ, name) for name in ("CERTIFICATE", "CLIENT_CERTIFICATE", "CLIENT_KEY"))
    try:
        context = ssl.create_default_context(cafile=authorities or None)
        if chain:
            context.load_cert_chain(chain, key or None)
    except (OSError, ssl.SSLError) as error:
        names = "OTEL_EXPORTER_OTLP_CERTIFICATE, ..._CLIENT_CERTIFICATE, ..._CLIENT_KEY"
        raise StartFailed(f"a certificate for the collector cannot be used ({names}): {error}") from error
    return context
