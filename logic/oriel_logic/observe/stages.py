"""Times the stages of a request, once for `Server-Timing`, spans and histograms."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

from oriel_logic.errors import LogicError
from oriel_wire.context import parse_cost
from oriel_wire.observe.server_timing import entry_name, read_server_timing
from oriel_wire.observe.trace import TraceContext, child

Kind = Literal["client", "internal"]


@dataclass(frozen=True, slots=True)
class HopFacts:
    """A call of another server.

    path: "" for gRPC. status: the HTTP status, 0 without an answer, or the gRPC status, -1 without one. resent:
    endpoints that were tried before.
    """

    host: str
    port: int
    method: str
    path: str
    status: int
    resent: int = 0


class Stage:
    """One stage, timed by `with ledger.stage("pre"):`; open while `end_s` is 0. Times are monotonic seconds.

    Exceptions of its body pass through; `error` is their reason, or the name of their class. hop: the facts of a model
    call, as far as it is known.
    """

    __slots__ = (
        *("_attributes", "_clock", "_context", "_root", "end_s"),
        *("error", "hop", "kind", "name", "start_s"),
    )

    def __init__(self, name: str, kind: Kind, root: TraceContext, clock: Callable[[], float]) -> None:
        self.name = name
        self.kind: Kind = kind
        self.start_s = self.end_s = 0.0
        self.error = ""
        self.hop: HopFacts | None = None
        self._root = root
        self._clock = clock
        self._context: TraceContext | None = None
        self._attributes: dict[str, str | int | float | bool] | None = None

    @property
    def context(self) -> TraceContext:
        """The trace context of the stage, made on first use."""
        if self._context is None:
            self._context = child(self._root)
        return self._context

    @property
    def attributes(self) -> dict[str, str | int | float | bool]:
        """The attributes of its span."""
        if self._attributes is None:
            self._attributes = {}
        return self._attributes

    def __enter__(self) -> "Stage":
        self.start_s = self._clock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end_s = self._clock()
        if kind is not None:
            self.error = error.outcome.value if isinstance(error, LogicError) else kind.__name__


class Ledger:
    """The stages of one request; they may overlap (fan-out).

    root: the request's own span.
    upstream: `Server-Timing` of the first answer of an inference server. reported_s: seconds by stage,
    summed over all answers if there are more.
    cost_us: the cost of the request so far: processor time of workers plus what inference servers charged.
    cpu_ns: processor time of workers. lost_ns: that of jobs that failed, or whose answer nobody took; see `spent`.
    late: called with the microseconds of a job that ends after the request has been counted.
    device_ns, device_class: the time and class of devices, as inference servers report them.
    tokens_in, tokens_out: the numbers of tokens in calls of the OpenAI API.
    recorded: those that inference servers have reported (read, written), and so record in the usage ledger themselves.
    """

    __slots__ = (
        "_clock",
        "cost_us",
        "cpu_ns",
        "device_class",
        "device_ns",
        "late",
        "lost_ns",
        "recorded",
        "reported_s",
        "root",
        "stages",
        "tokens_in",
        "tokens_out",
        "upstream",
    )

    def __init__(self, root: TraceContext, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.root = root
        self.stages: list[Stage] = []
        self.upstream = ""
        self.reported_s: dict[str, float] = {}
        self.cost_us = self.cpu_ns = self.lost_ns = self.device_ns = self.tokens_in = self.tokens_out = 0
        self.recorded = 0, 0
        self.late: Callable[[int], None] | None = None
        self.device_class = ""
        self._clock = clock

    def spent(self, cpu_us: int, is_lost: bool) -> None:
        """Add the processor time of a job of this request that has ended, however it did."""
        self.cost_us += cpu_us
        if self.late is not None:
            self.late(cpu_us)
        elif is_lost:
            self.lost_ns += cpu_us * 1000
        else:
            self.cpu_ns += cpu_us * 1000

    def reported(self, cost_us: int, text: str) -> None:
        """Add what an answer of an inference server says it used: the values of `x-oriel-cost-us` and `x-oriel-cost`;
        -1 and "" if it does not say.
        """
        self.cost_us += max(0, cost_us)
        used = parse_cost(text) if text else None
        if used is not None:
            self.device_ns += used.device_ns
            self.cpu_ns += used.cpu_ns
            self.device_class = used.device_class
            self.recorded = self.recorded[0] + used.tokens_in, self.recorded[1] + used.tokens_out

    def timed(self, text: str) -> None:
        """Add the `Server-Timing` of an answer of an inference server."""
        if self.upstream or self.reported_s:
            self._sum(read_server_timing(text))
        else:
            self.upstream = text

    def _sum(self, further_s: dict[str, float]) -> None:
        first, self.upstream = self.upstream, ""
        for times_s in (read_server_timing(first), further_s):
            for name, seconds in times_s.items():
                self.reported_s[name] = self.reported_s.get(name, 0.0) + seconds

    def stage(self, name: str, *, kind: Kind = "internal") -> Stage:
        """Make a stage, which begins when it is entered with `with`. name: any text; it is shown by `entry_name`."""
        stage = Stage(entry_name(name), kind, self.root, self._clock)
        self.stages.append(stage)
        return stage

    @property
    def interrupted(self) -> str:
        """The stage that a cancellation hit, the latest started first; "handler" if there was none."""
        return next((each.name for each in reversed(self.stages) if each.error == "CancelledError"), "handler")

    def timings(self) -> list[tuple[str, float]]:
        """Return (stage, seconds) in order of start; stages of one name are summed. Those that never began are left
        out.
        """
        totals: dict[str, float] = {}
        for stage in self.stages:
            if stage.start_s:
                spent_s = max(0.0, stage.end_s - stage.start_s)
                totals[stage.name] = totals.get(stage.name, 0.0) + spent_s
        return list(totals.items())
