"""Meters on leases under any order of calls, answers, lost answers and flushes, without a network or a real clock."""

from hypothesis import given, settings
from hypothesis import strategies as st
from memory_ledger import Record, judge

from oriel_gateway.limits.leased import LeasedMeter
from oriel_gateway.limits.leased_kinds import LeasedQuota, LeasedRate, LeasedSlots, leased_meter
from oriel_gateway.limits.meters import ASK
from oriel_policies.bounds.calendar import CalendarClock, Period
from oriel_policies.bounds.kinds import Counts
from oriel_policies.bounds.ledger import Answer, Ask
from oriel_policies.bounds.limits import Bound
from oriel_policies.documents import RateLimit

NOON = 1_790_000_000.0 // 86400 * 86400 + 43200


class World:
    """Two gateways, one ledger and one clock. Answers may be lost before or after the ledger has received the
    question.
    """

    def __init__(self, bound: Bound) -> None:
        self.now = 10.0
        self.records: dict[str, Record] = {}
        self.gateways = [Line(self, "one"), Line(self, "two")]
        self.meters = [
            leased_meter(bound, "t", line, CalendarClock(lambda: NOON + self.now))  # type: ignore[arg-type]
            for line in self.gateways
        ]

    def answer(self, holder: str, ask: Ask) -> Answer:
        (answer,) = judge(self.records, [ask], holder=holder, ttl_us=3e6, now_us=(NOON + self.now) * 1e6)
        return answer


class Line:
    """Stands in for the ledger client: each ask is answered at once, unless `fate` says otherwise."""

    replicas = 2
    share = 0.5
    rest = 1.0

    def __init__(self, world: World, holder: str) -> None:
        self.world = world
        self.holder = holder
        self.up = True
        self.fate = "answered"

    def activate(self, meter: LeasedMeter) -> None:
        pass

    def send(self, tenant: str, asks: list[Ask], done: object) -> None:
        assert callable(done)
        done(self.carry(asks[0]))

    def carry(self, ask: Ask) -> list[Answer] | None:
        if self.fate == "lost before":
            return None
        answer = self.world.answer(self.holder, ask)
        return None if self.fate == "lost after" else [answer]

    def take(self, meter: LeasedMeter, units: int = 1) -> bool:
        """Make one call."""
        now = self.world.now
        wait_s = meter.acquire(units, now)
        if wait_s != ASK:
            return wait_s == 0.0
        ask = meter.ask(units, now)
        answers = self.carry(ask)
        meter.ask_finished(ask, answers[0] if answers else None, now)
        if answers is None:
            return meter.alone(units, now) == 0.0
        if answers[0].wait_us > 0.0:
            return False
        meter.use(units, now)
        return True

    def tick(self, meter: LeasedMeter) -> None:
        ask = meter.tick(self.world.now) if self.up else None
        if ask is not None:
            answers = self.carry(ask)
            meter.ask_finished(ask, answers[0] if answers else None, self.world.now)


steps = st.lists(
    st.tuples(
        st.sampled_from(["take", "take", "take", "leave", "tick", "lost before", "lost after", "down", "flush"]),
        st.sampled_from([0, 1]),
        st.sampled_from([0.0, 0.01, 0.0625, 0.3]),
    ),
    max_size=80,
)
FEW_SLOTS = Bound(name="concurrency", counts=Counts.REQUESTS, limit=6, slots=True)
MANY_SLOTS = Bound(name="concurrency", counts=Counts.REQUESTS, limit=1000, slots=True)


@settings(max_examples=60, deadline=None)
@given(steps, st.sampled_from([FEW_SLOTS, MANY_SLOTS]))
def test_slots_are_never_lost_and_never_more_than_promised(plan: list[tuple[str, int, float]], bound: Bound) -> None:
    world = World(bound)
    bound_now = bound.limit
    for what, which, passes in plan:
        world.now += passes
        line, meter = world.gateways[which], world.meters[which]
        assert isinstance(meter, LeasedSlots)
        line.up, line.fate = True, "answered"
        if what == "take":
            line.take(meter)
        elif what == "leave" and meter.inflight:
            meter.release_slot(0.1, world.now)
        elif what == "tick":
            line.tick(meter)
        elif what in ("lost before", "lost after"):
            line.fate, bound_now = what, max(bound_now, bound.limit * 3 // 2)
            line.take(meter)
        elif what == "down":
            line.up, bound_now = False, max(bound_now, bound.limit * 3 // 2)
            line.take(meter)
        elif what == "flush":
            world.records.clear()
            bound_now = 2 * bound.limit  # until the gateways have reported their slots, which takes less than a second
        inflight = [m.inflight for m in world.meters if isinstance(m, LeasedSlots)]
        assert min(inflight) >= 0
        assert sum(inflight) <= bound_now
    for line, meter in zip(world.gateways, world.meters, strict=True):
        line.up, line.fate = True, "answered"
        assert isinstance(meter, LeasedSlots)
        while meter.inflight:
            meter.release_slot(0.1, world.now)
    for _ in range(60):  # within a few seconds all slots are returned
        world.now += 0.0625
        for line, meter in zip(world.gateways, world.meters, strict=True):
            line.tick(meter)
    assert [meter.balance for meter in world.meters] == [0, 0]
    held = [entry for record in world.records.values() for entry in record.holders.values()]
    assert sum(slots for slots, until in held if until > (NOON + world.now) * 1e6) == 0


RATE = Bound(name="requests", counts=Counts.REQUESTS, limit=20, rate=RateLimit(requests_per_s=100.0, burst=20))
FAST = Bound(name="requests", counts=Counts.REQUESTS, limit=20, rate=RateLimit(requests_per_s=2000.0, burst=20))


@settings(max_examples=60, deadline=None)
@given(steps, st.sampled_from([RATE, FAST]))
def test_a_shared_rate_keeps_its_mean(plan: list[tuple[str, int, float]], bound: Bound) -> None:
    world = World(bound)
    assert bound.rate is not None
    rate = bound.rate.requests_per_s
    burst = max(bound.rate.burst, rate * 0.25)
    began, admitted, flushes, alone = world.now, 0, 0, 0
    for what, which, passes in plan:
        world.now += passes
        line, meter = world.gateways[which], world.meters[which]
        assert isinstance(meter, LeasedRate)
        line.up, line.fate = what != "down", what if what.startswith("lost") else "answered"
        if what == "tick":
            line.tick(meter)
        elif what == "flush":
            world.records.clear()
            flushes += 1
        else:
            for _ in range(10):
                got = line.take(meter)
                admitted += got
                alone += got and line.fate != "answered"
        assert admitted <= 1.5 * rate * (world.now - began) + burst * (1 + flushes) + 2 * bound.rate.burst + alone


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["ask", "ask", "judge", "leave", "tick"]), st.integers(0, 9)), max_size=80))
def test_asks_that_overtake_one_another_take_no_more_slots_than_there_are(plan: list[tuple[str, int]]) -> None:
    """Batches travel on several connections. A late one must not set the ledger's count of slots back."""
    bound = Bound(name="concurrency", counts=Counts.REQUESTS, limit=4, slots=True)
    world = World(bound)
    meter, line = world.meters[0], world.gateways[0]
    assert isinstance(meter, LeasedSlots)
    under_way: list[Ask] = []

    def judged(ask: Ask) -> None:
        answer = world.answer("one", ask)
        meter.ask_finished(ask, answer, world.now)
        if ask.need and answer.wait_us <= 0.0:
            meter.use(1, world.now)

    for what, which in plan:
        world.now += 0.03
        if what == "ask" and meter.acquire(1, world.now) == ASK:
            under_way.append(meter.ask(1, world.now))
        elif what == "tick" and (ask := meter.tick(world.now)) is not None:
            under_way.append(ask)
        elif what == "judge" and under_way:
            judged(under_way.pop(which % len(under_way)))
        elif what == "leave" and meter.inflight:
            line.fate = "lost before"  # what it would return at once is not examined here
            meter.release_slot(0.1, world.now)
            line.fate = "answered"
        assert meter.inflight <= bound.limit and meter.inflight + meter.balance <= bound.limit
    for ask in under_way:
        judged(ask)
    for _ in range(3):
        world.now += 1.1
        line.tick(meter)
    holders = world.records["concurrency"].holders if world.records else {}
    assert holders.get("one", (0, 0))[0] == meter.inflight + meter.balance <= bound.limit


QUOTA = Bound(name="requests-day", counts=Counts.REQUESTS, limit=60, period=Period.DAY)


@settings(max_examples=60, deadline=None)
@given(steps)
def test_a_shared_quota_is_exact_while_the_ledger_answers_and_bounded_otherwise(
    plan: list[tuple[str, int, float]],
) -> None:
    world = World(QUOTA)
    admitted, trouble, unsure = 0, False, False
    for what, which, passes in plan:
        world.now += passes
        line, meter = world.gateways[which], world.meters[which]
        assert isinstance(meter, LeasedQuota)
        line.up, line.fate = what != "down", what if what.startswith("lost") else "answered"
        trouble |= what in ("down", "lost before", "lost after", "flush")
        unsure |= what in ("lost after", "flush")
        if what == "tick":
            line.tick(meter)
        elif what == "flush":
            world.records.clear()
        else:
            admitted += sum(line.take(meter) for _ in range(5))
        assert admitted <= QUOTA.limit * (1.5 if trouble else 1.0) + 2
    for _ in range(20):
        world.now += 0.3
        for line, meter in zip(world.gateways, world.meters, strict=True):
            line.up, line.fate = True, "answered"
            line.tick(meter)
    if not unsure and world.records:
        assert world.records["requests-day"].used == admitted, (
            "leases are returned, and what was admitted alone is reported"
        )


def test_what_was_admitted_alone_empties_the_rate_when_the_ledger_is_back() -> None:
    world = World(RATE)
    line, meter = world.gateways[0], world.meters[0]
    line.up = False
    assert sum(line.take(meter) for _ in range(30)) == 10, "half of the burst, because there are two gateways"
    line.up = True
    world.now += 0.0625
    line.tick(meter)
    assert sum(world.gateways[1].take(world.meters[1]) for _ in range(30)) == 10, (
        "the other half is left for the other gateway"
    )
    assert line.take(meter) is False


def test_losing_the_ledger_is_not_worth_a_burst() -> None:
    world = World(RATE)
    line, meter = world.gateways[0], world.meters[0]
    assert sum(line.take(meter) for _ in range(30)) == 20
    line.up = False
    assert sum(line.take(meter) for _ in range(30)) == 0
    world.now += 0.1
    assert sum(line.take(meter) for _ in range(30)) == 5, "a share of the rate is admitted without the ledger"


def test_a_call_that_another_bound_refuses_uses_nothing_of_a_quota_without_the_ledger() -> None:
    world = World(Bound(name="day", counts=Counts.REQUESTS, limit=20, period=Period.DAY))
    line, meter = world.gateways[0], world.meters[0]
    line.up = False
    for _ in range(30):
        assert meter.acquire(1, world.now) == 0.0
        meter.undo(1, world.now)
    assert sum(line.take(meter) for _ in range(30)) == 10, "half of the quota, because there are two gateways"


def test_calls_that_are_decided_alone_because_an_answer_was_late_are_counted_in_full() -> None:
    """Units whose answer comes too late count as used; otherwise two gateways on a busy machine admit 1.15 of a
    rate.
    """
    world = World(Bound(name="r", counts=Counts.REQUESTS, limit=10, rate=RateLimit(requests_per_s=100.0, burst=10)))
    admitted = 0
    for step in range(1000):
        world.now += 0.01
        for line, meter in zip(world.gateways, world.meters, strict=True):
            for _ in range(3):
                wait_s = meter.acquire(1, world.now)
                if wait_s != ASK:
                    admitted += wait_s == 0.0
                    continue
                ask = meter.ask(1, world.now)
                if step % 3:  # late: the call has been decided when its units come
                    admitted += meter.alone(1, world.now) == 0.0
                    meter.ask_finished(ask, world.answer(line.holder, ask), world.now)
                else:
                    answer = world.answer(line.holder, ask)
                    meter.ask_finished(ask, answer, world.now)
                    if answer.granted:
                        meter.use(1, world.now)
                        admitted += 1
            if (report := meter.tick(world.now)) is not None:
                meter.ask_finished(report, world.answer(line.holder, report), world.now)
    assert 950 <= admitted <= 1.05 * 1000 + 10
