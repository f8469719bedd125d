"""Takes sampled rows from executed batches, and counts them in a thread of its own.

A batch costs one comparison of its model's row counter. About one row in `sample_every` is copied on the loop, at most
RATE a second of one model, and put into a bounded queue; what does not fit is dropped and counted. The thread rests
nine times as long as it works, so that it takes at most a tenth of a core. It has no lower priority for the kernel: a
thread that holds the interpreter's lock and gets no processor would hold up the loop.
"""

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from math import inf
from queue import SimpleQueue
from typing import TypeGuard

import numpy as np

from oriel_inference.backends.device_tensor import on_host
from oriel_inference.batching.call import Call
from oriel_inference.batching.statistics import Statistics
from oriel_inference.model import ModelSpec, TensorSpec
from oriel_inference.quality.tensor import MAX_VALUES, TensorProfile, TensorState, Totals, numbers, part_of
from oriel_policies.quality.reference import MAX_TENSORS, Reference, TensorReference
from oriel_wire.v2.messages import Array

_log = logging.getLogger(__name__)

RATE = 10
PER_BATCH = 8
QUEUE_ROWS = 256
MAX_VERSIONS = 256
RESTS = 9.0  # times as long as it works
REST_S = 0.05  # at most
LOGITS_KEY = "oriel.quality.logits"
SAMPLE_RESULTS = ("counted", "dropped", "limited")

# (tensor, its values, whether they are a whole row of one dimension, which may be a distribution) of one row.
Row = list[tuple[str, Array, bool]]


class QualityThread:
    """Counts the sampled rows of all versions, in a thread that starts with the first of them.

    `put` is called on the loop, `close` when the loop puts nothing more.
    """

    def __init__(self) -> None:
        self._rows: SimpleQueue[tuple[VersionQuality, Row] | None] = SimpleQueue()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def put(self, of: "VersionQuality", row: Row) -> bool:
        """Queue one row; return False if the queue is full."""
        if self._rows.qsize() >= QUEUE_ROWS:
            return False
        self._rows.put((of, row))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="oriel-quality", daemon=True)
            self._thread.start()
        return True

    def close(self, timeout_s: float = 1.0) -> None:
        """End the thread; rows that are still queued are not counted."""
        self._stop.set()
        self._rows.put(None)
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _work(self) -> None:
        while (found := self._rows.get()) is not None and not self._stop.is_set():
            began = time.monotonic()
            found[0].count(found[1])
            del found
            self._stop.wait(min(REST_S, RESTS * (time.monotonic() - began)))


class VersionQuality:
    """The samples of one version. `offer` and `fail` are called on the loop and by the thread, the rest by any.

    reference: the samples that its tensors are compared with; None without one.
    put: queues a row to be counted; returns False if there is no room.
    totals: counts to continue, of an earlier load of the version. samples: rows by what became of them.
    """

    def __init__(
        self,
        spec: ModelSpec,
        reference: Reference | None,
        put: Callable[["VersionQuality", Row], bool],
        *,
        before: "VersionQuality | None" = None,
        now: Callable[[], float] = time.monotonic,
        seed: int | None = None,
    ) -> None:
        self.spec = spec
        self.has_reference = reference is not None
        self.samples: Counter[str] = before.samples if before is not None else Counter(dict.fromkeys(SAMPLE_RESULTS, 0))
        self.totals: dict[str, Totals] = before.totals if before is not None else {}
        self._put = put
        self._now = now
        self._random = random.Random(seed)
        self._second_s = -inf
        self._in_second = 0
        self._failed = False
        self._lock = threading.Lock()
        self._types: dict[str, str] = {}
        self._profiles: dict[str, TensorProfile] = {}
        known: Mapping[str, TensorReference] = reference.tensors if reference is not None else {}
        values = np.random.default_rng(seed)
        logits = logits_of(spec)
        tensors = {each.name: each for each in (*spec.outputs, *spec.inputs)}
        for name in [name for name, each in tensors.items() if each.datatype != "BYTES"][:MAX_TENSORS]:
            totals = self.totals.setdefault(name, Totals())
            self._types[name] = tensors[name].datatype
            self._profiles[name] = TensorProfile(totals, known.get(name), logits=name in logits, random=values)

    def first(self, inferences: int) -> float:
        """Return the number of the first row to sample, after this number of rows was executed."""
        return inferences + self._step() if self._profiles else inf

    def offer(
        self,
        spec: ModelSpec | None,
        inferences: float,
        at: float,
        calls: Sequence[Call],
        shares: Sequence[Sequence[Array]],
    ) -> float:
        """Sample rows of a batch, and return the number of the next row to sample. Rows of a version are numbered.

        Never raises, because answers wait.

        spec: the specification of the load that ran the batch. Batches of an earlier load are not sampled.
        inferences: the number of the batch's last row. at: the number of the first row to sample, at most `inferences`.
        """
        if spec is not self.spec:
            return at
        try:
            return self._offer(inferences, calls, shares, at)
        except Exception:
            self.fail()
            return inf

    def _offer(self, inferences: float, calls: Sequence[Call], shares: Sequence[Sequence[Array]], at: float) -> float:
        now = self._now()
        if now - self._second_s >= 1.0:
            self._second_s, self._in_second = now, 0
        first = inferences - sum(call.rows for call in calls) + 1
        at = max(at, first)  # the row may have been one of the load before, which is not sampled any more
        for _ in range(PER_BATCH):
            if self._in_second >= RATE:
                self.samples["limited"] += 1
                break
            self._in_second += 1
            if not self._put(self, self._row(int(at - first), calls, shares)):
                self.samples["dropped"] += 1
            at += self._step()
            if at > inferences:
                return at
        return inferences + self._step()

    def _row(self, position: int, calls: Sequence[Call], shares: Sequence[Sequence[Array]]) -> Row:
        """Copy the row with this number in the batch."""
        found = 0
        while found < len(calls) - 1 and position >= calls[found].rows:
            position -= calls[found].rows
            found += 1
        call, outputs = calls[found], shares[found]
        row = min(position, call.rows - 1) if self.spec.batched else None
        pairs = [(each, call.inputs.get(each.name)) for each in self.spec.inputs]
        counted = [(each.name, array) for each, array in pairs if self._counts(array, each)]
        copied = [(name, part_of(on_host(array), row), False) for name, array in counted]
        for each, array in zip(self.spec.outputs, outputs, strict=False):
            if self._counts(array, each) and (row is None or array.shape[:1] == (call.rows,)):
                whole = array.shape[-1] if array.ndim > (0 if row is None else 1) else 1
                size = array.size // array.shape[0] if row is not None else array.size
                copied.append((each.name, part_of(on_host(array), row), 2 <= whole == size <= MAX_VALUES))
        return copied

    def _counts(self, array: Array | None, tensor: TensorSpec) -> TypeGuard[Array]:
        return array is not None and array.size > 0 and tensor.name in self._types

    def count(self, row: Row) -> None:
        """Count one row; never raises, because the thread has to live."""
        try:
            with self._lock:
                self.samples["counted"] += 1
                for name, values, may_be_classes in row:
                    datatype = self._types[name]
                    floating = datatype in ("FP16", "FP32", "FP64", "BF16")
                    self._profiles[name].add(numbers(values, datatype), may_be_classes=may_be_classes and floating)
        except Exception:
            self.fail()

    def fail(self) -> None:
        """Report the error that is being handled, once."""
        if not self._failed:
            self._failed = True
            _log.exception("model %s: a sampled row could not be counted", self.spec.name)

    def states(self) -> dict[str, TensorState]:
        """Return what is known of the latest rows, by tensor, of tensors that had any."""
        with self._lock:
            found = {name: each.state() for name, each in self._profiles.items()}
        return {name: state for name, state in found.items() if state.rows}

    def drift(self) -> dict[str, tuple[float, float]]:
        """Return PSI and noise of the tensors of which they are known."""
        with self._lock:
            found = {name: each.drift() for name, each in self._profiles.items()}
        return {name: each for name, each in found.items() if each is not None}

    def reference(self, made: str) -> Reference | None:
        """Make a reference of the rows so far; None while there are too few. made: the time, as text.

        Sorts the values that are kept of each tensor, so that it is not called on the loop.
        """
        tensors: dict[str, TensorReference] = {}
        for name, each in self._profiles.items():
            with self._lock:  # for one tensor at a time, because the loop may wait for it
                found = each.reference()
            if found is not None:
                tensors[name] = found
        if not tensors:
            return None
        return Reference(model=self.spec.name, version=str(self.spec.version), made=made, tensors=tensors)

    def _step(self) -> int:
        """Return a distance to the next row: `sample_every` on average, and random, so that no rhythm is met."""
        every = self.spec.sample_every
        return self._random.randint(1, 2 * every - 1)


def logits_of(spec: ModelSpec) -> set[str]:
    """Return the outputs that have classes without being distributions: those with labels, and those configured."""
    named = {name.strip() for name in spec.parameters.get(LOGITS_KEY, "").split(",")}
    return {each.name for each in spec.outputs if each.labels or each.name in named}


class Quality:
    """The samples of the versions of a server. Single writer: the loop.

    is_serving: says if a version serves. Beyond max_versions, versions that do not serve any more are forgotten, and if
    there are none, a new one is not sampled.
    """

    def __init__(self, is_serving: Callable[[str, int], bool], *, max_versions: int = MAX_VERSIONS) -> None:
        self._is_serving = is_serving
        self._max_versions = max_versions
        self._known: dict[tuple[str, int], tuple[Statistics, VersionQuality]] = {}
        self.thread = QualityThread()

    def open(self, spec: ModelSpec, statistics: Statistics, reference: Reference | None) -> None:
        """Sample a version that is about to serve, if its configuration does not say otherwise."""
        key = (spec.name, spec.version)
        _, before = self._known.pop(key, (None, None))
        statistics.offer, statistics.sample_at = None, inf
        if not spec.sample_every or not self._makes_room():
            return
        made = VersionQuality(spec, reference, self.thread.put, before=before)
        self._known[key] = statistics, made
        statistics.offer, statistics.sample_at = made.offer, made.first(statistics.inferences)

    def of(self, name: str, version: int) -> VersionQuality | None:
        """Return the samples of a version; None if it is not sampled."""
        found = self._known.get((name, version))
        return None if found is None else found[1]

    def _makes_room(self) -> bool:
        if len(self._known) < self._max_versions:
            return True
        gone = next((key for key in self._known if not self._is_serving(*key)), None)
        if gone is None:
            return False
        statistics, _ = self._known.pop(gone)
        statistics.offer, statistics.sample_at = None, inf
        return True
