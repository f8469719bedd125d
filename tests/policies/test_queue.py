"""The SLA queue against its written rules: a model-based property test and the situations people ask about."""

import weakref
from collections import Counter
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_policies.waiting.flows import Ticket
from oriel_policies.waiting.queue import SlaQueue


def ticket(band: int = 0, tenant: str = "a", deadline: float = 10.0, **more: Any) -> Ticket:
    later = {name: more.pop(name) for name in ("order", "admitted", "late_s", "target_s", "model") if name in more}
    made = Ticket(band=band, tenant=tenant, deadline=deadline, **more)
    for name, value in later.items():
        if value is not None:
            setattr(made, name, value)
    return made


def queue(max_items: int = 100, max_bytes: int = 10**9, floor_share: float = 0.05) -> SlaQueue:
    return SlaQueue(max_items=max_items, max_bytes=max_bytes, floor_share=floor_share)


def drain(q: SlaQueue) -> list[Ticket]:
    out = []
    while (popped := q.pop()) is not None:
        out.append(popped)
    return out


def popped(q: SlaQueue) -> Ticket:
    out = q.pop()
    assert out is not None
    return out


def test_tenants_share_a_band_by_weight() -> None:
    q = queue(max_items=1000)
    for n in range(300):
        q.push(ticket(tenant="heavy", weight=2.0, deadline=n))
        q.push(ticket(tenant="light", weight=1.0, deadline=n))
    first = Counter(popped(q).tenant for _ in range(300))
    assert 195 <= first["heavy"] <= 205


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 3),
    st.lists(
        st.tuples(
            st.integers(0, 1), st.sampled_from("ab"), st.sampled_from([0, 10, 20, 60]), st.sampled_from([1.0, 2.0])
        ),
        max_size=8,
    ),
)
def test_a_refused_ticket_leaves_nothing_taken_though_the_weight_of_its_tenant_changes(max_items: int, offered) -> None:
    q = queue(max_items=max_items, max_bytes=100)
    waiting = set[Ticket]()
    for band, tenant, size_bytes, weight in offered:
        offer = ticket(band, tenant, size_bytes=size_bytes, weight=weight)
        if (displaced := q.push(offer)) is not None:
            waiting = waiting - set(displaced) | {offer}
        assert (q.bytes.held, q.slots.held) == (sum(each.size_bytes for each in waiting), len(waiting))


def test_a_tenant_that_floods_cannot_delay_another_by_more_than_its_turn() -> None:
    q = queue(max_items=1000)
    for n in range(500):
        q.push(ticket(tenant="noisy", deadline=float(n)))
    for _ in range(10):
        q.pop()
    q.push(ticket(tenant="quiet", deadline=1e6))
    assert "quiet" in [popped(q).tenant for _ in range(2)]


def test_the_actual_charge_corrects_the_estimate() -> None:
    q = queue()
    for n in range(20):
        q.push(ticket(tenant="a", deadline=float(n)))
        q.push(ticket(tenant="b", deadline=float(n)))
    first = q.pop()
    assert first is not None
    q.settle(first, 6.0)  # it cost six times its estimate: the other one gets the next turns
    other = {"a": "b", "b": "a"}[first.tenant]
    assert [popped(q).tenant for _ in range(5)] == [other] * 5


def test_every_passed_band_gets_its_floor() -> None:
    q = queue(max_items=2000, floor_share=0.05)
    for n in range(600):
        for band in (0, 1, 2):
            q.push(ticket(band, deadline=float(n)))
    turns = Counter(popped(q).band for _ in range(400))
    assert turns[2] >= 20 and turns[1] >= 19 and turns[0] >= 355


def test_full_queue_refuses_an_equal_and_displaces_the_newest_of_the_lowest() -> None:
    q = queue(max_items=2)
    old, new = ticket(2), ticket(2)
    q.push(old)
    q.push(new)
    assert q.push(ticket(2)) is None
    gold = ticket(0)
    assert q.push(gold) == [new]
    assert drain(q) == [gold, old]


def test_displacement_by_bytes_takes_as_many_as_needed_or_none() -> None:
    q = queue(max_bytes=100)
    small = [ticket(1, size_bytes=30) for _ in range(3)]
    for t in small:
        q.push(t)
    assert q.push(ticket(0, size_bytes=101)) is None
    assert len(q) == 3
    assert q.push(ticket(0, size_bytes=60)) == [small[2], small[1]]
    assert q.size_bytes == 90


def test_what_was_admitted_elsewhere_takes_no_room_and_is_never_displaced() -> None:
    q = queue(max_items=1, max_bytes=10)
    admitted = [ticket(band=3, admitted=True, size_bytes=50) for _ in range(3)]
    assert [q.push(t) for t in admitted] == [[]] * 3
    low, urgent = ticket(band=2), ticket(band=0)
    assert q.push(low) == []
    assert q.push(urgent) == [low]
    assert q.push(ticket(band=0)) is None
    assert drain(q) == [urgent, *admitted]


class Payload:
    """Something that tells when nobody holds it any more."""


def test_the_queue_holds_nothing_that_was_taken_out_of_it() -> None:
    """What it held would be walked by the collector, and its memory could not be used for the next requests."""
    q = queue(max_items=1000)
    for n in range(60):
        q.push(ticket(n % 2, f"t{n % 3}", float(n), payload=Payload()))
    taken = [weakref.ref(popped(q).payload) for _ in range(30)]
    assert [each() for each in taken] == [None] * 30 and len(q) == 30


def test_tenants_that_come_and_go_leave_no_entries_behind() -> None:
    q = queue(max_items=10_000)
    for n in range(20_000, 0, -1):  # each is due before all others
        q.push(ticket(tenant=f"t{n % 10}", deadline=float(n)))
        if n % 2:
            q.pop()
    assert len(q._expiry._entries) < 200


def test_what_cannot_be_in_time_goes_behind_what_can_and_the_latest_deadline_first_there() -> None:
    q = queue()
    late = [ticket(deadline=float(n), late_s=float(n)) for n in (3, 1, 2)]
    good = [ticket(deadline=float(n), late_s=float(n)) for n in (9, 7)]
    for t in (*late, *good):
        q.push(t)
    assert q.peek(5.0) is good[1]
    assert q.next_deadline() == 1.0 and q.backlog(0, "a")[1:] == (5, 3)
    assert [q.pop(5.0) for _ in range(5)] == [good[1], good[0], late[0], late[2], late[1]]


def test_what_was_held_for_a_first_server_goes_behind_what_is_late_in_the_order_of_its_deadlines() -> None:
    q = queue()
    held = [ticket(deadline=float(n)) for n in (70, 60)]
    for t in held:
        t.go_last()
    late, good = ticket(deadline=6.0, late_s=2.0), ticket(deadline=8.0, late_s=8.0)
    for t in (*held, late, good):
        q.push(t)
    assert q.next_deadline() == 6.0 and q.backlog(0, "a")[1:] == (4, 2)
    assert [q.pop(5.0) for _ in range(4)] == [good, late, held[1], held[0]]


def test_lateness_in_one_tenant_costs_no_other_its_share() -> None:
    q = queue()
    for n in range(10):
        q.push(ticket(tenant="late", deadline=1.0, late_s=1.0))
        q.push(ticket(tenant="good", deadline=100.0 + n, late_s=100.0))
    turns = Counter(t.tenant for _ in range(10) if (t := q.pop(50.0)))
    assert turns == {"late": 5, "good": 5}


def test_turns_are_timed_while_a_tenant_waits() -> None:
    q = queue()
    for n in range(10):
        q.push(ticket(deadline=float(n)))
    for n in range(10):
        q.pop(1000.0 + 0.5 * n)
    backlog, waiting, behind = q.backlog(0, "a")
    assert backlog is not None and waiting == behind == 0 and abs(backlog.turn_s - 0.5) < 1e-9
    assert q.backlog(0, "nobody") == q.backlog(7, "a") == (None, 0, 0)


def test_idle_tenants_are_forgotten() -> None:
    q = queue(max_items=10)
    for n in range(20_000):
        q.push(ticket(tenant=f"t{n}", deadline=float(n)))
        q.pop()
    assert len(q._bands[0].flows) < 5_000 and len(q.slots._bands[0].ranking) < 10_000


@settings(max_examples=20, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from([0, 3, 300]))
def test_a_long_line_keeps_its_order_whoever_leaves_it(random: Random, late_by: int) -> None:
    """Deadlines that rise, but for some that are earlier than those before them."""
    q = queue(max_items=400, max_bytes=1 << 30)
    came = [ticket(deadline=float(n - random.randint(0, late_by))) for n in range(400)]
    for each in came:
        q.push(each)
    gone = set(map(id, random.sample(came, 250)))
    for each in came:
        if id(each) in gone:
            assert q.remove(each)
    line = q._bands[0].flows["a"]._tickets
    assert len(line.line) + len(line.sorted) < 310, "those that left are forgotten"
    assert drain(q) == sorted([each for each in came if id(each) not in gone], key=lambda each: each.deadline)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(
            st.sampled_from(["push", "push", "admit"]),
            st.integers(0, 3),
            st.sampled_from("abc"),
            st.integers(0, 20),
            st.integers(0, 40),
            st.sampled_from([None, None, None, 5.0, 30.0]),
        ),
        st.tuples(st.just("pop"), st.sampled_from([0.0, 5.0, 15.0])),
        st.tuples(st.just("remove"), st.integers(0, 50)),
        st.tuples(st.just("expire"), st.integers(0, 20)),
        st.tuples(st.just("settle"), st.integers(0, 50), st.integers(0, 9)),
    ),
    max_size=120,
)


@settings(max_examples=80, deadline=None)
@given(OPERATIONS, st.sampled_from([0.0, 0.05, 0.3]))
def test_any_order_of_operations_keeps_the_rules(operations: list[Any], floor: float) -> None:
    q = queue(max_items=8, max_bytes=120, floor_share=floor)
    waiting: list[Ticket] = []
    finished: list[Ticket] = []
    everything: list[Ticket] = []
    for operation in operations:
        match operation:
            case ("push" | "admit" as how, band, tenant, deadline, size, order):
                t = ticket(band, tenant, float(deadline), size_bytes=size, admitted=how == "admit", order=order)
                t.rows = 1 + size % 5
                everything.append(t)
                before = list(waiting)
                displaced = q.push(t)
                assert how == "push" or displaced == []
                peers = [w for w in waiting if w.band == band and not w.admitted]
                low = len(peers) + 1 <= 8 * floor or sum(w.size_bytes for w in peers) + size <= 120 * floor
                for d in displaced or ():  # whose turn it is among these, `test_shares` says
                    bounded = [w for w in waiting if not w.admitted]
                    assert (d.band >= band or low) and (d.band != band or d.tenant != tenant)
                    same = [w for w in bounded if (w.band, w.tenant) == (d.band, d.tenant)]
                    assert d is same[-1] or same[-1].size_bytes == 0
                    waiting.remove(d)
                    finished.append(d)
                if displaced is not None:
                    waiting.append(t)
                else:
                    assert waiting == before
                    finished.append(t)
            case ("pop", moment):
                shown = q.peek(moment)
                owed = {f: f.virtual for f in q._bands[shown.band].flows.values() if f.waiting} if shown else {}
                taken = q.pop(moment)
                assert taken is shown
                if taken is None:
                    assert not waiting
                else:
                    peers = [w for w in waiting if w.band == taken.band and w.tenant == taken.tenant]
                    assert taken is min(peers, key=lambda w: w.order)  # and the first of equals
                    assert owed[q._bands[taken.band].flows[taken.tenant]] == min(owed.values())
                    if floor == 0.0:
                        assert taken.band == min(w.band for w in waiting)
                    waiting.remove(taken)
                    finished.append(taken)
            case ("remove", index) if everything:
                t = everything[index % len(everything)]
                present = t in waiting
                assert q.remove(t) is present
                if present:
                    waiting.remove(t)
                    finished.append(t)
            case ("expire", now):
                due = q.expire(float(now))
                assert sorted(map(id, due)) == sorted(id(w) for w in waiting if w.deadline <= now)
                for d in due:
                    waiting.remove(d)
                    finished.append(d)
            case ("settle", index, cost) if everything:
                q.settle(everything[index % len(everything)], float(cost))
        bounded = [w for w in waiting if not w.admitted]
        assert len(q) == len(waiting) and len(bounded) <= 8
        assert q.size_bytes == sum(w.size_bytes for w in bounded) <= 120
        assert q.next_deadline() == min((w.deadline for w in waiting), default=None)
        for band in range(4):
            assert q.rows_ahead(band) == sum(w.rows for w in waiting if w.band <= band)
            assert q.depth(band) == sum(w.band == band for w in waiting)
            rows = sum(w.rows for w in waiting if w.band == band)
            assert (band, q.depth(band), rows) in [*q.depths(), (band, 0, 0)]
    finished.extend(drain(q))
    assert len(finished) == len(set(map(id, finished))) == len(everything)  # each exactly once


def test_the_tickets_that_expire_next_are_found_among_many_flows_whose_first_deadline_fell() -> None:
    """Each earlier deadline adds an entry; the stale ones are dropped once they are four in five."""
    q = queue(max_items=1000)
    for number in range(5):
        q.push(ticket(tenant=f"t{number}", deadline=90.5 + number))
    for deadline in range(200, 80, -1):
        q.push(ticket(tenant="falls", deadline=float(deadline)))
    assert q.next_deadline() == 81.0
    expired = [each.deadline for each in q.expire(1000.0)]
    assert expired == sorted(expired) and len(expired) == 125 and q.next_deadline() is None


def test_the_time_in_which_a_tenant_had_nothing_waiting_is_no_turn_of_it() -> None:
    q = queue()
    for begin in (10.0, 1010.0, 2010.0):
        for _ in range(3):
            q.push(ticket())
        for turn in range(3):
            q.pop(begin + turn / 2)
    backlog, _, _ = q.backlog(0, "a")
    assert backlog is not None and backlog.turn_s == 0.5
