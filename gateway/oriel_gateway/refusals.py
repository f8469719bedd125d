"""What an error answer says of the request: nothing, or that it surely was not executed here. Pure.

Our own servers say it by their `reason`. Others say it in words, which are read from their beginning: an error within
an ensemble begins otherwise, and steps before it may have run. A 429 says nothing of that kind.
"""

import re
from enum import Enum
from typing import Any

import msgspec

from oriel_wire.h1_response import ResponseHead

__all__ = ["NOT_EXECUTED", "NOT_HERE", "Said", "says_absent", "says_refused", "what_it_says"]

_MAX_REASON_BODY = 4096
NOT_EXECUTED = frozenset({"queue_full", "server_stopping", "saturated", "displaced"})
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


class Said(Enum):
    """What an answer says of the request."""

    ANSWER = "answer"  # it is for the client
    REFUSED = "refused"  # surely not executed: no room
    ABSENT = "absent"  # surely not executed: the model is not here
    PERHAPS_ABSENT = "perhaps_absent"  # a 404 in words of its own: the model's, or of a server that has it not


class _Answer(msgspec.Struct):
    error: Any = None
    reason: Any = None


_decode = msgspec.json.Decoder(_Answer).decode


def what_it_says(head: ResponseHead, data: bytes, *, model: bool) -> Said:
    """Of a whole answer. model: the request names one; only then it can be about this endpoint alone."""
    status = head.status
    # With a cost: a service can be full after its model has run.
    if status not in (404, 503, 400) or head.cost_us > 0 or len(data) > _MAX_REASON_BODY:
        return Said.ANSWER
    perhaps = Said.PERHAPS_ABSENT if status == 404 and model else Said.ANSWER
    try:
        answer = _decode(data)
    except msgspec.MsgspecError:
        return perhaps
    error, reason = answer.error, answer.reason
    if isinstance(answer.error, dict):
        error, reason = answer.error.get("message"), answer.error.get("reason")
    words = error if isinstance(error, str) else ""
    if isinstance(reason, str):  # one of ours
        if model and reason in NOT_HERE:
            return Said.ABSENT
        return Said.REFUSED if status == 503 and reason in NOT_EXECUTED else Said.ANSWER
    if model and says_absent(words):
        return Said.ABSENT
    return Said.REFUSED if status == 503 and says_refused(words) else perhaps


def says_absent(words: str) -> bool:
    """Whether these are the words of a server that has not the model."""
    return _ABSENT.match(words) is not None


def says_refused(words: str) -> bool:
    """Whether these are the words of a server that gave the request no place in its queue."""
    return _REFUSED.match(words) is not None
