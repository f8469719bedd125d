"""Errors on the way between a worker and the pool: an outcome, a text, and details such as the model's name."""

from typing import Any

from oriel_logic.errors import (
    DeadlineExceeded,
    HandlerFailed,
    InputTooLarge,
    LogicError,
    MediaUnsupported,
    MemoryExceeded,
    ModelBusy,
    ModelFailed,
    ModelInputWrong,
    ModelUnavailable,
    ModelUnreachable,
    Outcome,
    Refused,
    Saturated,
)

KINDS: dict[str, type[LogicError]] = {
    kind.outcome.value: kind
    for kind in (
        InputTooLarge,
        MediaUnsupported,
        ModelBusy,
        ModelFailed,
        ModelInputWrong,
        ModelUnavailable,
        ModelUnreachable,
        Refused,
        Saturated,
    )
}


def failure(outcome: str, stage: str) -> LogicError:
    """Make the caller's error for a job that failed; the reason is in the log."""
    if outcome == Outcome.MEMORY_EXCEEDED.value:
        return MemoryExceeded(f"the service needed more memory in its stage '{stage}' than its limit allows")
    return HandlerFailed(f"the service failed in its stage '{stage}': its log says why under this request id")


def facts_of(error: LogicError) -> dict[str, Any]:
    """Describe a refusal in plain values."""
    facts = {"outcome": error.outcome.value, "message": error.message, "retry_after_s": error.retry_after_s}
    if isinstance(error, Refused) and error.field:
        facts["field"] = error.field
    if isinstance(error, DeadlineExceeded):
        facts["stage"] = error.stage
    if isinstance(error, ModelBusy):
        facts["too_many"] = error.too_many
    return facts


def raised(facts: dict[str, Any]) -> LogicError:
    """Make the error that `facts_of` described."""
    if "stage" in facts:
        return DeadlineExceeded(facts["stage"])
    kind = KINDS.get(facts["outcome"], HandlerFailed)
    error = kind(facts["message"], retry_after_s=facts["retry_after_s"])
    if isinstance(error, Refused):
        error.field = facts.get("field", "")
    if isinstance(error, ModelBusy):
        error.too_many = facts["too_many"]
    return error
