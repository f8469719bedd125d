"""The rules of a pool's stream slots: which stream has one, who is displaced, and how much time is charged."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_gateway.pools.stream_slots import StreamSlot, StreamSlots
from oriel_policies.waiting.admission import Admission
from oriel_policies.waiting.queue import SlaQueue
from oriel_policies.waiting.shares import Holding

from ..waiting import until


class Stream:
    """A streaming call; `permit` says whether it has one."""

    def __init__(self, slots: StreamSlots, admission: Admission, band: int = 0, tenant: str = "t") -> None:
        self._admission = admission
        self.slot = StreamSlot(slots, self, Holding(band, tenant, 1.0))
        self.permit = admission.acquire()
        assert self.permit
        self.ended = ""
        self.now = 0.0

    def displaced(self) -> None:
        self.end("displaced")

    def unread(self) -> None:
        self.end("unread")

    def release_permit_for_slot(self, now: float) -> None:
        assert self.permit
        self.permit = False
        self._admission.release(0.0)

    def end(self, how: str = "answered") -> None:
        self.ended = how
        self.slot.release(self.now)
        if self.permit:
            self._admission.release(0.0)
        self.permit = False


def pool(count: int, permits: int = 100) -> tuple[StreamSlots, Admission]:
    admission = Admission(limit=permits, queue=SlaQueue(max_items=0, max_bytes=0))
    return StreamSlots(admission, count), admission


def test_streams_keep_their_permits_until_a_slot_is_free() -> None:
    slots, admission = pool(2)
    streams = [Stream(slots, admission) for _ in range(5)]
    for each in streams:
        each.slot.begin_work(1.0)
        each.slot.begin_answer(2.0)
    assert [each.permit for each in streams] == [False, False, True, True, True]
    streams[3].end()
    streams[0].end()
    assert [each.permit for each in streams] == [False, False, False, False, True], "the one that waits for longest"
    slots.resize(3, 3.0)
    assert not streams[4].permit and admission.inflight == 0 and slots.shares.held == slots.working == 3


def test_a_stream_that_needs_a_slot_displaces_others_by_tier_and_share() -> None:
    slots, admission = pool(2)
    bronze = [Stream(slots, admission, 2, "b") for _ in range(3)]
    assert [each.slot.reserve() for each in bronze] == [True, True, False], "its own tenant has all slots"
    bronze[2].end()
    gold = Stream(slots, admission, 0, "g")
    assert gold.slot.reserve() and gold.slot.reserve()
    assert [each.ended for each in bronze] == ["", "displaced", "answered"]
    other = Stream(slots, admission, 2, "c")
    assert not other.slot.reserve(), "the only other of its tier has no more than its share"
    for each in (bronze[0], gold, other):
        each.end()
    assert not slots.shares.held and not admission.inflight


def test_only_the_time_in_which_a_server_works_and_the_client_reads_is_charged() -> None:
    slots, admission = pool(9)
    one = Stream(slots, admission)
    slot = one.slot
    slot.begin_work(10.0)  # a message is at the server from here
    slot.begin_answer(11.0)
    slot.note_answer(11.0, more=False)
    assert slot.worked_s == 1.0
    slot.message_sent(15.0)
    slot.message_sent(16.0)
    slot.note_answer(17.0, more=True)
    slot.note_answer(18.0, more=False)
    assert slot.worked_s == 4.0, "messages that overlap count once"
    slot.note_answer(20.0, more=False)  # a further answer to the same message
    assert slot.worked_s == 6.0
    slot.message_sent(30.0)
    slot.pause(31.0)
    slot.note_answer(35.0, more=True)  # it was under way when the client paused
    slot.resume(36.0)
    one.now = 38.0
    one.end()
    assert slot.worked_s == slot.share_s == 9.0 and not slots.working


def test_calls_at_the_servers_share_the_time_of_a_stream() -> None:
    slots, admission = pool(9)
    busy, idle = Stream(slots, admission), Stream(slots, admission)
    for each in (busy, idle):
        each.slot.begin_work(0.0)
    assert slots.at_servers == 2
    busy.slot.begin_answer(1.0)
    idle.slot.begin_answer(1.0)
    idle.slot.note_answer(4.0, more=False)
    assert (idle.slot.share_s, slots.at_servers) == (2.0, 1), "an idle stream takes nothing from others"
    assert admission.acquire() and slots.at_servers == 2
    busy.slot.note_answer(6.0, more=True)
    assert (busy.slot.worked_s, busy.slot.share_s) == (6.0, 3.0)


async def test_a_client_that_does_not_read_has_a_while_to_go_on_without_a_slot() -> None:
    slots, admission = pool(1)
    slots.most_unread_s = 0.001
    streams = [Stream(slots, admission) for _ in range(3)]
    for each in streams:
        each.slot.begin_work(1.0)
        each.slot.pause(2.0)
        each.slot.pause(2.0)
    streams[1].slot.resume(2.0)
    await until(lambda: streams[2].ended == "unread")
    assert [each.ended for each in streams] == ["", "", "unread"]
    streams[1].slot.pause(3.0)
    streams[0].end()
    assert not streams[1].permit
    await asyncio.sleep(0)
    assert not streams[1].ended, "it has got the slot"
    streams[1].end()
    assert not slots.shares.held and not admission.inflight


async def test_a_client_that_does_not_read_takes_the_slot_of_whoever_has_more_than_a_share() -> None:
    slots, admission = pool(2)
    slots.most_unread_s = 0.001
    bronze = [Stream(slots, admission, 2, "b") for _ in range(3)]
    others = [Stream(slots, admission, 2, "c"), Stream(slots, admission, 0, "g")]
    for number, each in enumerate([*bronze, *others]):
        each.slot.begin_work(1.0)
        each.slot.pause(2.0)
        if number >= 2:
            await until(lambda each=each: each.ended or not each.permit)
    assert [each.ended for each in bronze] == ["displaced", "displaced", "unread"], "its own tenant has all slots"
    assert [each.ended for each in others] == ["", ""]
    for each in others:
        each.end()
    assert not slots.shares.held and not admission.inflight and not slots.working


OPERATIONS = ["begin", "begin", "reserve", "answer", "last", "message", "pause", "resume", "end"]


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 4),
    st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 2), st.integers(0, 30)), max_size=100),
)
def test_every_stream_has_a_permit_or_a_slot_whatever_happens(
    count: int, operations: list[tuple[str, int, int]]
) -> None:
    asyncio.run(_do(count, operations))


async def _do(count: int, operations: list[tuple[str, int, int]]) -> None:
    slots, admission = pool(count)
    streams: list[Stream] = []
    now = 1.0
    for what, band, number in operations:
        now += 1.0
        for each in streams:
            each.now = now
        if what in ("begin", "reserve"):
            one = Stream(slots, admission, band, f"t{number % 2}")
            one.now = now
            streams.append(one)
            if what == "reserve" and not one.slot.reserve():
                one.end()
            else:
                one.slot.begin_work(now)
        elif live := [each for each in streams if not each.ended]:
            one = live[number % len(live)]
            match what:
                case "answer" | "last":
                    one.slot.begin_answer(now)
                    one.slot.note_answer(now, more=what == "answer")
                case "message":
                    one.slot.message_sent(now)
                case "pause":
                    one.slot.pause(now)
                case "resume":
                    one.slot.resume(now)
                case "end":
                    one.end()
        live = [each for each in streams if not each.ended]
        assert slots.shares.held <= count
        assert all(each.permit is not each.slot.has_slot for each in live)
        assert admission.inflight == sum(each.permit for each in live)
        assert slots.working == sum(each.slot.working for each in live if each.slot.has_slot)
        assert all(0.0 <= each.slot.share_s <= each.slot.worked_s <= now for each in streams)
    for each in streams:
        if not each.ended:
            each.end()
    assert not slots.shares.held and not slots.working and not admission.inflight


def test_without_slots_no_stream_begins_and_answers_keep_their_permits() -> None:
    slots, admission = pool(0)
    stream, answer = Stream(slots, admission), Stream(slots, admission)
    assert not stream.slot.reserve()
    answer.slot.begin_work(1.0)
    answer.slot.begin_answer(2.0)
    assert answer.permit and not answer.slot.has_slot
