"""Debug lines about batches, for `--log-verbose`. The caller checks first whether they are enabled."""

import logging
from collections.abc import Sequence

from oriel_inference.batching.call import BatchTimes, Call
from oriel_inference.errors import InferenceError
from oriel_inference.model import ModelSpec

_log = logging.getLogger(__name__)

MAX_IDS = 8


def log_batch(spec: ModelSpec, calls: Sequence[Call], rows: int, reason: str, now: float) -> None:
    """Log that a batch leaves the queue for an instance."""
    left_ms = min((call.deadline - now for call in calls), default=0.0) * 1e3
    _log.debug(
        "model %s version %d: batch of %d requests, %d rows (%s), %.1f ms left: %s",
        spec.name,
        spec.version,
        len(calls),
        rows,
        reason,
        left_ms,
        _ids(calls),
    )


def log_executed(spec: ModelSpec, calls: Sequence[Call], times: BatchTimes) -> None:
    """Log that a batch has run and that its answers are still to be sent."""
    _log.debug(
        "model %s version %d: executed %d rows in %.3f ms (input %.3f, infer %.3f, output %.3f), %d of %d wait: %s",
        spec.name,
        spec.version,
        times.rows,
        (times.split_s - times.started_s) * 1e3,
        (times.assembled_s - times.started_s) * 1e3,
        (times.computed_s - times.assembled_s) * 1e3,
        (times.split_s - times.computed_s) * 1e3,
        sum(not call.finished for call in calls),
        len(calls),
        _ids(calls),
    )


def log_failed(spec: ModelSpec, calls: Sequence[Call], error: InferenceError) -> None:
    """Log that a batch, or some calls of it, failed."""
    _log.debug("model %s version %d: failed, %s: %s", spec.name, spec.version, error.outcome.value, _ids(calls))


def _ids(calls: Sequence[Call]) -> str:
    named = " ".join(call.request_id or "-" for call in calls[:MAX_IDS])
    return named if len(calls) <= MAX_IDS else f"{named} and {len(calls) - MAX_IDS} more"
