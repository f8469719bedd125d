"""ORCA load reports as header values: a server reports its load in the answer to a request that asks for it.

The request names a form in `endpoint-load-metrics-format` (`text`, `json`); the answer's `endpoint-load-metrics` is
`TEXT cpu_utilization=0.3, named_metrics.queue_depth=12` or `JSON {"named_metrics": {"queue_depth": 12}}`. Fields are
those of xds.data.orca.v3.OrcaLoadReport; the forms are the ones Triton and Envoy write and read.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import msgspec

from oriel_wire.errors import BadMessage

LOAD_FORMAT = "endpoint-load-metrics-format"
LOAD_METRICS = "endpoint-load-metrics"
MAX_BYTES = 4096
MAX_METRICS = 64

_FORMATS = {"text": "TEXT", "http": "TEXT", "json": "JSON"}
_SCALARS = frozenset({"application_utilization", "cpu_utilization", "mem_utilization", "rps_fractional", "eps"})
_NAMED = "named_metrics"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.:/-]{0,127}\Z")
_NUMBER = re.compile(r"-?[0-9]{1,20}(?:\.[0-9]{1,20})?(?:[eE][+-]?[0-9]{1,3})?\Z")
_decode = msgspec.json.Decoder(dict[str, Any]).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadReport:
    """A load report. load: OrcaLoadReport's own figures by name (utilisations as fractions, rates per second), not
    negative.

    named: metrics under names of the server's choice. Every value is finite.
    """

    load: Mapping[str, float] = field(default_factory=dict)
    named: Mapping[str, float] = field(default_factory=dict)


def report_form(wanted: str) -> str:
    """The value of `endpoint-load-metrics-format` -> "TEXT" or "JSON"; "" if it is neither."""
    return _FORMATS.get(wanted.strip().lower(), "")


def encode_report(report: LoadReport, form: str) -> str:
    """The header's value; `form` as `report_form` gives it. Raises ValueError for names or sizes that the form
    cannot express.
    """
    if len(report.load) + len(report.named) > MAX_METRICS:
        raise ValueError(f"a load report has at most {MAX_METRICS} metrics")
    for name, value in (*report.load.items(), *report.named.items()):
        if not _NAME.match(name) or not isfinite(value):
            raise ValueError(f"{name!r} cannot be reported")
    if form == "JSON":
        text = "JSON " + msgspec.json.encode({**report.load, _NAMED: dict(report.named)}).decode()
    else:
        pairs = [f"{name}={value!r}" for name, value in report.load.items()]
        pairs += [f"{_NAMED}.{name}={value!r}" for name, value in report.named.items()]
        text = "TEXT " + ", ".join(pairs)
    if len(text) > MAX_BYTES:
        raise ValueError(f"a load report has at most {MAX_BYTES} bytes")
    return text


def parse_report(value: str) -> LoadReport:
    """Parse either form. Unknown fields are ignored. Raises BadMessage."""
    if len(value) > MAX_BYTES:
        raise BadMessage(f"the load report is longer than {MAX_BYTES} bytes")
    form, _, body = value.partition(" ")
    if form not in ("TEXT", "JSON"):
        raise BadMessage("the load report is neither TEXT nor JSON")
    load: dict[str, float] = {}
    named: dict[str, float] = {}
    for count, (name, number) in enumerate(_json_pairs(body) if form == "JSON" else _text_pairs(body)):
        if count >= MAX_METRICS:
            raise BadMessage(f"the load report has more than {MAX_METRICS} metrics")
        group, dot, rest = name.partition(".")
        inside, key = (named, rest) if group == _NAMED and dot else (load, name)
        if not _NAME.match(key) or not isfinite(number):
            raise BadMessage("a metric of the load report is malformed")
        if key in inside:
            raise BadMessage("the load report names a metric twice")
        if inside is named or (key in _SCALARS and number >= 0.0):
            inside[key] = number
        elif key in _SCALARS:
            raise BadMessage(f"the load report's {key} is negative")
    return LoadReport(load=load, named=named)


def _text_pairs(body: str) -> Iterator[tuple[str, float]]:
    for pair in body.split(",") if body.strip() else ():
        name, equals, number = pair.strip(" \t").partition("=")
        if not equals or not _NUMBER.match(number):
            raise BadMessage("a metric of the load report is malformed")
        yield name, float(number)


def _json_pairs(body: str) -> Iterator[tuple[str, float]]:
    try:
        document = _decode(body)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise BadMessage("the load report is not a JSON object") from error
    for name, value in document.items():
        if isinstance(value, dict):
            # Unknown maps are recognised by the first part of their names, as in the text form.
            yield from ((f"{name}.{key}", _number(number)) for key, number in value.items())
        elif name != _NAMED:
            yield name, _number(value)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadMessage("a metric of the load report is not a number")
    try:
        return float(value)
    except OverflowError as error:
        raise BadMessage("a metric of the load report is out of range") from error
