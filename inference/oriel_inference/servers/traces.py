"""Triton's trace extension: its settings for all models and for single ones, and the files in mode `triton`.

A setting of a model that was not given follows that for all models, and this one that of the start. The path of the
file is set at the start only, because clients must not choose which files the server writes.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from os import SEEK_END

import msgspec

from oriel_inference.catalog import Catalog
from oriel_inference.errors import InvalidRequest, NotSupported
from oriel_inference.servers.meter import Meter
from oriel_inference.servers.spans import Ended, Run, Step
from oriel_inference.trace_config import Setting, TraceStart, read_setting

_log = logging.getLogger(__name__)

MAX_QUEUED = 16_384
MAX_BYTES = 1 << 30
MIN_FILE_BYTES = 64 << 10  # a numbered file counts as many at least
WRITTEN_AT_ONCE = 256
_encode = msgspec.json.Encoder().encode


class _Current(msgspec.Struct):
    """The settings that hold now. seen: requests since they were set."""

    trace_level: tuple[str, ...]
    trace_rate: int
    trace_count: int
    log_frequency: int
    seen: int = 0


class TraceSettings:
    """The settings of the extension. Single writer: the loop. meter: hands over the requests that have ended."""

    def __init__(self, start: TraceStart, catalog: Catalog, meter: Meter) -> None:
        self._start = start
        self._catalog = catalog
        self._meter = meter
        self._writer = TraceWriter(start.file)
        self._given: dict[str, dict[str, Setting]] = {"": {}}  # by model; "" for all
        self._current: dict[str, _Current] = {}
        self._apply(self._given)

    def shown(self, model: str) -> dict[str, list[str]]:
        """Return the settings by their names. model: "" for all. Raises InvalidRequest for an unknown model."""
        if model and not self._catalog.is_ready(model):
            raise InvalidRequest(f"Request for unknown model : {model[:128]}")
        current = self._current.get(model) or self._current[""]
        found = {name: [str(getattr(current, name))] for name in self._start.values}
        found["trace_level"] = list(current.trace_level) or ["OFF"]
        return found | {"trace_file": [self._start.file], "trace_mode": [self._start.mode]}

    def change(self, model: str, given: Mapping[str, Sequence[str]]) -> None:
        """Set what is given, or nothing; an empty value takes a setting back. Raises InvalidRequest, NotSupported."""
        self.shown(model)
        if "trace_file" in given:
            raise NotSupported("trace file location can not be updated through network protocol")
        if not given:
            return  # the request of a gRPC client that only reads
        if self._start.mode != "triton":
            raise NotSupported("trace settings of mode opentelemetry are those of the start: see --trace-config")
        for known, its_own in self._given.items():
            if "trace_count" in its_own or not known:
                its_own["trace_count"] = self._current[known].trace_count  # what is left of it
        named = {name: texts for name, texts in given.items() if name in self._start.values}
        own = {name: value for name, value in self._given.get(model, {}).items() if name not in named}
        own |= {name: read_setting(name, texts) for name, texts in named.items() if texts}
        self._apply(self._given | {model: own})
        if "TENSORS" in given.get("trace_level", ()):
            _log.warning("trace_level TENSORS has no effect: the values of tensors are not written to files")

    def note(self, ended: Ended) -> None:
        """Write the trace of a request that has ended, if it is its turn."""
        current = self._current.get(ended.model) or self._current[""]
        if not ended.queued_s or "TIMESTAMPS" not in current.trace_level:
            return
        current.seen += 1
        if current.seen % current.trace_rate == 0 and current.trace_count:
            current.trace_count -= current.trace_count > 0
            self._writer.put(ended, current.log_frequency)

    def close(self) -> None:
        """Write what is waiting; blocks."""
        self._writer.close()

    def _apply(self, given: dict[str, dict[str, Setting]]) -> None:
        own = {model: each for model, each in given.items() if each or not model}
        current = {model: msgspec.convert(self._start.values | given[""] | own[model], _Current) for model in own}
        wrong = "sample rate must be non-zero" if not all(each.trace_rate for each in current.values()) else ""
        wrong = wrong or ("" if self._start.file else "trace file name is not given")
        traced = any(each.trace_level for each in current.values())
        if wrong and traced and self._current:
            raise InvalidRequest(f"Attempting to set invalid trace setting :{wrong}")
        self._given, self._current = own, current
        self._meter.traces = self.note if traced and not wrong and self._start.mode == "triton" else None


class TraceWriter:
    """Writes traces as JSON arrays, in a thread: into one file, or every so many into a numbered one beside it.

    Bounds: MAX_QUEUED traces that wait, MAX_BYTES in all files. The traces beyond are lost, and the log warns
    once of those that did not fit into the files.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._waiting: dict[int, list[Ended]] = {}
        self._taken = 0  # by the loop
        self._done = 0  # by the thread
        self._thread = ThreadPoolExecutor(1, "oriel-traces")
        self._ids = count(1)
        self._numbers = count()
        self._begun = False
        self._left_bytes = MAX_BYTES
        self._failed = False

    def put(self, ended: Ended, every: int) -> None:
        """Take a trace; never waits. every: traces in each numbered file; 0 for the one file."""
        if self._taken - self._done >= MAX_QUEUED:
            self._hand_over()  # otherwise those of a file that no request fills would wait, and keep the others out
            return
        self._taken += 1
        waiting = self._waiting.setdefault(every, [])
        waiting.append(ended)
        if len(waiting) >= min(every or WRITTEN_AT_ONCE, MAX_QUEUED):
            self._thread.submit(self._write, self._waiting.pop(every), every)

    def close(self) -> None:
        """Write what is waiting; blocks."""
        self._hand_over()
        self._thread.shutdown()

    def _hand_over(self) -> None:
        for every, waiting in self._waiting.items():
            self._thread.submit(self._write, waiting, every)
        self._waiting = {}

    def _write(self, traces: Sequence[Ended], every: int) -> None:
        data = b",".join([_encode(each) for ended in traces for each in _entries(ended, self._ids)])
        size, more = max(len(data), MIN_FILE_BYTES if every else 0), self._begun and not every
        try:
            if size > self._left_bytes:
                raise OSError(0, f"all files together have {MAX_BYTES} bytes")
            path = f"{self._path}.{next(self._numbers)}" if every else self._path
            with open(path, "r+b" if more else "wb") as file:
                if more:
                    file.seek(-1, SEEK_END)  # the bracket, so that the file is complete after each write
                file.write((b"," if more else b"[") + data + b"]")
            self._left_bytes -= size
            self._begun |= not every
        except OSError as error:
            if not self._failed:
                _log.warning("traces are lost: %s cannot be written: %s", self._path, error.strerror)
            self._failed = True
        self._done += len(traces)


def _entries(ended: Ended, ids: Iterator[int]) -> Iterator[dict[str, object]]:
    """Return a request as Triton writes it. The server does not note when a body has arrived and when an answer has
    left: reading ends and sending begins with the queue and with the end of the request.
    """
    number, start, end = next(ids), ended.queued_s, ended.ended_s
    receive, send = ("HTTP_RECV", "HTTP_SEND") if ended.requested.protocol == "http" else ("GRPC_WAITREAD", "GRPC_SEND")
    stamps = {f"{receive}_START": ended.received_s, f"{receive}_END": start}
    stamps |= {"REQUEST_START": start, "QUEUE_START": start, **({} if ended.run is None else _computed(ended.run))}
    stamps |= {"INFER_RESPONSE_COMPLETE": end, "REQUEST_END": end, f"{send}_START": end, f"{send}_END": end}
    yield _head(number, ended.model, ended.version) | {"request_id": ended.ctx.request_id}
    yield _stamped(number, stamps)
    for step in ended.run.steps if ended.run is not None else ():
        yield from _step(step, number, ids)


def _step(step: Step, parent: int, ids: Iterator[int]) -> Iterator[dict[str, object]]:
    number, run = next(ids), step.run
    yield _head(number, step.model, step.version) | {"parent_id": parent}
    stamps = {"REQUEST_START": step.queued_s, "QUEUE_START": step.queued_s, **_computed(run)}
    yield _stamped(number, stamps | {"REQUEST_END": run.times.split_s})
    for inner in run.steps:
        yield from _step(inner, number, ids)


def _computed(run: Run) -> dict[str, float]:
    times = run.times
    if run.steps or not times.steps:
        return {}  # an ensemble, or an answer of the response cache
    stamps = {"COMPUTE_START": times.started_s, "COMPUTE_INPUT_END": times.assembled_s}
    return stamps | {"COMPUTE_OUTPUT_START": times.computed_s, "COMPUTE_END": times.split_s}


def _head(number: int, model: str, version: str) -> dict[str, object]:
    return {"id": number, "model_name": model, "model_version": int(version)}


def _stamped(number: int, times: Mapping[str, float]) -> dict[str, object]:
    return {"id": number, "timestamps": [{"name": name, "ns": int(at_s * 1e9)} for name, at_s in times.items()]}
