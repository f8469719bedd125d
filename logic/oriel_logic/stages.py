"""Where a request's time went: every stage is timed once, and feeds `Server-Timing`, the spans and the histograms."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

from oriel_wire.trace import Span, TraceContext, child

__all__ = ["Ledger", "Stage"]


@dataclass(slots=True, kw_only=True)
class Stage:
    """One stage, open while `end_s` is 0. Times are monotonic seconds. `context` is its place in the trace."""

    name: str
    start_s: float
    context: TraceContext
    kind: Literal["client", "internal"] = "internal"
    end_s: float = 0.0
    error: str = ""
    attributes: dict[str, str | int | float | bool] = field(default_factory=dict)


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

    @contextmanager
    def stage(self, name: str, *, kind: Literal["client", "internal"] = "internal") -> Iterator[Stage]:
        """Time the body. What it raises passes through."""
        stage = Stage(name=name, start_s=self._clock(), context=child(self.root), kind=kind)
        self.stages.append(stage)
        try:
            yield stage
        except BaseException as error:
            stage.error = type(error).__name__
            raise
        finally:
            stage.end_s = self._clock()

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
