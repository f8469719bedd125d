"""Joins the arrays of several requests into one batch, and splits the result. Pure, except for `execute`, which blocks
in the runtime.
"""

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from oriel_inference.backends import Session
from oriel_inference.backends.device_tensor import Memory, joined_on, usable_on
from oriel_inference.batching.call import BatchTimes, Call
from oriel_inference.batching.device import Device
from oriel_inference.batching.ragged import ragged_inputs, scattered
from oriel_inference.errors import BackendFailed, DeadlineExceeded, InferenceError
from oriel_inference.model import ModelSpec, TensorSpec
from oriel_wire.v2.messages import Array

_log = logging.getLogger(__name__)


def concatenate(
    parts: Sequence[Mapping[str, Array]],
    inputs: Sequence[TensorSpec],
    *,
    batched: bool,
    memory: Memory | None = None,
) -> dict[str, Array]:
    """Stack requests along their first axis.

    parts: per request, name -> [rows, ...].
    Ragged inputs of several requests are left out.
    memory: the allocator of the device whose tensors the session takes as they are; None if it takes only arrays of the
    host. Returns name -> [sum(rows), ...] in the shape that the runtime expects, aligned and contiguous. A single
    request is passed on without a copy where its memory allows. So are requests that are consecutive rows of one array:
    the output of an ensemble's step for a whole batch goes into the next step as it is.
    """
    batch: dict[str, Array] = {}
    for spec in inputs:
        name = spec.name
        if name not in parts[0] or (spec.ragged and len(parts) > 1):
            continue
        if len(parts) == 1:
            array = parts[0][name]
            if not array.flags.aligned:
                # A view of a body may start at any address, and runtimes may read whole words.
                array = usable_on(array, memory)
        else:
            arrays = [part[name] for part in parts]
            rejoined = _rejoined(arrays)
            if rejoined is not None:
                array = rejoined
            else:
                array = np.concatenate(arrays) if memory is None else joined_on(arrays, memory)
        if spec.engine_dims is not None:
            array = array.reshape((array.shape[0], *spec.engine_dims) if batched else spec.engine_dims)
        batch[name] = array
    return batch


def _rejoined(arrays: Sequence[Array]) -> Array | None:
    """Return the array whose consecutive rows these arrays are, from the first to the last; None if they are not."""
    first = arrays[0]
    base = first.base
    if arrays[1].base is not base or not isinstance(base, np.ndarray) or not first.nbytes:
        return None
    if base.shape[1:] != first.shape[1:] or base.dtype != first.dtype or not base.flags.carray:
        return None
    start = following = _address(first)
    for array in arrays:
        if array.base is not base or array.shape[1:] != first.shape[1:] or array.dtype != first.dtype:
            return None
        if _address(array) != following or not array.flags.c_contiguous:
            return None
        following += array.nbytes
    row = (start - _address(base)) // (first.nbytes // first.shape[0])
    found: Array = base[row : row + sum([array.shape[0] for array in arrays])]
    return found


def _address(array: Array) -> int:
    address: int = array.__array_interface__["data"][0]
    return address


def split(
    arrays: Sequence[Array], outputs: Sequence[TensorSpec], sizes: Sequence[int], *, batched: bool
) -> list[list[Array]]:
    """Undo `concatenate`: return each request's rows of every output.

    arrays: per output [sum(sizes), ...].
    sizes: rows per request, in batch order.
    The result holds views, not copies. Raises BackendFailed if an output's first axis is not sum(sizes).
    """
    if not batched:
        return [[reshaped(array, spec, 0) for array, spec in zip(arrays, outputs, strict=True)]]
    total = sum(sizes)
    shares: list[list[Array]] = [[] for _ in sizes]
    for array, spec in zip(arrays, outputs, strict=True):
        if not array.ndim or array.shape[0] != total:
            rows = array.shape[0] if array.ndim else "no"
            raise BackendFailed(f"output {spec.name[:64]!r} has {rows} rows for a batch of {total}")
        array = reshaped(array, spec, total)
        start = 0
        for share, size in zip(shares, sizes, strict=True):
            share.append(array[start : start + size])
            start += size
    return shares


def reshaped(array: Array, spec: TensorSpec, rows: int) -> Array:
    """Return an output as clients see it, with the configuration's `reshape` undone. rows: 0 without a batch
    dimension.
    """
    if spec.engine_dims is None:
        return array
    return array.reshape((rows, *spec.dims) if rows else spec.dims)


def reshaped_if_it_fits(array: Array, spec: TensorSpec, *, batched: bool) -> Array:
    """Do what `reshaped` does for an output that may have any shape: where its elements do not fit, it is left as it
    is.
    """
    if spec.engine_dims is None:
        return array
    try:
        return array.reshape((*array.shape[:1], *spec.dims) if batched else spec.dims)
    except ValueError:
        return array


Outcome = tuple[list[list[Array]], BatchTimes] | InferenceError
Results = list[tuple[Sequence[Call], Outcome]]


def execute(
    session: Session,
    spec: ModelSpec,
    names: Sequence[str],
    calls: Sequence[Call],
    now: Callable[[], float],
    device: Device,
) -> Results:
    """Run `calls` as one batch on `device`; blocks and never raises.

    A call whose deadline has passed or whose caller has left is not executed. If the batch fails, it is executed again
    in halves until the failing calls are alone, so that the bad values of one caller fail nobody else. One bad call
    among n costs at most 2 * log2(n) additional executions; n bad calls cost n - 1 executions more than running them
    one by one.
    """
    return _part(lambda part: _run(session, spec, names, part, now, device), calls, now)[0]


def _halves(run: Callable[[Sequence[Call]], Outcome], calls: Sequence[Call], now: Callable[[], float]) -> Results:
    """Return the results of at least two calls that failed together."""
    middle = len(calls) // 2
    results, failed = _part(run, calls[:middle], now)
    second = calls[middle:]
    if failed or len(second) == 1:
        return results + _part(run, second, now)[0]
    # The first half succeeded, so the error is in the second half, which need not be tried as a whole.
    return results + _halves(run, second, now)


def _part(
    run: Callable[[Sequence[Call]], Outcome], calls: Sequence[Call], now: Callable[[], float]
) -> tuple[Results, bool]:
    """Return the results of some calls, and whether one of them failed."""
    live, late = _alive(calls, now())
    results: Results = [(late, DeadlineExceeded("queue"))] if late else []
    if not live:
        return results, False
    outcome = run(live)
    failed = isinstance(outcome, InferenceError)
    if failed and len(live) > 1:
        return results + _halves(run, live, now), True
    return [*results, (live, outcome)], failed


def _alive(calls: Sequence[Call], now: float) -> tuple[Sequence[Call], Sequence[Call]]:
    """Separate the calls whose callers still wait from the others."""
    gone = [call for call in calls if call.finished or call.deadline <= now]
    return ([call for call in calls if call not in gone], gone) if gone else (calls, gone)


def _run(
    session: Session,
    spec: ModelSpec,
    names: Sequence[str],
    calls: Sequence[Call],
    now: Callable[[], float],
    device: Device,
) -> Outcome:
    started = now()
    entered = device.start()
    sizes = [call.rows for call in calls]
    try:
        parts = [call.inputs for call in calls]
        if session.memory is not None and spec.ragged is None:
            batch = concatenate(parts, spec.inputs, batched=spec.batched, memory=session.memory)
            assembled = now()
            arrays = session.run_resident(batch, names, frozenset.intersection(*[call.keep for call in calls]))
        else:
            batch = concatenate(parts, spec.inputs, batched=spec.batched)
            if spec.ragged is not None:
                batch |= ragged_inputs(parts, spec, spec.ragged)
            assembled = now()
            arrays = session.run(batch, names)
        computed = now()
        if spec.ragged is None:
            shares = split(arrays, spec.outputs, sizes, batched=spec.batched)
        else:
            shares = scattered(arrays, spec, spec.ragged, parts, sizes)
    except InferenceError as error:
        device.end(entered, "failed")
        return error
    except Exception:
        device.end(entered, "failed")
        # The instance must survive any error of a runtime.
        _log.exception("model %s: a batch failed unexpectedly", spec.name)
        return BackendFailed("the batch failed inside the server")
    return shares, BatchTimes(started, assembled, computed, now(), sum(sizes), device.end(entered), session.steps)
