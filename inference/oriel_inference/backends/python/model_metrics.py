"""The metrics that Python models define (`pb_utils.MetricFamily`). They live in the server, so that all instances and
versions of a model count together, and counters go on when a process starts again.

Owner: the loop.
"""

import re
from collections import Counter
from collections.abc import Iterable
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
class MetricFamily:
    """A family, with its metrics by their labels. model: the model that made it. holders: objects of processes that
    stand for it.
    """

    name: str
    model: str
    kind: str
    text: str
    series: dict[tuple[tuple[str, str], ...], "Series"] = field(default_factory=dict)
    holders: int = 0


@dataclass(slots=True, eq=False)
class Series:
    """A metric. model: the model that made it. holders: objects of processes that stand for it, and of those that have
    died.
    """

    family: MetricFamily
    model: str
    labels: dict[str, str]
    value: float | Histogram = 0.0
    holders: int = 0


class ModelMetrics:
    """All families by their names. made: the number of families and metrics that each model has made."""

    def __init__(self) -> None:
        self.families: dict[str, MetricFamily] = {}
        self.made: Counter[str] = Counter()

    def release(self, each: MetricFamily | Series) -> None:
        """Record that an object is gone, and delete what no process holds any more."""
        each.holders -= 1
        if isinstance(each, Series):
            if each.holders:
                return
            del each.family.series[tuple(each.labels.items())]
            self.made[each.model] -= 1
            each = each.family
        if not each.holders and not each.series:
            del self.families[each.name]
            self.made[each.model] -= 1


class Holdings:
    """The families and metrics for which one instance's process has objects, by the numbers of these objects.

    earlier: metrics of its processes that have died.
    """

    def __init__(self, metrics: ModelMetrics, model: str) -> None:
        self._metrics = metrics
        self._model = model
        self.held: dict[int, MetricFamily | Series] = {}
        self.earlier: set[Series] = set()

    def make(self, message: MakeMetric) -> None:
        """Give the process the object that it asks for. Raises InvalidRequest."""
        if max(self._metrics.made[self._model], len(self.held)) >= MAX_METRICS:
            raise InvalidRequest(f"model {quoted(self._model)} has {MAX_METRICS} metric families and metrics already")
        family = self.held.get(message.family)
        found = self._series(message, family) if isinstance(family, MetricFamily) else self._family(message)
        found.holders += 1
        self.held[message.handle] = found

    def _family(self, message: MakeMetric) -> MetricFamily:
        if not _NAME.match(message.name):
            rule = "it must have letters, digits, '_' and ':' only, and not begin with a digit, nv_ or oriel_"
            raise InvalidRequest(f"metric family {quoted(message.name)}: {rule}")
        text = message.text.replace("\\", r"\\").replace("\n", r"\n")
        found = self._metrics.families.get(message.name)
        if found is None:
            found = MetricFamily(message.name, self._model, message.kind, text)
            self._metrics.families[message.name] = found
            self._metrics.made[self._model] += 1
        if found.kind != message.kind:
            raise InvalidRequest(f"metric family {quoted(message.name)} already exists as a {found.kind}: rename it")
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
        key = tuple(labels.items())
        if key not in family.series:
            value = 0.0 if buckets is None else Histogram(tuple(buckets))
            family.series[key] = Series(family, self._model, labels, value)
            self._metrics.made[self._model] += 1
        return family.series[key]

    def use(self, message: UseMetric) -> float:
        """Change or delete a metric, and return its value, 0 without one. The process has checked what is allowed."""
        found = self.held.get(message.handle)
        if found is not None and message.how == "delete":
            self._metrics.release(self.held.pop(message.handle))
        if not isinstance(found, Series) or message.how == "delete":
            return 0.0
        if isinstance(found.value, Histogram):
            found.value.observe(message.value)
            return 0.0
        found.value = message.value if message.how == "set" else found.value + message.value
        return found.value

    def process_died(self) -> None:
        """Keep the metrics until the next process is ready."""
        for each in self.held.values():
            if isinstance(each, Series) and each not in self.earlier:
                each.holders += 1
                self.earlier.add(each)
        self._release(self.held.values())
        self.held = {}

    def process_ready(self) -> None:
        """Delete the gauges that the new process has not made: nobody sets them. Counters and histograms stay."""
        gauges = {each for each in self.earlier if each.family.kind == "gauge"}
        self.earlier -= gauges
        self._release(gauges)

    def close(self) -> None:
        """Release everything, because the instance is gone."""
        self._release([*self.held.values(), *self.earlier])
        self.held, self.earlier = {}, set()

    def _release(self, gone: Iterable[MetricFamily | Series]) -> None:
        for each in gone:
            self._metrics.release(each)
