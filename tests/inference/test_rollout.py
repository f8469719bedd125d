"""Ensembles follow the versions of their models: in whatever order these come and go, only versions that fit serve."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from fake_backend import FakeSession, Gate
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oriel_inference.batching.batcher import Batcher
from oriel_inference.batching.cores import Cores
from oriel_inference.batching.machine import Machine
from oriel_inference.batching.scheduler import Scheduler
from oriel_inference.catalog import Catalog, ServingModel
from oriel_inference.clock import VirtualClock
from oriel_inference.ensembles.parts import judge
from oriel_inference.ensembles.scheduler import Ensemble
from oriel_inference.errors import LoadFailed
from oriel_inference.model import ModelSpec, ModelState
from oriel_inference.models.rollout import LoadTools, Rollout
from oriel_inference.repository.load import LoadedVersion, Loading
from oriel_wire.v2.proto import model_config_pb2 as pb

from .ensembles import Step, ensemble, model, tensor
from .manual_workers import ManualWorkers

NAMES = "abcd"


def plain(name: str, width: int) -> ModelSpec:
    return model(name, inputs=(tensor("in", (width,)),), outputs=(tensor("out", (width,)),))


def of(name: str, *parts: str) -> ModelSpec:
    """An ensemble that goes through `parts` one after the other."""
    tensors = ["in", *(f"t{n}" for n in range(1, len(parts))), "out"]
    steps: list[Step] = [(part, {"in": tensors[n]}, {"out": tensors[n + 1]}) for n, part in enumerate(parts)]
    return replace(ensemble(steps, outputs=["out"]), name=name)


class Room:
    """A rollout whose loads return what the test sets. It also serves as the store from which they appear to come."""

    fetches = False
    namespace = ""

    def loaded(self, model: str) -> None: ...

    def __init__(self) -> None:
        self.catalog = Catalog()
        self.catalog.loading = False
        self.tasks: list[asyncio.Task[Any]] = []
        self.offers: dict[str, dict[int, ModelSpec | LoadFailed]] = {}
        machine = Machine(clock=VirtualClock(), cores=Cores(4), workers=ManualWorkers())

        self.made: list[Ensemble | Batcher] = []

        def make(loaded: LoadedVersion) -> Scheduler:
            if loaded.spec.steps:
                self.made.append(Ensemble(loaded.spec, machine))
            else:
                self.made.append(Batcher(loaded.spec, loaded.sessions, machine))
            return self.made[-1]

        self.rollout = Rollout(
            self.catalog,
            LoadTools(
                find_backend=lambda name: None,  # type: ignore[arg-type, return-value]
                make_scheduler=make,
                machine=replace(machine, cores=Cores(2)),
                leave_s=1.0,
                check=None,
            ),
            spawn=self.spawn,
        )

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        self.tasks.append(asyncio.get_running_loop().create_task(work))

    def load(self, loading: Loading) -> dict[int, LoadedVersion | LoadFailed]:
        offered = self.offers[loading.model]
        if not offered:
            raise LoadFailed("broken as a whole")
        return {
            version: spec
            if isinstance(spec, LoadFailed)
            else LoadedVersion(
                spec=replace(spec, version=version),
                config=pb.ModelConfig(),
                sessions=() if spec.steps else (FakeSession((), (), gate=Gate()),),
                units=1,
                run_s=None,
            )
            for version, spec in offered.items()
        }

    def judged(self) -> None:
        """Check that what every line of the index says is true."""
        for name in self.catalog.names():
            for entry in self.catalog.entries(name):
                assert entry.state in (ModelState.READY, ModelState.UNAVAILABLE), entry
                assert (entry.serving is not None) == (entry.state is ModelState.READY)
                if entry.serving is not None and entry.serving.spec.steps:
                    scheduler = entry.serving.batcher
                    assert isinstance(scheduler, Ensemble)
                    verdict = judge(scheduler.spec, self.catalog, name)
                    assert verdict.state is ModelState.READY, (entry, verdict)
                    assert scheduler.models == verdict.models
                newest = self.wanted(name).get(entry.version)
                if newest is not None and entry.serving is not newest:
                    # It would have been published if it could.
                    assert judge(newest.spec, self.catalog, name).state is not ModelState.READY, entry
                    assert entry.reason
        assert not self.closed_in_use()

    def wanted(self, name: str) -> dict[int, ServingModel]:
        return self.rollout._ensembles.get(name, {})

    def wanted_at_all(self) -> set[int]:
        waiting = [each for name in NAMES for each in self.wanted(name).values()]
        return {id(each.batcher) for each in (*self.catalog.serving(), *waiting)}

    def closed_in_use(self) -> list[str]:
        servings = list(self.catalog.serving())
        used = [part for each in servings if isinstance(each.batcher, Ensemble) for part in each.batcher.models]
        return [
            each.spec.name
            for each in (*servings, *used)
            if each.batcher._closed or any(session.closed for session in each.sessions)  # type: ignore[attr-defined]
        ]


specs = st.one_of(
    st.tuples(st.just("plain"), st.sampled_from([4, 4, 5])),
    st.tuples(st.just("ensemble"), st.lists(st.sampled_from(NAMES), min_size=1, max_size=2)),
    st.tuples(st.just("plain"), st.just(4)),
    st.tuples(st.just("ensemble"), st.lists(st.sampled_from(NAMES), min_size=1, max_size=2)),
    st.tuples(st.just("bad"), st.none()),
)
# Models, an ensemble of them, an ensemble of that one.
BEGINNING: list[tuple] = [
    ("load", "a", ("plain", 4), 1),
    ("load", "b", ("plain", 4), 1),
    ("load", "c", ("ensemble", ["a", "b"]), 1),
    ("load", "d", ("ensemble", ["c"]), 1),
    ("together",),
]
events = st.lists(
    st.one_of(
        st.tuples(st.just("load"), st.sampled_from(NAMES), specs, st.integers(1, 2)),
        st.tuples(st.just("load"), st.sampled_from(NAMES), specs, st.integers(1, 2)),
        st.tuples(st.just("unload"), st.sampled_from(NAMES)),
        st.tuples(st.just("remove"), st.sampled_from(NAMES)),
        st.tuples(st.just("refuse"), st.sampled_from(NAMES)),
        st.tuples(st.just("together")),
    ),
    min_size=2,
    max_size=16,
)


@settings(max_examples=150, deadline=None)
@given(events)
# The old ensemble goes on, is refused as a whole, and its part changes.
@example([("load", "c", ("ensemble", ["d"]), 1), ("together",), ("refuse", "c"), ("load", "a", ("plain", 4), 1)])
# What stood in the way of the newer one was two steps away.
@example([("load", "a", ("ensemble", ["d"]), 1), ("load", "c", ("plain", 4), 1)])
# b is judged before c, on which it runs as well.
@example(
    [
        ("load", "d", ("plain", 4), 1),
        ("together",),
        ("load", "c", ("ensemble", ["d", "a"]), 1),
        ("together",),
        ("load", "b", ("ensemble", ["d", "c"]), 1),
        ("together",),
        ("load", "d", ("plain", 5), 1),
    ]
)
# It loses its part while its own load, which fails, is under way.
@example([("load", "a", ("plain", 5), 1), ("load", "c", ("bad", None), 1)])
def test_whatever_comes_and_goes_what_serves_fits_together(script: list[tuple]) -> None:
    async def play(room: Room) -> None:
        loads: list[asyncio.Task[Any]] = []
        for event in (*BEGINNING, *script):
            match event:
                case ("load", name, (kind, what), versions):
                    offered: ModelSpec | LoadFailed = LoadFailed("no good")
                    if kind == "plain":
                        offered = plain(name, what)
                    elif kind == "ensemble":
                        parts = [part for part in what if part != name]
                        offered = of(name, *parts) if parts else offered
                    room.offers[name] = dict.fromkeys(range(1, versions + 1), offered)
                    loads.append(asyncio.create_task(room.rollout.replace(name, [room], models=1)))  # type: ignore[list-item]
                case ("unload", name):
                    await room.rollout.unload(name)
                case ("remove", name):
                    await room.rollout.remove(name)
                case ("refuse", name):
                    room.rollout.refuse(name, "no store can be read")
                case ("together",):
                    await asyncio.gather(*loads)
                    room.judged()
        await asyncio.gather(*loads)
        room.judged()
        await asyncio.gather(*room.tasks)
        room.judged()
        assert not room.catalog.leaving
        assert {id(each) for each in room.made if not each._closed} == room.wanted_at_all()

    async def at_once(function: Any, *given: Any, **more: Any) -> Any:
        await asyncio.sleep(0)
        return function(*given, **more)

    async def run() -> None:
        room = Room()
        with patch("oriel_inference.models.rollout.load_model", room.load):
            await play(room)

    with patch("oriel_inference.models.rollout.LEAVE_POLL_S", 0.0), patch("asyncio.to_thread", at_once):
        asyncio.run(run())
