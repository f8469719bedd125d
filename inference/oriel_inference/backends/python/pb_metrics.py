"""`pb_utils.MetricFamily` and its metrics: objects for what the server counts."""

from collections.abc import Mapping, Sequence
from enum import Enum
from math import isfinite

from oriel_inference.backends.python.messages import MakeMetric, UseMetric
from oriel_inference.backends.python.pb_errors import TritonModelException, checked_text
from oriel_inference.backends.python.runtime import current


class MetricKind(Enum):
    """The kind of a family."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


# The kinds of metrics that each method is for.
_KINDS = {"increment": "counter gauge", "value": "counter gauge", "set": "gauge", "observe": "histogram"}


class _Object:
    """An object of the model that stands for something in the server, and tells it of its end."""

    def __init__(self, kind: MetricKind) -> None:
        self.kind = kind
        self.runtime = current()
        self.handle = self.runtime.number()

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            # Not sent from here: this may run in any thread, even in the middle of a send of this thread.
            self.runtime.abandoned.put(UseMetric(0, self.handle, "delete"))


class MetricFamily(_Object):
    """A family of metrics. One of a name that exists already is the same family, with its first description."""

    COUNTER = MetricKind.COUNTER
    GAUGE = MetricKind.GAUGE
    HISTOGRAM = MetricKind.HISTOGRAM

    def __init__(self, name: str, description: str, kind: MetricKind) -> None:
        if not isinstance(kind, MetricKind):
            raise TritonModelException("the kind of a MetricFamily must be MetricFamily.COUNTER, GAUGE or HISTOGRAM")
        super().__init__(kind)
        name, text = checked_text(name, "the name of a MetricFamily"), checked_text(description, "a description")
        self.runtime.result(lambda number: MakeMetric(number, self.handle, 0, name, kind.value, text[:1000]))

    def Metric(self, labels: Mapping[str, str] | None = None, buckets: Sequence[float] | None = None) -> "Metric":
        """Return the metric with these labels. buckets: the upper bounds of a histogram's buckets, rising."""
        return Metric(self, labels or {}, buckets)


class Metric(_Object):
    """A metric; it disappears from the server with the last object that stands for it."""

    def __init__(self, family: MetricFamily, labels: Mapping[str, str], buckets: Sequence[float] | None) -> None:
        super().__init__(family.kind)
        self._family = family  # lives as long as its metrics
        given = {checked_text(name, "a label"): checked_text(value, "a label") for name, value in labels.items()}
        bounds = None if buckets is None else [_finite(bound) for bound in buckets]
        self.runtime.result(lambda number: MakeMetric(number, self.handle, family.handle, labels=given, buckets=bounds))

    def increment(self, value: float) -> None:
        """Add to a counter, which takes nothing negative, or to a gauge."""
        if self.kind is MetricKind.COUNTER and _finite(value) < 0.0:
            raise TritonModelException("increment: a counter never falls, so pass 0 or more")
        self._use("increment", value)

    def set(self, value: float) -> None:
        """Set a gauge."""
        self._use("set", value)

    def observe(self, value: float) -> None:
        """Count a value in a histogram."""
        self._use("observe", value)

    def value(self) -> float:
        """Return the value of a counter or gauge as the server has it, with what other instances have added."""
        return self._use("value")

    def _use(self, how: str, value: float = 0.0) -> float:
        if self.kind.value not in _KINDS[how]:
            raise TritonModelException(f"{how}: a {self.kind.value} does not support it")
        change = UseMetric(0, self.handle, how, _finite(value))
        if how != "value":
            self.runtime.send(change)
            return 0.0
        head = self.runtime.result(lambda number: UseMetric(number, self.handle, how))
        return float(head.parameters["value"])


def _finite(value: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = float("nan")
    if not isfinite(number):
        raise TritonModelException("the values of metrics, and bounds of buckets, must be finite numbers")
    return number
