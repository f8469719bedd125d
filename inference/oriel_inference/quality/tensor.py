"""Reads and counts the sampled rows of one tensor, and compares the latest of them with the reference. Pure but for the
random choice of values that a new reference is made from.
"""

import math
from array import array
from collections import Counter, deque
from dataclasses import dataclass, field, fields

import numpy as np

from oriel_policies.quality.drift import BINS, MIN_BIN_ROWS, MIN_ROWS, counts, edges, noise, outwards, psi
from oriel_policies.quality.reference import MAX_CLASSES, TensorReference
from oriel_wire.observe.telemetry import Histogram
from oriel_wire.v2.messages import Array

MAX_VALUES = 4096  # values that are read of one tensor of one row: of a larger one, values at even distances
SUM_ERROR = 1e-3  # largest difference between the sum of a distribution and 1
SLOT_ROWS = 500
SLOTS = 10  # the window: the latest 4,500 to 5,000 rows
KEPT_VALUES = 4096  # values of a tensor that are kept to make a new reference
KEPT_PER_ROW = 4
CONFIDENCE: tuple[float, ...] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0)
ODD_KINDS = ("nan", "infinite", "out_of_range")


class Totals:
    """Counts of one tensor since the server started. odd: values by kind."""

    __slots__ = ("confidence", "odd")

    def __init__(self) -> None:
        self.odd: Counter[str] = Counter(dict.fromkeys(ODD_KINDS, 0))
        self.confidence = Histogram(CONFIDENCE)


@dataclass(slots=True)
class _Slot:
    """Counts of up to SLOT_ROWS rows that came one after the other.

    finite: values that are neither NaN nor infinite. total, squares: sums of their distances from the tensor's first
    value. classified: rows with classes; confidence, entropy: sums over them.
    """

    bins: Array = field(default_factory=lambda: np.zeros(BINS, np.int64))
    classes: Counter[int] = field(default_factory=Counter)
    odd: Counter[str] = field(default_factory=Counter)
    rows: int = 0
    values: int = 0
    finite: int = 0
    total: float = 0.0
    squares: float = 0.0
    classified: int = 0
    confidence: float = 0.0
    entropy: float = 0.0

    def add(self, other: "_Slot") -> None:
        for each in fields(self):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorState:
    """The latest rows of one tensor. Shares are None without values, psi and noise while too few rows are known.

    classes: index -> share of the rows, of classes with MIN_BIN_ROWS rows or more.
    """

    rows: int
    odd: dict[str, float] | None
    mean: float | None
    deviation: float | None
    confidence: float | None
    entropy: float | None
    classes: dict[int, float]
    psi: float | None
    noise: float | None


class TensorProfile:
    """The counts of one tensor.

    reference: the samples that they are compared with. logits: rows that are no distribution become one by softmax.
    """

    def __init__(
        self, totals: Totals, reference: TensorReference | None, *, logits: bool, random: np.random.Generator
    ) -> None:
        self._totals = totals
        self._reference = reference
        self._edges = np.asarray(reference.edges if reference is not None else (), np.float64)
        self._logits = logits
        self._random = random
        self._slots: deque[_Slot] = deque([_Slot()], maxlen=SLOTS)
        self._kept = array("d")
        self._offered = 0
        self._rows = 0
        self._range = (math.inf, -math.inf)
        self._origin: float | None = None

    def add(self, row: Array, *, may_be_classes: bool) -> None:
        """Count one row. row: FP64, not empty."""
        slot = self._slots[-1]
        if slot.rows >= SLOT_ROWS:
            slot = _Slot()
            self._slots.append(slot)
        slot.rows += 1
        self._rows += 1
        slot.values += row.size
        finite = row[np.isfinite(row)]
        odd = self._odd(row, finite)
        slot.odd.update(odd)
        self._totals.odd.update(odd)
        if not finite.size:
            return
        slot.finite += finite.size
        if self._origin is None:
            self._origin = float(finite[0])
        with np.errstate(over="ignore", invalid="ignore"):
            moved = finite - self._origin
            slot.total += float(moved.sum())
            slot.squares += float(np.square(moved).sum())
        if self._reference is not None and not self._reference.classes:
            found = np.searchsorted(self._edges, finite, side="right")
            slot.bins += np.bincount(found, minlength=BINS)
        self._keep(finite)
        if may_be_classes and finite.size == row.size:
            self._classify(slot, row)

    def _odd(self, row: Array, finite: Array) -> dict[str, int]:
        missing = row.size - finite.size
        nan = int(np.count_nonzero(np.isnan(row))) if missing else 0
        odd = {"nan": nan, "infinite": missing - nan}
        reference = self._reference
        if reference is not None and not reference.classes:
            outside = (finite < reference.low) | (finite > reference.high)
            odd["out_of_range"] = int(np.count_nonzero(outside))
        return odd

    def _classify(self, slot: _Slot, row: Array) -> None:
        distribution = probabilities(row, logits=self._logits)
        if distribution is None:
            return
        top = int(distribution.argmax())
        confidence = min(1.0, float(distribution[top]))
        slot.classified += 1
        slot.confidence += confidence
        slot.entropy += entropy(distribution)
        if top in slot.classes or len(slot.classes) < MAX_CLASSES:
            slot.classes[top] += 1
        self._totals.confidence.observe(confidence)

    def _keep(self, finite: Array) -> None:
        """Keep a sample of all values so far in memory, each equally likely, for a reference that may be asked for."""
        self._range = (min(self._range[0], float(finite.min())), max(self._range[1], float(finite.max())))
        for at in self._random.integers(0, finite.size, min(KEPT_PER_ROW, finite.size)).tolist():
            value = float(finite[at])
            self._offered += 1
            if len(self._kept) < KEPT_VALUES:
                self._kept.append(value)
            elif (place := int(self._random.integers(0, self._offered))) < KEPT_VALUES:
                self._kept[place] = value

    def state(self) -> TensorState:
        """Return what is known of the latest rows."""
        window = self._window()
        drift = self.drift()
        mean, deviation = self._moments(window)
        classified = window.classified
        return TensorState(
            rows=window.rows,
            odd={kind: window.odd[kind] / window.values for kind in ODD_KINDS} if window.values else None,
            mean=mean,
            deviation=deviation,
            confidence=window.confidence / classified if classified else None,
            entropy=window.entropy / classified if classified else None,
            classes={
                index: count / classified for index, count in sorted(window.classes.items()) if count >= MIN_BIN_ROWS
            },
            psi=None if drift is None else drift[0],
            noise=None if drift is None else drift[1],
        )

    def drift(self) -> tuple[float, float] | None:
        """Return the PSI of the latest rows and its noise; None without a reference, or while there are too few."""
        reference = self._reference
        if reference is None:
            return None
        window = self._window()
        if reference.classes:
            live: list[float] = [window.classes[int(index)] for index in reference.classes]
            rows = window.classified
            live.append(rows - sum(live))
            expected = (*reference.classes.values(), reference.rest)
        else:
            live, rows, expected = window.bins[: len(reference.shares)].tolist(), window.rows, reference.shares
        if rows < MIN_ROWS or sum(live) <= 0:
            return None
        return psi(live, expected), noise(len(live), rows, reference.rows)

    def reference(self) -> TensorReference | None:
        """Make a reference of the rows so far; None while there are too few."""
        window = self._window()
        if window.classified * 2 > window.rows:
            if window.classified < MIN_ROWS:
                return None
            common = {index: count for index, count in window.classes.items() if count >= MIN_BIN_ROWS}
            if not common:
                return None
            total = window.classified
            return TensorReference(
                rows=total,
                classes={str(index): count / total for index, count in sorted(common.items())},
                rest=(total - sum(common.values())) / total,
            )
        per_row = max(1, self._offered // max(1, self._rows))
        rows = min(self._rows, len(self._kept) // per_row)
        mean, deviation = self._moments(window)
        if rows < MIN_ROWS or mean is None or deviation is None:
            return None
        kept = sorted(self._kept)
        inner = edges(kept, rows)
        low, high = outwards(*self._range)
        return TensorReference(
            rows=rows,
            edges=tuple(inner),
            shares=tuple(count / len(kept) for count in counts(kept, inner)),
            low=low,
            high=high,
            mean=mean,
            deviation=deviation,
        )

    def _window(self) -> _Slot:
        found = _Slot()
        for slot in self._slots:
            found.add(slot)
        return found

    def _moments(self, window: _Slot) -> tuple[float | None, float | None]:
        if not window.finite or self._origin is None:
            return None, None
        mean = window.total / window.finite
        variance = max(0.0, window.squares / window.finite - mean * mean)
        found = self._origin + mean, math.sqrt(variance)
        return found if all(map(math.isfinite, found)) else (None, None)


def part_of(array: Array, row: int | None) -> Array:
    """Return a copy of up to MAX_VALUES values of one row, in one dimension. row: its index, or None if unbatched."""
    one = array if row is None else array[row]
    flat = np.asarray(one).flat
    return flat[:: max(1, -(-one.size // MAX_VALUES))]


def numbers(values: Array, datatype: str) -> Array:
    """Return the values as FP64; BF16 travels as its bits."""
    if datatype == "BF16":
        return (values.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return values.astype(np.float64)


def probabilities(values: Array, *, logits: bool) -> Array | None:
    """Return the distribution over classes that a row of an output is, None if it is none.

    values: FP64, at least two, all finite. A row of values from 0 to 1 whose sum is 1 is a distribution; with `logits`
    every other row becomes one by softmax.
    """
    if float(values.min()) >= 0.0 and abs(float(values.sum()) - 1.0) <= SUM_ERROR:
        return values
    if not logits:
        return None
    powers = np.exp(values - values.max())
    return np.asarray(powers / powers.sum())


def entropy(distribution: Array) -> float:
    """Return the entropy of a distribution in parts of the largest one that as many classes can have: 0 to 1."""
    positive = distribution[distribution > 0.0]
    found = -float((positive * np.log(positive)).sum()) / float(np.log(distribution.size))
    return min(1.0, max(0.0, found))
