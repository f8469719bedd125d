"""The arithmetic of a ledger when time passes: windows end, slots run out, a clock is set back."""

from oriel_policies.bounds.ledger import RATE, SLOTS, WINDOW, Answer, Ask

from .memory_ledger import Record, judge

DAY_US = 86_400e6
NOON = 20_000 * DAY_US + DAY_US / 2


class Keeper:
    def __init__(self) -> None:
        self.records: dict[str, Record] = {}
        self.now_us = NOON

    def ask(self, ask: Ask, holder: str = "one") -> Answer:
        (answer,) = judge(self.records, [ask], holder=holder, ttl_us=3e6, now_us=self.now_us)
        return answer


def rate(**more: float) -> Ask:
    return Ask(key="r", kind=RATE, limit=5, step=1e6, **more)  # type: ignore[arg-type]


def test_a_rate_refills_with_time_and_a_clock_set_back_keeps_its_debt() -> None:
    keeper = Keeper()
    assert keeper.ask(rate(need=5, want=5)).granted == 5
    keeper.now_us += 2e6
    assert keeper.ask(rate(need=3, want=3)).wait_us == 1e6
    keeper.now_us -= 3600e6  # a failover to a server whose clock is an hour behind
    assert keeper.ask(rate(need=3, want=3)).wait_us == 1e6
    keeper.now_us += 1e6
    assert keeper.ask(rate(need=3, want=9)).granted == 3


def test_slots_run_out_unless_their_holder_speaks() -> None:
    keeper = Keeper()
    slots = Ask(key="s", kind=SLOTS, limit=2, step=0.0, need=2, want=2)
    assert keeper.ask(slots).granted == 2
    keeper.now_us += 2e6
    keeper.ask(Ask(key="s", kind=SLOTS, limit=2, step=0.0))
    keeper.now_us += 2e6
    assert keeper.ask(slots, "two").granted == 0
    keeper.now_us += 2e6
    assert keeper.ask(slots, "two").granted == 2
    keeper.now_us -= 3600e6
    assert keeper.ask(slots, "one").granted == 0, "a clock that is set back takes no slots from their holder"
    keeper.now_us += 4e6
    assert keeper.ask(slots, "one").granted == 2, "slots that their holder does not confirm expire as always"


def test_windows_end_and_what_belongs_to_the_last_one_does_not_count() -> None:
    keeper = Keeper()

    def window(**more: float) -> Ask:
        return Ask(key="w", kind=WINDOW, limit=10, step=0.0, **more)  # type: ignore[arg-type]

    first = keeper.ask(window(need=8, want=8))
    assert first.number == 20_000 and first.ends_us == DAY_US / 2
    keeper.now_us += DAY_US / 2
    late = keeper.ask(window(number=first.number, born=first.born, used=8, debt=2, need=1, want=1))
    assert (late.number, late.used) == (20_001, 1)
    keeper.now_us -= 1e6
    assert keeper.ask(window(need=1, want=1)).used == 2, "after a step back over midnight the count goes on"
