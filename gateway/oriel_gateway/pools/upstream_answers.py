"""Classify error answers of upstreams: some mean that the request surely was not executed there. Pure.

Our own servers give a `reason`. Other servers give a text, which is matched from its beginning: an error within an
ensemble begins otherwise, and steps before it may have run. A 429 means nothing of that kind.
"""

import re
from enum import Enum
from typing import Any

import msgspec

from oriel_wire.outcomes import event_of

_MAX_REASON_BODY = 4096
NO_MEMORY = "model_memory_full"
NOT_EXECUTED = frozenset({"queue_full", "server_stopping", "displaced", NO_MEMORY})
NOT_HERE = frozenset({"unknown_model", "model_not_ready", "no_available_version"})
_TRITON = r"(?:\[request id: [^\]]{0,256}\] )?"
_REFUSED = re.compile(
    _TRITON + r"(?:Exceeds maximum queue size|Server is stopping, scheduler for model has stopped accepting new )"
)
_ABSENT = re.compile(
    _TRITON + r"(?:Request for unknown model\b"
    r"|Model with requested (?:name|version|name and/or version) is not found"  # OVMS
    r"|Model \S{1,128}(?: with version \S{1,32})? not found"  # MLServer
    r"|Model with name \S{1,128} (?:does not exist|is not ready))"  # KServe
)


class AnswerKind(Enum):
    """The meaning of an answer for its request."""

    ANSWER = "answer"  # the answer is for the client
    REFUSED = "refused"  # surely not executed: the server had no room
    NO_MEMORY = "no_memory"  # surely not executed: the server had no memory to load the model
    ABSENT = "absent"  # surely not executed: the model is not on this server
    PERHAPS_ABSENT = "perhaps_absent"  # a 404 with an unknown text, of the model or of a server without it


NO_ROOM = (AnswerKind.REFUSED, AnswerKind.NO_MEMORY)
DENIED = (AnswerKind.ABSENT, AnswerKind.NO_MEMORY)  # this endpoint is not for calls of the model


class _Answer(msgspec.Struct):
    error: Any = None
    reason: Any = None


_decode = msgspec.json.Decoder(_Answer).decode


def classify_answer(head: Any, data: bytes, *, model: bool) -> AnswerKind:
    """Classify an answer. model: True if the request names a model; only then it can concern this endpoint alone."""
    status = head.status
    # With a cost it was executed: a service can be full after its model has run.
    if status not in (404, 503, 400) or head.cost_us > 0 or len(data) > _MAX_REASON_BODY:
        return AnswerKind.ANSWER
    perhaps = AnswerKind.PERHAPS_ABSENT if status == 404 and model else AnswerKind.ANSWER
    try:
        answer = _decode(data)
    except msgspec.MsgspecError:
        return perhaps
    error, reason = answer.error, answer.reason
    if isinstance(answer.error, dict):
        error, reason = answer.error.get("message"), answer.error.get("reason")
    text = error if isinstance(error, str) else ""
    if isinstance(reason, str):  # one of our own servers
        if model and reason in NOT_HERE:
            return AnswerKind.ABSENT
        if model and reason == NO_MEMORY:
            return AnswerKind.NO_MEMORY
        return AnswerKind.REFUSED if status == 503 and event_of(reason) in NOT_EXECUTED else AnswerKind.ANSWER
    if model and means_absent(text):
        return AnswerKind.ABSENT
    return AnswerKind.REFUSED if status == 503 and means_refused(text) else perhaps


def means_absent(text: str) -> bool:
    """Return whether this is the error text of a server that does not have the model."""
    return _ABSENT.match(text) is not None


def means_refused(text: str) -> bool:
    """Return whether this is the error text of a server that did not queue the request."""
    return _REFUSED.match(text) is not None
