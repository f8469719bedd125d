"""The settings and counts of the artefacts of a server, and what is known of one that is being brought into service."""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from oriel_inference.artefacts.folder import ArtefactDamaged, ArtefactFolder
from oriel_inference.artefacts.group_store import GroupStore
from oriel_inference.artefacts.process import ArtefactRefused, BuildBounds, Wanted
from oriel_inference.catalog import ServingModel
from oriel_inference.repository.compiling import Compilation
from oriel_policies.artefacts.lifecycle import ArtefactLife, ArtefactState
from oriel_wire.observe.trace import Span, SpanSink, new_trace


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtefactSettings:
    """The decisions of the operator.

    sink: takes a span of each build and each check.
    store: object store shared with other servers; None shares artefacts only through the folder.
    """

    folder: ArtefactFolder
    bounds: BuildBounds
    sink: SpanSink
    store: GroupStore | None = None


class ArtefactCounts:
    """Counts of what has happened to artefacts since the start. Single writer: the loop.

    outcomes: (compiler, outcome) -> times: "built", "found" (built earlier, or by another server), "damaged",
    "remembered" (refused earlier, or by a server with the same folder), "store_failed" (the object store could not be
    used for one), or why one was refused.
    rollbacks: model -> times. build_s: compiler -> seconds of builds that succeeded.
    size_bytes: size of the folder when it was last listed.
    """

    def __init__(self) -> None:
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.rollbacks: Counter[str] = Counter()
        self.build_s: defaultdict[str, float] = defaultdict(float)
        self.size_bytes = 0

    def count(self, one: "Followed", outcome: str) -> None:
        """Count one artefact that ended so. outcome: see `outcomes`."""
        self.outcomes[one.life.compiler, outcome] += 1


class Followed:
    """A version whose artefact is being brought into service, and its life."""

    __slots__ = ("compilation", "life", "reference", "serving", "wanted")

    wanted: Wanted

    def __init__(self, serving: ServingModel, compilation: Compilation, life: ArtefactLife) -> None:
        self.serving = serving
        self.compilation = compilation
        self.life = life
        self.reference = tuple(serving.sessions)

    @property
    def shown(self) -> str:
        return f"model {self.serving.spec.name} version {self.serving.version}"

    @property
    def retired(self) -> bool:
        """Return whether the version is being replaced or unloaded."""
        return self.life.state is ArtefactState.RETIRED


@contextmanager
def recorded(sink: SpanSink, one: Followed, name: str, outcome: str) -> Iterator[None]:
    """Record the time of a build or a check as a span. outcome: its outcome unless it raises an error."""
    began, found = time.monotonic(), "stopped"
    try:
        yield
        found = outcome
    except ArtefactDamaged:
        found = "damaged"
        raise
    except ArtefactRefused as refused:
        found = refused.kind.value
        raise
    finally:
        if sink.enabled:
            attributes: dict[str, str | int | float | bool] = {
                "oriel.model": one.serving.spec.name,
                "oriel.model.version": one.serving.version,
                "oriel.artefact.compiler": one.life.compiler,
                "oriel.artefact.fingerprint": one.life.fingerprint,
                "oriel.outcome": found,
            }
            sink.record(
                Span(
                    name=name,
                    context=new_trace(True),
                    parent_id=0,
                    start_s=began,
                    end_s=time.monotonic(),
                    attributes=attributes,
                    failed=found != outcome,
                )
            )
