"""A tenant without limits that floods a queue, and others beside it, in virtual time."""

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import pytest

from oriel_policies.waiting.flows import Ticket
from oriel_policies.waiting.queue import SlaQueue

SERVICE_S = 0.01
SLOTS = 4  # calls that run at a time: 400 calls a second
TARGET_S, GIVE_UP_S = 0.1, 0.4


@dataclass(kw_only=True)
class Sender:
    """A tenant with an open loop. cost: how much longer than others its calls take."""

    tenant: str
    per_s: float
    band: int = 1
    weight: float = 1.0
    cost: float = 1.0
    sent: int = 0


@dataclass
class Pool:
    """Some slots behind a queue of a few places, by a clock of its own. waits: seconds from arrival to start."""

    queue: SlaQueue = field(default_factory=lambda: SlaQueue(max_items=64, max_bytes=10**9))
    waits: dict[str, list[float]] = field(default_factory=dict)
    lost: Counter[str] = field(default_factory=Counter)
    work: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    work_contended: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def run(self, senders: list[Sender], seconds: float, contenders: frozenset[str] = frozenset()) -> None:
        """Send, expire and execute in steps of half a millisecond. contenders: work counts as contended while all of
        them wait.
        """
        free = [0.0] * SLOTS
        for step in range(int(seconds * 2000)):
            now = 1.0 + step / 2000
            for each in senders:
                while each.sent < each.per_s * (now - 1.0):
                    each.sent += 1
                    self._send(each, now)
            for expired in self.queue.expire(now):
                self.lost[expired.tenant] += 1
            for slot in range(SLOTS):
                if free[slot] <= now:
                    waiting = {each.tenant for each in self.queue.waiting(1)} if contenders else set()
                    ticket = self.queue.pop(now)
                    if ticket is None:
                        break
                    free[slot] = now + SERVICE_S * ticket.cost
                    self.waits.setdefault(ticket.tenant, []).append(now - ticket.payload)
                    self.work[ticket.tenant] += ticket.cost
                    if contenders and contenders <= waiting:
                        self.work_contended[ticket.tenant] += ticket.cost

    def _send(self, sender: Sender, now: float) -> None:
        ticket = Ticket(
            band=sender.band,
            tenant=sender.tenant,
            deadline=now + GIVE_UP_S,
            cost=sender.cost,
            weight=sender.weight,
            payload=now,
        )
        ticket.target_s = TARGET_S
        displaced = self.queue.push(ticket)
        for each in displaced or ():
            self.lost[each.tenant] += 1
        self.lost[sender.tenant] += displaced is None

    def in_time(self, tenant: str) -> float:
        """Return the share of the calls of a tenant that were answered within the target."""
        waits = self.waits.get(tenant, [])
        good = sum(wait + SERVICE_S <= TARGET_S for wait in waits)
        return good / (len(waits) + self.lost[tenant])


@pytest.mark.parametrize("per_s", [1000.0, 20_000.0])
@pytest.mark.parametrize("cost", [1.0, 8.0])
def test_a_quiet_tenant_of_the_same_tier_is_in_time_beside_a_hog(per_s: float, cost: float) -> None:
    pool = Pool()
    pool.run([Sender(tenant="hog", per_s=per_s, cost=cost), Sender(tenant="quiet", per_s=100.0)], 5.0)
    assert pool.in_time("quiet") >= 0.99
    assert sum(pool.work.values()) * SERVICE_S >= 0.95 * SLOTS * 5.0, "what the quiet one leaves is the hog's"


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_a_hog_gets_its_weight_while_others_want_theirs(weight: float) -> None:
    pool = Pool()
    hog = Sender(tenant="hog", per_s=10_000.0, weight=weight, cost=2.0)
    others = [Sender(tenant=name, per_s=300.0) for name in ("a", "b")]
    pool.run([hog, *others], 5.0, frozenset(("a", "b")))
    contended = pool.work_contended
    assert sum(contended.values()) > 500
    assert contended["hog"] / sum(contended.values()) <= 1.2 * weight / (weight + 2.0)


def test_a_more_urgent_tier_waits_for_what_runs_at_most() -> None:
    pool = Pool()
    pool.run([Sender(tenant="hog", per_s=20_000.0, band=2, cost=3.0), Sender(tenant="gold", per_s=50.0, band=0)], 5.0)
    assert pool.lost["gold"] == 0
    # One call of the hog ends in each slot, and the lower tier may take its own turn, one in twenty, before.
    assert max(pool.waits["gold"]) <= 2 * 3.0 * SERVICE_S


def test_the_lowest_tier_gets_its_floor_beside_a_hog_of_the_highest_that_fills_the_queue() -> None:
    """The more urgent tiers displaced all that waited in it, so that none of its calls was answered."""
    pool = Pool()
    hog, silver = Sender(tenant="hog", per_s=20_000.0, band=0), Sender(tenant="silver", per_s=20.0, band=1)
    flood, quiet = Sender(tenant="flood", per_s=400.0, band=2), Sender(tenant="quiet", per_s=5.0, band=2)
    pool.run([hog, silver, flood, quiet, Sender(tenant="gold", per_s=50.0, band=0)], 5.0)
    work, total = pool.work, sum(pool.work.values())
    assert work["flood"] + work["quiet"] >= 0.049 * total and work["silver"] >= 0.045 * total
    assert len(pool.waits["quiet"]) >= 0.95 * quiet.sent
    assert pool.in_time("gold") >= 0.99 and work["hog"] >= 0.75 * total, "the rest is the more urgent tier's"


def test_calls_of_one_tenant_with_equal_time_are_not_overtaken() -> None:
    pool = Pool()
    pool.run([Sender(tenant="hog", per_s=20_000.0), Sender(tenant="quiet", per_s=90.0)], 5.0)
    arrivals = [index / 90.0 for index in range(len(pool.waits["quiet"]))]
    starts = [arrival + wait for arrival, wait in zip(arrivals, pool.waits["quiet"], strict=True)]
    assert starts == sorted(starts)
