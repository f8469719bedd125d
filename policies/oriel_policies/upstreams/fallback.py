"""Decides which pool serves a call that its own cannot serve in time, in the order of its route's `fallback`. Pure.

A pool is a prospect for a call if it has a usable server, room for the call, and is expected to answer before the
call's deadline: the wait in its queue plus the time that such calls take there. A time that is not known yet counts as
no time, so that a pool without history is tried. One call in `feasibility.PROBE` stays where it would be late, so that
a pool which has become faster is noticed.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

MOST_POOLS: Final = 8  # pools in one route's `fallback`
# The services of the OpenAI API whose JSON body names the model: the only bodies in which it can be replaced.
MODEL_IN_JSON: Final = frozenset(
    {
        "audio.speech",
        "chat.completions",
        "completions",
        "embeddings",
        "images.generations",
        "moderations",
        "responses",
    }
)


class Hindrance(StrEnum):
    """The reasons why a pool cannot serve a call in time. Their values are those of `error.reason`."""

    NO_SERVER = "upstream_unreachable"
    FULL = "queue_full"
    LATE = "infeasible"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prospect:
    """The prospect of one call in one pool now.

    usable: True if there is a server to send it to.
    room: True if it gets a permit or a place in the queue.
    wait_s: seconds until its permit; 0.0 while that is not known.
    service_s: seconds that few such calls exceed; 0.0 while that is not known.
    """

    usable: bool
    room: bool
    wait_s: float = 0.0
    service_s: float = 0.0


def hindrance(prospect: Prospect, left_s: float) -> Hindrance | None:
    """Return why the pool cannot serve a call with `left_s` seconds to its deadline; None if it can."""
    if not prospect.usable:
        return Hindrance.NO_SERVER
    if not prospect.room:
        return Hindrance.FULL
    return Hindrance.LATE if prospect.wait_s + prospect.service_s > left_s else None


def passed_over(model: str, *, may_use: bool, kind: str, name: str, version: str) -> str:
    """Return why a call cannot be given another model; "" if it can, or if `model` is "".

    may_use: True if the tenant's list has `model`. kind, name, version: the target of the call.
    """
    if not model:
        return ""
    if not may_use:
        return "the tenant may not use it"
    if kind == "service" and name not in MODEL_IN_JSON:
        return "the gateway cannot change the model in calls of this service"
    return "the call names a version of its own model" if version else ""
