"""Judge a call by the promise of its tier: whether it was kept, and if not, which place the time was lost in. Pure.

The time of a call is divided among places, in the order in which a call passes them; together they are its whole time.

| place | the time in which |
|---|---|
| `body` | the client sends its request |
| `limiter` | the ledger of the tenant's limits has not answered |
| `queue` | the call waits for a permit |
| `endpoint` | no endpoint is usable, a connection is made, or an attempt that failed was under way |
| `upstream` | a server works that reports no times of its own |
| `network` | neither the server behind nor the gateway has the call: what the servers' own times leave over |
| `logic_wait` | every worker of the logic server is busy |
| `logic` | the service's own code runs |
| `model_wait` | the call waits for a model |
| `model` | the model computes |
| `answer` | the answer is passed on to the client |

The usual times are learned from calls that kept their promise. The cause of a late call is the place whose time exceeds
what is usual there by the most.
"""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple


class Times(NamedTuple):
    """The seconds of a call in each place of the table above."""

    body: float = 0.0
    limiter: float = 0.0
    queue: float = 0.0
    endpoint: float = 0.0
    upstream: float = 0.0
    network: float = 0.0
    logic_wait: float = 0.0
    logic: float = 0.0
    model_wait: float = 0.0
    model: float = 0.0
    answer: float = 0.0


STAGES: Final = Times._fields
# Causes for a call without an answer to wait for: the server's error, or a refusal that no waiting explains.
UPSTREAM_ERROR: Final = "upstream_error"
REFUSED: Final = "refused"
LOOP: Final = "loop"  # the gateway's own event loop stood still, while the call seemed to wait for somebody outside
TOKENS: Final = "tokens"  # the stream began in time, and its tokens came more slowly than its tier's time per token
CAUSES: Final = (*STAGES, UPSTREAM_ERROR, REFUSED, LOOP, TOKENS)
# The places in which a gateway that stands still itself seems to wait for others.
OUTSIDE: Final = frozenset({"body", "limiter", "endpoint", "upstream", "network", "answer"})
ALPHA: Final = 0.05  # weight of the latest call in what is usual
LEARN_EVERY: Final = 64  # one of 64 calls that kept their promise is learned from

MODEL_CALLS: Final = ("logic-infer", "logic-stream")  # stages in which a logic server calls models


class Stamps(NamedTuple):
    """The times at which a call reached its stages: monotonic seconds, 0.0 for a stage that it has not reached.

    limited_s: it began to wait for the ledger of its limits.
    queued_s: it came to the queue.
    permit_s: it got a permit.
    sent_s: the attempt that counts was sent.
    response_s: the head of the answer came.
    ended_s: the moment that its target is about.
    held_s: a duration: the seconds of its wait for a permit in which no endpoint was usable.
    """

    received_s: float
    limited_s: float
    queued_s: float
    permit_s: float
    sent_s: float
    response_s: float
    ended_s: float
    held_s: float = 0.0


def divide(stamps: Stamps, reported: Mapping[str, float]) -> Times:
    """Divide the time of a call among `STAGES`.

    reported: name -> seconds, what the server behind says of itself; see `inside`. The parts are the whole.
    """
    queued = stamps.queued_s or stamps.ended_s
    limited = stamps.limited_s or queued
    times = Times(body=limited - stamps.received_s, limiter=queued - limited)
    if not stamps.queued_s:
        return times
    if not stamps.permit_s and stamps.response_s:  # the answer to an equal call was awaited
        return times._replace(upstream=stamps.response_s - queued, answer=stamps.ended_s - stamps.response_s)
    permit = stamps.permit_s or stamps.ended_s
    held = min(stamps.held_s, permit - queued)
    times = times._replace(queue=permit - queued - held, endpoint=held)
    if not stamps.permit_s:
        return times
    times = times._replace(endpoint=held + (stamps.sent_s or stamps.ended_s) - permit)
    if not stamps.sent_s:
        return times
    answered = stamps.response_s or stamps.ended_s
    work = inside(answered - stamps.sent_s, reported)
    return work._replace(
        body=times.body,
        limiter=times.limiter,
        queue=times.queue,
        endpoint=times.endpoint,
        answer=stamps.ended_s - answered,
    )


def inside(upstream_s: float, reported: Mapping[str, float]) -> Times:
    """Divide the time until the server's answer among `upstream`, `network`, and the places of the servers.

    reported: entries of `Server-Timing`. `logic` is all that the logic server did, and `logic-wait` and `MODEL_CALLS`
    are parts of it; `queue` and `gateway-queue` are waits for models, and `compute` is their work. Calls of models that
    overlap are reported as more time than has passed: they are made as long as they can have taken at most.
    """
    waited, worked = reported.get("queue", 0.0) + reported.get("gateway-queue", 0.0), reported.get("compute", 0.0)
    whole = reported.get("logic")
    if whole is None:
        if not waited and not worked:
            return Times(upstream=upstream_s)
        waited, worked = _within(upstream_s, waited, worked)
        return Times(network=upstream_s - waited - worked, model_wait=waited, model=worked)
    whole = min(whole, upstream_s)
    busy = min(reported.get("logic-wait", 0.0), whole)
    called = min(sum([reported.get(stage, 0.0) for stage in MODEL_CALLS]), whole - busy)
    if called and not waited and not worked:  # a model server that reports no times of its own
        worked = called
    waited, worked = _within(called, waited, worked)
    hops = (upstream_s - whole) + (called - waited - worked)
    return Times(network=hops, logic_wait=busy, logic=whole - busy - called, model_wait=waited, model=worked)


def _within(most: float, one: float, two: float) -> tuple[float, float]:
    """Shrink two durations in proportion, so that both together are at most `most`."""
    both = one + two
    if both <= most:
        return one, two
    one = one * (most / both)
    return one, most - one


def passed_in(times: Sequence[float], target_s: float) -> str:
    """Return the place in which the target passed; "" if it did not."""
    elapsed = 0.0
    for place, seconds in zip(STAGES, times, strict=True):
        elapsed += seconds
        if elapsed > target_s:
            return place
    return ""


class Usual:
    """The usual seconds per stage of the calls of one route: running means over calls that kept their promise."""

    def __init__(self) -> None:
        self.times = [0.0] * len(STAGES)
        self.count = 0

    def learn(self, times: Sequence[float]) -> None:
        """Learn from one more call. The first ones weigh the same, so that one of them does not count for long."""
        self.count += 1
        weight = max(ALPHA, 1.0 / self.count)
        usual = self.times
        for place, seconds in enumerate(times):
            usual[place] += weight * (seconds - usual[place])


def blame(times: Sequence[float], usual: Usual | None) -> tuple[str, float]:
    """Return the place with the largest excess over what is usual, and that excess in seconds.

    The earlier one of equal places; if nothing exceeds what is usual, the place with the most time. usual: None if
    nothing is known yet.
    """
    if usual is not None:
        excess = [max(0.0, seconds - mean) for seconds, mean in zip(times, usual.times, strict=True)]
        most = max(excess)
        if most > 0.0:
            return STAGES[excess.index(most)], most
    most = max(times)
    return STAGES[times.index(most)], 0.0 if usual is not None else most


def place_not_left(stamps: Stamps) -> str:
    """Return the place in which a call was when it ended without an answer."""
    if stamps.response_s:
        return "answer"
    if stamps.sent_s:
        return "upstream"
    if stamps.permit_s:
        return "endpoint"
    if stamps.queued_s:
        return "queue"
    return "limiter" if stamps.limited_s else "body"
