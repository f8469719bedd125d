"""The rate limiter: instances hold resources while they run; tier, deadline and priority decide who goes next."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from fake_backend import FakeRequestSession, Gate
from hypothesis import example, given
from hypothesis import strategies as st

from oriel_inference.backends import find_backend
from oriel_inference.batching.batcher import Batcher
from oriel_inference.batching.cores import Contender, Cores
from oriel_inference.batching.machine import Machine
from oriel_inference.batching.rate_limiter import InstanceLimits, RateLimiter
from oriel_inference.clock import VirtualClock
from oriel_inference.errors import DeadlineExceeded, LoadFailed
from oriel_inference.model import EVERYWHERE, InstanceLimit
from oriel_inference.repository.load import LoadedVersion, Loading, load_model
from oriel_inference.settings import _resource
from oriel_inference.stores.local import LocalStore

from . import models
from .bench import Bench, X, Y, spec
from .manual_workers import ManualWorkers


def limit(priority: int = 1, device: int = 0, **needs: int) -> InstanceLimit:
    return InstanceLimit(needs={(name, device): count for name, count in needs.items()}, priority=priority)


def machine(counts: Mapping[tuple[str, int | None], int] | None = None, cores: int = 8) -> Machine:
    clock, workers = VirtualClock(), ManualWorkers()
    return Machine(clock=clock, cores=Cores(cores), limiter=RateLimiter(cores, counts or {}), workers=workers)


class Limited(Bench):
    """A model whose instances, one for each limit, run one call at a time on a machine that others use too."""

    def __init__(self, shared: Machine, *limits: InstanceLimit, apart: bool = False) -> None:
        model = replace(spec(alone=True, instances=len(limits)), limits=limits)
        super().__init__(model)
        assert isinstance(shared.clock, VirtualClock) and isinstance(shared.workers, ManualWorkers)
        self.clock, self.workers = shared.clock, shared.workers
        self.takers = [FakeRequestSession((X,), (Y,), gate=Gate()) for _ in limits]
        self._served = self.batcher = Batcher(model, self.takers if apart else self.sessions, shared)


@pytest.mark.parametrize(
    ("first", "second", "together"),
    [
        (limit(R=2), limit(R=2), False),
        (limit(R=2), limit(S=2), True),
        (limit(R=2), limit(R=2, device=1), True),
        (limit(R=2, device=EVERYWHERE), limit(R=2, device=EVERYWHERE), False),
        (limit(R=1), limit(R=2, S=1), True),
    ],
)
def test_instances_run_while_they_hold_what_they_need(
    first: InstanceLimit, second: InstanceLimit, together: bool
) -> None:
    shared = machine({("R", None): 3, ("S", None): 3})
    bench = Limited(shared, first, second)
    bench.call(), bench.call()
    bench.clock.run()
    assert bench.batcher.running == (2 if together else 1)
    bench.settle()
    assert sorted(bench.order) == [0, 1] and not +shared.limiter.held  # type: ignore[union-attr]


def test_models_of_processes_hold_resources_and_no_cores() -> None:
    shared = machine(cores=1)
    first, second, free = (Limited(shared, limit(**needs), apart=True) for needs in ({"R": 1}, {"R": 1}, {"S": 1}))
    for each in (first, second, free):
        each.call()
    shared.clock.run()  # type: ignore[attr-defined]
    assert [len(each.takers[0].under_way) for each in (first, second, free)] == [1, 0, 1]
    first.takers[0].finish()
    assert len(second.takers[0].under_way) == 1


def test_without_the_flag_a_resource_has_the_count_of_the_largest_need() -> None:
    shared = machine()
    wide, narrow = Limited(shared, limit(R=3)), Limited(shared, *[limit(R=1)] * 4)
    for _ in range(4):
        narrow.call()
    narrow.clock.run()
    assert narrow.batcher.running == 3
    wide.batcher.close()
    narrow.settle()
    narrow.call(), narrow.call()
    narrow.clock.run()
    assert narrow.batcher.running == 1


def test_a_priority_lets_others_go_first_within_a_tier_only() -> None:
    order: list[str] = []
    shared = machine()
    benches = {"one": Limited(shared, limit(R=1)), "three": Limited(shared, limit(3, R=1))}
    for name, bench in benches.items():
        bench.replied = lambda number, result, name=name: order.append(name)  # type: ignore[method-assign, misc]
        for _ in range(6):
            bench.call(timeout_s=60.0 if name == "one" else 50.0, band=1)
    bench.settle()
    assert order == ["one", "three", *["one"] * 3, "three", *["one"] * 2, *["three"] * 4]
    order.clear()
    benches["one"].call(band=1), benches["one"].call(band=1), benches["three"].call(band=0)
    bench.settle()
    assert order == ["one", "three", "one"]  # the first one ran already when the urgent call came


def test_a_call_that_waits_for_a_resource_expires_on_time() -> None:
    shared = machine()
    holder, waiter = Limited(shared, limit(R=1)), Limited(shared, limit(R=1))
    holder.call(), waiter.call(timeout_s=1.0)
    holder.clock.run()
    holder.clock.advance(1.0)
    assert isinstance(error := waiter.error(0), DeadlineExceeded) and "queue" in error.message
    holder.settle()
    assert holder.order == [0] and not waiter.runs


class Model(Contender):
    """A contender with one instance that notes when it is granted."""

    def __init__(self, limiter: RateLimiter, units: int, needs: dict[str, int], rank: int, priority: int) -> None:
        super().__init__(units, lambda: (0, rank), lambda: None)
        self.instance = FakeRequestSession((X,), (Y,), gate=Gate())
        self.limit = limit(priority, **needs)
        self.member = InstanceLimits(limiter, self, [self.instance], {id(self.instance): self.limit})
        self.granted = self.grant  # type: ignore[method-assign]
        self.held = False

    def grant(self) -> None:
        self.held = True

    __hash__ = object.__hash__


NEEDS = st.dictionaries(st.sampled_from("RST"), st.integers(1, 3), max_size=3)


@given(
    st.lists(st.tuples(NEEDS, st.integers(0, 2), st.integers(0, 3)), min_size=2, max_size=5),
    st.lists(st.integers(0, 4), max_size=60),
)
@example([({}, 1, 3), ({}, 2, 0), ({}, 0, 0), ({}, 0, 0), ({}, 1, 0)], [0, 0, 3, 4, 1, 0, 2])
def test_nothing_is_held_twice_and_nobody_waits_for_what_is_free(
    kinds: list[tuple[dict[str, int], int, int]], script: list[int]
) -> None:
    limiter = RateLimiter(2, {})
    all_models = [Model(limiter, units, needs, rank, p) for rank, (needs, units, p) in enumerate(kinds)]
    most = {n: max(needs.get(n, 0) for needs, _, _ in kinds) for n in "RST"}
    for index in script:
        model = all_models[index % len(all_models)]
        if model.held:
            model.held = False
            model.member.release(model.instance, contends=False)
            limiter.release(model.units)
        elif model not in limiter._waiting:
            model.held = limiter.acquire(model)
        held = [each for each in all_models if each.held]
        used = sum((Counter(each.limit.needs) for each in held), Counter[tuple[str, int]]())
        assert +limiter.held == used and all(count <= most[name] for (name, _), count in used.items())
        assert limiter.free == 2 - sum(each.units for each in held) >= 0
        if waiting := [each for each in all_models if each in limiter._waiting]:
            first = min(waiting, key=lambda each: (each.member.yields, each.urgency()))
            lacks = any(used[key] + count > most[key[0]] for key, count in first.limit.needs.items())
            assert lacks or first.units > limiter.free
    for _ in range(40):  # everybody gets his turn, whatever the priorities are
        if running := next((each for each in all_models if each.held), None):
            running.held = False
            running.member.release(running.instance, contends=False)
            limiter.release(running.units)
    assert not limiter._waiting


GROUP = "instance_group [ { count: 2 kind: KIND_CPU rate_limiter { %s } } ]"


def load(root: Path, limiter: RateLimiter | None, rules: str) -> LoadedVersion | LoadFailed | None:
    models.put(root, "double", models.double(), models.DOUBLE + GROUP % rules)
    loading = Loading(LocalStore(root), "double", find_backend=find_backend, cores=2, models=1, limiter=limiter)
    return load_model(loading)[1]


def test_a_configuration_gives_each_instance_its_limit(tmp_path: Path) -> None:
    rules = 'resources [ { name: "R" count: 4 }, { name: "G" count: 1 global: true } ] priority: 2'
    version = load(tmp_path, RateLimiter(2, {("R", 0): 4, ("G", 7): 1}), rules)
    assert isinstance(version, LoadedVersion), version
    assert version.spec.limits == (InstanceLimit(needs={("R", 0): 4, ("G", EVERYWHERE): 1}, priority=2),) * 2
    version.close()


@pytest.mark.parametrize(
    ("counts", "rules", "reason"),
    [
        (
            {("R", None): 3},
            'resources { name: "R" count: 4 }',
            'Resource count for "R" is limited to 3 which will prevent scheduling of one or more model instances, the '
            "minimum required count is 4",
        ),
        ({("R", 1): 9}, 'resources { name: "R" count: 4 }', 'Resource count for "R" is limited to 0 which'),
        (
            {},
            'resources [ { name: "R" count: 1 }, { name: "R" count: 1 global: true } ]',
            'Resource "R" is present as both global and device-specific resource in the model configuration.',
        ),
    ],
)
def test_a_limit_that_nothing_can_satisfy_is_refused_at_load(
    tmp_path: Path, counts: dict[tuple[str, int | None], int], rules: str, reason: str
) -> None:
    version = load(tmp_path, RateLimiter(2, counts), rules)
    assert isinstance(version, LoadFailed)
    assert version.reason.startswith(f"double/config.pbtxt: instance_group.rate_limiter: {reason}")


def test_counts_are_given_for_every_device_or_for_one() -> None:
    assert [_resource("R:4"), _resource("R:4:1")] == [(("R", None), 4), (("R", 1), 4)]
