"""Inference engines of others: how each is told the urgency of a call, and how it reports its load. Pure.

The names are those of the engines' own documentation; docs/engines.md has them as a table, with the flags that each
engine needs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import log2
from typing import Final, NamedTuple

MOST: Final = 1e9  # a gauge above it is none
MOST_SERIES: Final = 1024  # of one gauge, and lines that begin with its name
MOST_LINE: Final = 2048
_GENERATING: Final = frozenset({"chat.completions", "completions"})
_VLLM_BAND: Final = 44  # bits of a time in milliseconds; with a band before them it is below 2 ** 53
# More than twice SGLang's default difference for preemption, 10, while deadlines change the number by 9 at most: a call
# preempts one of a less urgent tier and never one of its own.
_SGLANG_BAND: Final = 32
_SGLANG_STEPS: Final = 9
_HALF_S: Final = 10.0  # the time left at which half of TensorRT-LLM's range for one band is used up


def _vllm(band: int, left_s: float, due_s: float) -> str:
    return str(band << _VLLM_BAND | max(0, int(due_s * 1000.0)))


def _sglang(band: int, left_s: float, due_s: float) -> str:
    return str((255 - band) * _SGLANG_BAND + _SGLANG_STEPS - min(_SGLANG_STEPS, int(log2(1.0 + max(0.0, left_s)))))


def _trtllm(band: int, left_s: float, due_s: float) -> str:
    left_s = max(0.0, left_s)
    return f"{1.0 - (band + left_s / (left_s + _HALF_S)) / 256.0:.7f}"


def _triton(band: int, left_s: float, due_s: float) -> str:
    return str(band + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One kind of engine.

    priority: returns the number that tells it how urgent a call is, from the band of its tier, the seconds left until
    it is due, and the time at which it is due, in seconds since 1970; None if the engine takes no such number.
    bodies: the services of the OpenAI API whose bodies take `priority`.
    probe: the path that says whether it is ready; "" for the usual one.
    metrics: the path of its metrics, "" if it has none.
    waiting, running, cache: the gauges there of the calls that wait inside it, of those that it works on, and of the
    part of its cache that is in use; "" if it has none.
    """

    priority: Callable[[int, float, float], str] | None = None
    bodies: frozenset[str] = frozenset()
    probe: str = ""
    metrics: str = ""
    waiting: str = ""
    running: str = ""
    cache: str = ""

    @property
    def speaks_openai(self) -> bool:
        """Return whether it serves the OpenAI API, not v2."""
        return self.priority is not _triton


ENGINES: Final = {
    "vllm": Engine(
        priority=_vllm,
        bodies=_GENERATING | {"responses", "embeddings"},
        probe="/health",
        metrics="/metrics",
        waiting="vllm:num_requests_waiting",
        running="vllm:num_requests_running",
        cache="vllm:kv_cache_usage_perc",
    ),
    "sglang": Engine(
        priority=_sglang,
        bodies=_GENERATING,
        probe="/health",
        metrics="/metrics",
        waiting="sglang:num_queue_reqs",
        running="sglang:num_running_reqs",
        cache="sglang:token_usage",
    ),
    "trtllm": Engine(
        priority=_trtllm,
        bodies=_GENERATING,
        probe="/health",
        metrics="/prometheus/metrics",
        waiting="trtllm_num_requests_waiting",
        running="trtllm_num_requests_running",
        cache="trtllm_kv_cache_utilization",
    ),
    "openai": Engine(),
    "triton": Engine(priority=_triton, metrics="/metrics", waiting="nv_inference_pending_request_count"),
}


class EngineLoad(NamedTuple):
    """The load that one engine has reported. waiting, running: calls. cache: the part of its cache in use, 0 to 1."""

    waiting: float
    running: float
    cache: float


def read_load(engine: Engine, text: bytes | bytearray) -> EngineLoad | None:
    """Return the load in the text of an engine's metrics; None if it does not say how many calls wait."""
    text = b"\n" + text
    waiting = _samples(engine.waiting, text)
    if not waiting:
        return None
    return EngineLoad(sum(waiting), sum(_samples(engine.running, text)), max(_samples(engine.cache, text), default=0.0))


def _samples(name: str, text: bytes) -> list[float]:
    """Return the values of a gauge, one for each set of labels. text: lines, each after a line feed."""
    sought, at = b"\n" + name.encode(), -1
    values: list[float] = []
    for _ in range(MOST_SERIES if name else 0):
        if (at := text.find(sought, at + 1)) < 0:
            break
        series, _, value = text[at + 1 : at + MOST_LINE].partition(b"\n")[0].strip().rpartition(b" ")
        if series[len(name) : len(name) + 1] not in (b"", b"{"):
            continue
        try:
            number = float(value)
        except ValueError:
            continue
        if 0.0 <= number <= MOST:
            values.append(number)
    return values


class EngineLimit:
    """Learns how many calls keep a pool's engines busy, from the calls that wait inside them. `limit` is between the
    number of engines and `ceiling`.

    One call may wait inside each engine, so that none is idle until the next one comes. The limit falls by those that
    wait beyond that in two reports, not only until the next step, because nobody can reorder them there. While none
    waits and calls are queued, the limit grows at each report: by half until calls have waited for the first time,
    then by a sixteenth.
    """

    def __init__(self, ceiling: int, *, start: int = 8) -> None:
        self.ceiling = ceiling
        self.limit = min(start, ceiling)
        self._met = False
        self._excess = 0

    def note(self, waiting: int, inside: int, *, engines: int, queued: bool) -> None:
        """Note a report. waiting: calls inside the engines that wait there. inside: permits in use. queued: calls wait
        for a permit.
        """
        excess, self._excess = min(self._excess, waiting - engines), waiting - engines
        if excess > 0:
            self._met = True
            self.limit = min(self.limit, max(engines, inside - excess))
        elif not waiting and queued and inside >= self.limit:
            self.limit += max(engines, self.limit // (16 if self._met else 2))
        self.limit = max(1, min(self.limit, self.ceiling))
