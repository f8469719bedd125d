"""One word for each way in which a request can end, shared by all units. Pure.

The members of every unit's `Outcome` are named after the words of this table, so that one event has one name in the
code of all units. The value of a member is what the unit publishes as `error.reason`, metric label and log field. It is
another word where programs and dashboards already match on that one: ALIASES maps each of those to its event, and
docs/errors.md lists them. Code that reads the reasons of more than one unit compares `event_of(reason)`.
"""

from collections.abc import Mapping
from typing import Final

# Events that more than one unit reports.
SHARED: Final[Mapping[str, str]] = {
    "ok": "the request was answered",
    "invalid_request": "the request is malformed, or does not fit what it addresses",
    "too_large": "a size limit was exceeded",
    "not_found": "nothing is served at this path",
    "method_not_allowed": "the path takes another method",
    "unknown_model": "no model of this name is served to this caller",
    "queue_full": "no queue place, worker or memory is free for the request",
    "deadline_exceeded": "the request's deadline passed",
    "deadline_too_short": "less time is left than any such request has taken",
    "caller_left": "the client closed the connection or cancelled the call",
    "server_stopping": "the server is shutting down",
}
# Published word -> the event it means. The comment names the units that publish it.
ALIASES: Final[Mapping[str, str]] = {
    "bad_request": "invalid_request",  # gateway, logic
    "client_left": "caller_left",  # gateway, logic
    "input_too_large": "too_large",  # logic
    "model_unknown": "unknown_model",  # logic
    "saturated": "queue_full",  # logic
}


def event_of(reason: str) -> str:
    """The event that a published reason means; a word without an alias is the event's own."""
    return ALIASES.get(reason, reason)
