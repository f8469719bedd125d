"""The metrics that Python models define (`pb_utils.MetricFamily`). They live in the server, so that all instances and
versions of a model count together, and counters go on when a process starts again.

Owner: the loop.
"""

import re
from dataclasses import dataclass, field

from oriel_inference.backends.python.messages import MakeMetric, UseMetric
from oriel_inference.errors import InvalidRequest
from oriel_wire.observe.telemetry import Histogram
from oriel_wire.v2.datatypes import quoted

MAX_METRICS = 1000
MAX_LABELS = 16
MAX_LABEL = 256
MAX_BUCKETS = 64
_NAME = re.compile(r"(?!nv_|oriel_)[a-zA-Z_:][a-zA-Z0-9_:]{0,199}\Z")
_LABEL = re.compile(r"(?!__|le\Z)[a-zA-Z_][a-zA-Z0-9_]{0,99}\Z")


@dataclass(slots=True, eq=False)
class Series:
    """A metric. model: the model that made it."""

    kind: str
    model: str
    labels: dict[str, str]
    value: float | Histogram = 0.0


@dataclass(slots=True, eq=False)
class MetricFamily:
    """A family, with its metrics by their labels. model: the model that made it."""

    name: str
    model: str
    kind: str
    text: str
    series: dict[tuple[tuple[str, str], ...], Series] = field(default_factory=dict)


class ModelMetrics:
    """All families by their names."""

    def __init__(self) -> None:
        self.families: dict[str, MetricFamily] = {}
        self.holdings: set[Holdings] = set()

    def sweep(self) -> None:
        """Delete what no process holds any more."""
        held = {each for found in self.holdings for each in (*found.held.values(), *found.earlier)}
        for name, family in list(self.families.items()):
            family.series = {key: each for key, each in family.series.items() if each in held}
            if not family.series and family not in held:
                del self.families[name]


class Holdings:
    """The families and metrics for which one instance's process has objects, by the numbers of these objects.

    earlier: metrics of its processes that have died.
    """

    def __init__(self, metrics: ModelMetrics, model: str) -> None:
        self._metrics = metrics
        self._model = model
        self.held: dict[int, MetricFamily | Series] = {}
        self.earlier: set[Series] = set()
        metrics.holdings.add(self)

    def make(self, message: MakeMetric) -> None:
        """Give the process the object that it asks for. Raises InvalidRequest."""
        made: list[MetricFamily | Series] = []
        for each in self._metrics.families.values():
            made += each, *each.series.values()
        if max(sum(each.model == self._model for each in made), len(self.held)) >= MAX_METRICS:
            raise InvalidRequest(f"model {quoted(self._model)} has {MAX_METRICS} metric families and metrics already")
        family = self.held.get(message.family)
        found = self._series(message, family) if isinstance(family, MetricFamily) else self._family(message)
        self.held[message.handle] = found

    def _family(self, message: MakeMetric) -> MetricFamily:
        if not _NAME.match(message.name):
            rule = "it must have letters, digits, '_' and ':' only, and not begin with a digit, nv_ or oriel_"
            raise InvalidRequest(f"metric family {quoted(message.name)}: {rule}")
        text = message.text.replace("\\", r"\\").replace("\n", r"\n")
        made = MetricFamily(message.name, self._model, message.kind, text)
        found = self._metrics.families.setdefault(message.name, made)
        if found.kind != message.kind:
            raise InvalidRequest(f"metric family {quoted(message.name)} already exists as a {found.kind}")
        return found

    def _series(self, message: MakeMetric, family: MetricFamily) -> Series:
        labels, buckets = dict(sorted(message.labels.items())), message.buckets
        problem = ""
        if len(labels) > MAX_LABELS or not all(map(_LABEL.match, labels)):
            problem = f"at most {MAX_LABELS} labels with valid names are allowed"
        elif any(len(value) > MAX_LABEL for value in labels.values()):
            problem = f"a label has more than {MAX_LABEL} characters"
        elif (family.kind == "histogram") == (buckets is None):
            problem = "buckets belong to a histogram, and each histogram has them"
        elif buckets and (buckets != sorted(set(buckets)) or len(buckets) > MAX_BUCKETS):
            problem = f"buckets must rise, and be {MAX_BUCKETS} at most"
        if problem:
            raise InvalidRequest(f"metric {quoted(family.name)}: {problem}")
        value = 0.0 if buckets is None else Histogram(tuple(buckets))
        return family.series.setdefault(tuple(labels.items()), Series(family.kind, self._model, labels, value))

    def use(self, message: UseMetric) -> float:
        """Change or delete a metric, and return its value, 0 without one. The process has checked what is allowed."""
        if message.how == "delete":
            self.held.pop(message.handle, None)
            self._metrics.sweep()
        found = self.held.get(message.handle)
        if not isinstance(found, Series):
            return 0.0
        if isinstance(found.value, Histogram):
            found.value.observe(message.value)
            return 0.0
        found.value = message.value if message.how == "set" else found.value + message.value
        return found.value

    def process_died(self) -> None:
        """Keep the metrics until the next process is ready."""
        self.earlier.update(each for each in self.held.values() if isinstance(each, Series))
        self.held = {}
        self._metrics.sweep()

    def process_ready(self) -> None:
        """Delete the gauges that the new process has not made: nobody sets them. Counters and histograms stay."""
        self.earlier = {each for each in self.earlier if each.kind != "gauge"}
        self._metrics.sweep()

    def close(self) -> None:
        """Release everything, because the instance is gone."""
        self._metrics.holdings.discard(self)
        self._metrics.sweep()
