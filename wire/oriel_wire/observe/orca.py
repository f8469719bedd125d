"""ORCA load reports as header values: a server reports its load in the answer to a request that asks for it.

The request names a form in `endpoint-load-metrics-format` (`text`, `json`); the answer's `endpoint-load-metrics` is
`TEXT named_metrics.queue_depth=12` or `JSON {"named_metrics": {"queue_depth": 12}}`. Fields are those of
xds.data.orca.v3.OrcaLoadReport; the forms are the ones Triton and Envoy write and read.
"""

import re
from collections.abc import Mapping
from math import isfinite

import msgspec

LOAD_FORMAT = "endpoint-load-metrics-format"
LOAD_METRICS = "endpoint-load-metrics"
MAX_BYTES = 4096
MAX_METRICS = 64

_FORMATS = {"text": "TEXT", "http": "TEXT", "json": "JSON"}
_NAMED = "named_metrics"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.:/-]{0,127}\Z")


def report_form(wanted: str) -> str:
    """The value of `endpoint-load-metrics-format` -> "TEXT" or "JSON"; "" if it is neither."""
    return _FORMATS.get(wanted.strip().lower(), "")


def encode_report(named: Mapping[str, float], form: str) -> str:
    """The header's value for metrics under names of the server's choice; `form` as `report_form` gives it.

    Raises ValueError for names, values or sizes that the form cannot express.
    """
    if len(named) > MAX_METRICS:
        raise ValueError(f"a load report may have at most {MAX_METRICS} metrics")
    for name, value in named.items():
        if not _NAME.match(name) or not isfinite(value):
            raise ValueError(f"{name!r} cannot be reported")
    if form == "JSON":
        text = "JSON " + msgspec.json.encode({_NAMED: dict(named)}).decode()
    else:
        text = "TEXT " + ", ".join(f"{_NAMED}.{name}={value!r}" for name, value in named.items())
    if len(text) > MAX_BYTES:
        raise ValueError(f"a load report may have at most {MAX_BYTES} bytes")
    return text
