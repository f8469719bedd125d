"""The means that all models of one server share."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from oriel_inference.batching.cores import Cores
from oriel_inference.batching.device import Devices
from oriel_inference.batching.rate_limiter import RateLimiter
from oriel_inference.batching.service_times import INLINE_S
from oriel_inference.batching.workers import Workers
from oriel_inference.clock import Clock
from oriel_policies.upstreams.answer_cache import AnswerCache
from oriel_wire.v2.messages import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The machine as a model's scheduler sees it.

    clock: time and timers of the event loop.
    cores: the cores, which executions take while they run.
    limiter: the same with the resources of the rate limiter; None without one.
    workers: the threads in which executions run.
    devices: the host and the GPUs, which count their busy time.
    answers: the response cache; None if there is none.
    max_items, max_bytes: bounds of the calls, and of their input bytes, that wait for one model.
    max_batch_bytes: input bytes of one execution; a single call may have more.
    inline_s: executions of at most this many seconds run on the loop.
    """

    clock: Clock
    cores: Cores
    workers: Workers
    devices: Devices = field(default_factory=Devices)
    limiter: RateLimiter | None = None
    max_items: int = 10_000
    max_bytes: int = 256 << 20
    max_batch_bytes: int = 64 << 20
    inline_s: float = INLINE_S
    answers: AnswerCache[Sequence[Array]] | None = None
