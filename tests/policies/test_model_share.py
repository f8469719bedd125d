"""The permits of one pool that several models share, compared with a plain count of who waits and who has one."""

from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_policies.waiting.admission import Admission
from oriel_policies.waiting.flows import Ticket
from oriel_policies.waiting.model_share import MAX_MODELS, RECENT_S, ModelShares
from oriel_policies.waiting.queue import SlaQueue

MODELS = ("quick", "medium", "slow")
TAKES_S = {"quick": 0.01, "medium": 0.1, "slow": 2.0}


@dataclass
class Pool:
    """An admission, and a plain record of its calls. most: the most permits that each model had at once so far."""

    admission: Admission
    now: float = 100.0
    waiting: list[Ticket] = field(default_factory=list)
    running: list[str] = field(default_factory=list)
    most: Counter[str] = field(default_factory=Counter)

    def _start(self, model: str, band: int) -> None:
        overtaken = [each for each in self.waiting if each.model == model and each.band < band]
        assert not overtaken, "a less urgent call of the same model goes first"
        self.running.append(model)
        self.most[model] = max(self.most[model], self.running.count(model))

    def arrive(self, model: str, band: int, tenant: str) -> None:
        """Make a call."""
        if self.admission.acquire(model, self.now):
            assert not any(each.model == model for each in self.waiting), "a new call goes before those that wait"
            self._start(model, band)
            return
        ticket = Ticket(band=band, tenant=tenant, deadline=self.now + 1.0)
        ticket.model, ticket.late_s = model, self.now + 0.5
        displaced = self.admission.queue.push(ticket)
        for each in displaced or ():
            self.waiting.remove(each)
        if displaced is not None:
            self.waiting.append(ticket)
        self.pump()

    def end(self, which: int, used: bool) -> None:
        """End a call that has a permit, which it has used or not."""
        model = self.running.pop(which % len(self.running))
        if used:
            self.admission.release(TAKES_S[model], model, self.now)
        else:
            self.admission.release_unused(model)
        self.pump()

    def cancel(self, which: int) -> None:
        """Cancel a call that waits."""
        assert self.admission.queue.remove(self.waiting.pop(which % len(self.waiting)))
        self.pump()

    def pump(self) -> None:
        """Hand out the permits that are free."""
        while (ticket := self.admission.next_admitted(self.now)) is not None:
            self.waiting.remove(ticket)
            self._start(ticket.model, ticket.band)

    def check(self) -> None:
        """Compare the admission with the record."""
        admission, queue = self.admission, self.admission.queue
        assert admission.inflight == len(self.running)
        assert len(queue) == queue.slots.held == len(self.waiting)
        depths = Counter(each.band for each in self.waiting)
        assert {band: items for band, items, _ in queue.depths() if items} == depths
        assert [*queue.waiting(0), *queue.waiting(1)] == sorted(self.waiting, key=lambda each: each.band)
        assert all(apart.items for apart in queue.aside.values())
        for each in self.waiting:
            for model in ("", each.model):
                _, waiting, behind = queue.backlog(each.band, each.tenant, model)
                assert 0 <= behind <= waiting
        free = admission.limit - admission.inflight
        if free > 0:
            for model in {each.model for each in self.waiting}:
                has = self.running.count(model)
                assert has and has >= admission.limit // len(self.most), "it has less than its share"
                needed = sum(most - self.running.count(other) for other, most in self.most.items() if other != model)
                assert free <= needed, "no other model needs so many permits"


STEPS = st.one_of(
    st.tuples(st.just("arrive"), st.sampled_from(MODELS), st.integers(0, 1), st.sampled_from("ab")),
    st.tuples(st.just("arrive"), st.just("slow"), st.integers(0, 1), st.sampled_from("ab")),
    st.tuples(st.just("end"), st.integers(0, 20), st.booleans()),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(st.just("limit"), st.integers(1, 9)),
    st.tuples(st.just("places"), st.integers(2, 12)),
    st.tuples(st.just("later"), st.sampled_from((0.02, 0.6, 12.0))),
)


@settings(max_examples=300)
@given(st.lists(STEPS, min_size=20, max_size=80), st.integers(1, 9))
def test_no_permit_is_lost_or_kept_from_a_model_that_no_other_needs(steps: list[tuple], limit: int) -> None:  # type: ignore[type-arg]
    """No floor for the less urgent band, so that the order of the bands is strict."""
    pool = Pool(Admission(limit=limit, queue=SlaQueue(max_items=8, max_bytes=0, floor_share=0.0)))
    for model in ("quick", "quick", "slow", "slow"):
        pool.arrive(model, 1, "a")
    pool.now += 0.02
    while "quick" in pool.running:
        pool.end(0, True)
    pool.now += 0.4
    for kind, *values in steps:
        if kind == "arrive":
            pool.arrive(*values)
        elif kind == "end" and pool.running:
            pool.end(*values)
        elif kind == "cancel" and pool.waiting:
            pool.cancel(*values)
        elif kind == "limit":
            pool.admission.limit = values[0]
            pool.pump()
        elif kind == "places":
            pool.admission.queue.slots.bound = values[0]
        elif kind == "later":
            pool.now += values[0]
        pool.check()
    while pool.running:
        pool.end(0, True)
    assert not pool.waiting and not pool.admission.inflight and not pool.admission.queue.aside


def test_a_slow_model_leaves_what_a_quicker_one_needed_lately() -> None:
    shares, now = ModelShares(), 100.0
    for _ in range(3):
        assert shares.acquire("quick", 8, 8, now)
    for _ in range(3):
        shares.release("quick", 0.01, now)
    for _ in range(4):
        assert shares.acquire("slow", 8, 8, now)
    assert shares.allows("slow", 4, 8, now + 0.02), "nothing shows yet that it is slow"
    assert shares.allows("slow", 4, 8, now + 0.04) and not shares.allows("slow", 3, 8, now + 0.04)
    assert shares.allows("slow", 1, 10, now + 0.04), "it has less than its share"
    assert shares.allows("quick", 1, 8, now + 0.04)
    assert not shares.allows("slow", 3, 8, now + RECENT_S + 1.0)
    assert shares.allows("slow", 1, 8, now + 2.0 * RECENT_S + 2.0), "the other model is not in use any more"


def test_what_is_known_of_models_is_bounded() -> None:
    shares = ModelShares()
    for n in range(MAX_MODELS + 9):
        assert shares.acquire(f"m{n}", 8, 8, 1.0)
    assert len(shares._uses) == MAX_MODELS
    for n in range(MAX_MODELS + 9):
        shares.release(f"m{n}", 0.01, 1.0)
    assert not any(use.count for use in shares._uses.values())
    shares.allows("m0", 1, 1, 1.0 + RECENT_S)
    shares.allows("m0", 1, 1, 1.0 + 2.0 * RECENT_S)
    assert not shares._uses
