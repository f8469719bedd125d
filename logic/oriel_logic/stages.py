"""Where a request's time went: every stage is timed once, and feeds `Server-Timing`, the spans and the histograms."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Literal

from oriel_wire.trace import Span, TraceContext, child

__all__ = ["Ledger", "Stage"]


class Stage:
    """One stage, open while `end_s` is 0; `with` times its body. What the body raises passes through.

    Times are monotonic seconds. `context` is its place in the trace. error: the name of what the body raised.
    """

    __slots__ = ("_clock", "attributes", "context", "end_s", "error", "kind", "name", "start_s")

    def __init__(
        self,
        name: str,
        context: TraceContext,
        *,
        kind: Literal["client", "internal"] = "internal",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.context = context
        self.kind = kind
        self.start_s = clock()
        self.end_s = 0.0
        self.error = ""
        self.attributes: dict[str, str | int | float | bool] = {}
        self._clock = clock

    def __enter__(self) -> "Stage":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.error = kind.__name__
        self.end_s = self._clock()


class Ledger:
    """The stages of one request; they may overlap (fan-out).

    root: the request's own span. upstream: `Server-Timing` entries that inference servers reported. cost_us: what
    the request has cost so far, processor time of workers plus what inference servers charged.
    """

    def __init__(self, root: TraceContext, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.root = root
        self.stages: list[Stage] = []
        self.upstream: list[str] = []
        self.cost_us = 0
        self._clock = clock

    def stage(self, name: str, *, kind: Literal["client", "internal"] = "internal") -> Stage:
        """`with ledger.stage("infer"):` times the body as one of this request's stages."""
        stage = Stage(name, child(self.root), kind=kind, clock=self._clock)
        self.stages.append(stage)
        return stage

    @property
    def interrupted(self) -> str:
        """After a cancellation: the stage it hit, the latest started first; "handler" if it was none."""
        return next((each.name for each in reversed(self.stages) if each.error == "CancelledError"), "handler")

    def timings(self) -> list[tuple[str, float]]:
        """(stage, seconds) in order of start; stages of one name are added up."""
        totals: dict[str, float] = {}
        for stage in self.stages:
            totals[stage.name] = totals.get(stage.name, 0.0) + stage.end_s - stage.start_s
        return list(totals.items())

    def spans(self) -> list[Span]:
        """One `logic.<stage>` span per stage, children of the request's."""
        return [
            Span(
                name=f"logic.{stage.name}",
                context=stage.context,
                parent_id=self.root.span_id,
                start_s=stage.start_s,
                end_s=stage.end_s,
                kind=stage.kind,
                attributes=stage.attributes,
                error=stage.error,
            )
            for stage in self.stages
        ]
