"""Trace settings as texts: those of the trace extension, and `--trace-config` with the older flags that it replaced."""

from argparse import SUPPRESS
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from os import environ

from oriel_inference.errors import InvalidRequest
from oriel_wire.errors import StartFailed
from oriel_wire.observe.otel_settings import COLLECTOR_VARIABLES
from oriel_wire.process.flags import Flag, Group, flags

Setting = tuple[str, ...] | int

LEVELS = ("TIMESTAMPS", "TENSORS")
DEFAULTS: dict[str, Setting] = {"trace_level": (), "trace_rate": 1000, "trace_count": -1, "log_frequency": 0}
MODES = ("triton", "opentelemetry")
_RANGES = {"trace_rate": (0, 2**32 - 1), "trace_count": (-1, 2**31 - 1), "log_frequency": (0, 2**32 - 1)}
_NAMES = {"level": "trace_level", "rate": "trace_rate", "count": "trace_count", "log-frequency": "log_frequency"}
_VARIABLES = {
    "url": COLLECTOR_VARIABLES[1],
    "resource": "OTEL_RESOURCE_ATTRIBUTES",
    "bsp_max_queue_size": "OTEL_BSP_MAX_QUEUE_SIZE",
    "bsp_schedule_delay": "OTEL_BSP_SCHEDULE_DELAY",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceStart:
    """The trace settings of the start.

    mode: "triton" writes `file`, "opentelemetry" exports spans.
    values: the settings by their names in the extension.
    variables: the environment of the exporter of spans.
    """

    mode: str = MODES[0]
    file: str = ""
    values: dict[str, Setting] = field(default_factory=DEFAULTS.copy)
    variables: Mapping[str, str] = field(default_factory=dict)


def trace_flags(group: Group) -> dict[str, tuple[Flag, ...]]:
    """Return the flags, whose values `read_flags` reads."""
    text = (
        "traces, as triton,file=PATH or opentelemetry,url=URL, level=TIMESTAMPS, rate=N (repeatable; docs/tracing.md)"
    )
    found = [group.flag("--trace-config", dest="trace_words", action="append", default=[], metavar="K=V", help=text)]
    for name in ("file", *_NAMES):
        word = f"{name}={{}}".format
        found.append(group.flag(f"--trace-{name}", dest="trace_words", action="append", type=word, help=SUPPRESS))
    return flags(*found)


def read_setting(name: str, texts: Sequence[str]) -> Setting:
    """Return the value of a setting. Raises InvalidRequest with Triton's sentences."""
    if name == "trace_level":
        levels = {text.upper() for text in texts}
        if unknown := levels - {*LEVELS, "OFF"}:
            raise InvalidRequest(f"trace_level {min(unknown)[:64]!r} is none of OFF, {', '.join(LEVELS)}")
        if "OFF" in levels and len(levels) > 1:
            raise InvalidRequest("Expect only one trace level 'OFF' is specified")
        return tuple([level for level in LEVELS if level in levels])
    if len(texts) != 1:
        raise InvalidRequest(f"expect only 1 value for '{name}'")
    text, (low, high) = texts[0], _RANGES[name]
    if not (text.isascii() and text.removeprefix("-").isdigit() and len(text) <= 20):
        raise InvalidRequest(f"Unable to parse '{name}', got: {text[:64]}")
    number = int(text)
    if not low <= number <= high:
        raise InvalidRequest(f"Unable to parse '{name}', value is out of range [ {low}, {high} ], got: {number}")
    return number


def read_flags(words: Iterable[str]) -> tuple[TraceStart, list[str]]:
    """Return the settings in values of `--trace-config`, and one warning for each that has no effect.

    Triton's clients write `rate=100`, `triton,file=PATH` and `opentelemetry,url=URL`. Raises StartFailed.
    """
    found: dict[str, list[str]] = {}
    for setting in ",".join(words).split(","):
        key, _, text = setting.strip().partition("=")
        if key not in (*MODES, ""):
            found.setdefault(key, []).append(text)
    mode, file = found.pop("mode", [MODES[0]])[-1], found.pop("file", [""])[-1]
    if mode not in MODES:
        raise StartFailed(f"--trace-config mode={mode[:40]} is neither triton nor opentelemetry")
    variables = {_VARIABLES[key]: ",".join(found.pop(key)) for key in _VARIABLES if key in found}
    if (url := variables.get(_VARIABLES["url"], "")) and "://" not in url:
        variables[_VARIABLES["url"]] = f"http://{url}"
    if own := variables.get(_VARIABLES["resource"]):
        variables[_VARIABLES["resource"]] = ",".join(filter(None, [environ.get(_VARIABLES["resource"]), own]))
    values, spans = dict(DEFAULTS), mode == "opentelemetry"
    read = found.keys() & ({"level", "rate"} if spans else _NAMES.keys())
    try:
        for key in read:
            texts = found.pop(key)
            values[_NAMES[key]] = read_setting(_NAMES[key], texts if key == "level" else texts[-1:])
    except InvalidRequest as error:
        raise StartFailed(f"--trace-config: {error.message}") from error
    if spans and "level" in read and not values["trace_level"]:
        variables["OTEL_SDK_DISABLED"] = "true"
    if spans and "rate" in read and isinstance(rate := values["trace_rate"], int):
        variables["OTEL_TRACES_SAMPLER_ARG"] = str(1 / max(1, rate))
    if not spans and values["trace_level"] and not file:
        found["level"] = []
    warnings = [f"--trace-config {key[:64]}=... has no effect: see docs/tracing.md" for key in sorted(found)]
    return TraceStart(mode=mode, file=file, values=values, variables=variables), warnings
