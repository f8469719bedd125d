"""Where small rules turn, in numbers that floats hold exactly: right below a bound, at it, and right above it."""

from math import inf, nextafter

import pytest

from oriel_policies.metering.prices import Price, amounts, decimal_text
from oriel_policies.metering.usage import UsageBook, UsageKey
from oriel_policies.upstreams.breaker import Breaker
from oriel_policies.upstreams.ejection import Cause, Ejection, Record, outliers, silent_for_too_long
from oriel_policies.waiting.backlog import Backlog
from oriel_policies.waiting.feasibility import AnswerTimes, LowQuantile, ServiceFloor, Verdict
from oriel_policies.waiting.overload import LoopOverload, shares

ABOVE, BELOW = 1e9, -1e9


def at(number: float, *outcomes: float) -> list[tuple[float, float]]:
    """Return the outcomes right below a number, at it, and right above it."""
    return list(zip((nextafter(number, BELOW), number, nextafter(number, ABOVE)), outcomes, strict=True))


# The circuit breaker --------------------------------------------------------------------------------------------------


def flapping() -> Breaker:
    """A breaker that closed again at 100."""
    it = Breaker()
    for _ in range(5):
        it.record_failure(99.0)
    it.succeeded(100.0)
    return it


@pytest.mark.parametrize(("now", "trusted"), at(110.0, False, True, True))
def test_a_breaker_is_on_probation_for_10_s(now: float, trusted: bool) -> None:
    it = flapping()
    assert it.closed and it.on_probation(now) is not trusted
    it.record_failure(now)
    assert it.closed is trusted
    again = flapping()
    again.record_failure(101.0)  # needs four probes from now on
    for _ in range(4):
        assert not again.closed
        again.succeeded(102.0)
    again.succeeded(now + 2.0)
    for _ in range(5 if trusted else 1):
        again.record_failure(now + 2.0)
    again.succeeded(113.0)
    assert again.closed is trusted, "after a good probation one probe is enough"


# The backlog of a flow ------------------------------------------------------------------------------------------------


def turned(every_s: float, times: int, *, start: float = 128.0) -> tuple[Backlog, float]:
    it = Backlog()
    it.turn(start, True)
    for number in range(1, times + 1):
        it.turn(start + number * every_s, True)
    return it, start + times * every_s


@pytest.mark.parametrize(("times", "known"), [(19, False), (20, True), (21, True)])
def test_a_wait_is_known_from_20_turns_on(times: int, known: bool) -> None:
    it, now = turned(0.25, times)
    assert it.turns == times and it.turn_s == 0.25
    assert it.wait_s(8, now) == (2.0 if known else 0.0)
    assert it.refuses(8, now, target_s=0.5, left_s=1.0, quick_s=0.0) == (2.0 if known else 0.0)
    assert it.refuses(0, now, target_s=0.0, left_s=0.0, quick_s=1.0) == 0.0


def test_a_turn_weighs_a_twentieth_once_there_are_as_many() -> None:
    for times, weight in ((1, 1 / 2), (3, 1 / 4), (18, 1 / 19), (19, 0.05), (99, 0.05)):
        it, now = turned(1.0, times)
        it.turn(now + 3.0, True)
        assert it.turn_s == pytest.approx(1.0 + 2.0 * weight)


def test_a_wait_is_no_shorter_than_the_turn_that_lasts_already() -> None:
    it, now = turned(0.25, 20)
    assert it.wait_s(2, now + 0.25) == 0.5 and it.wait_s(2, now + 1.0) == 1.0
    it.emptied()
    assert it.wait_s(2, now + 1.0) == 0.5


@pytest.mark.parametrize(("left_s", "refused"), at(2.25, True, False, False))
def test_a_call_is_refused_that_ends_after_its_deadline(left_s: float, refused: bool) -> None:
    it, now = turned(0.25, 20)
    assert it.refuses(8, now, target_s=9.0, left_s=left_s, quick_s=0.25) == (2.0 if refused else 0.0)


@pytest.mark.parametrize(("target_s", "refused"), at(4.0, True, False, False))
def test_a_call_behind_late_ones_is_refused_if_a_quarter_of_its_target_is_before_it(
    target_s: float, refused: bool
) -> None:
    """Half of the eight before it are late: one second is ahead."""
    it, now = turned(0.25, 20)
    assert it.refuses(8, now, behind=4, target_s=target_s, left_s=1.0, quick_s=0.0) == (2.0 if refused else 0.0)


@pytest.mark.parametrize(
    ("late_for_s", "since_s", "target_s", "refused"),
    [
        (4.0, 0.0, 1.0, True),
        (3.75, 0.0, 1.0, False),
        (4.0, 1.0, 1.0, True),
        (4.0, 1.25, 1.0, False),
        (4.0, 0.0, 2.0, False),
        (4.0, 0.0, nextafter(2.0, 0.0), True),
    ],
)
def test_a_queue_stands_if_calls_were_late_for_as_long_as_a_deadline(
    late_for_s: float, since_s: float, target_s: float, refused: bool
) -> None:
    """Of eight calls with turns of a quarter of a second; a call has four seconds."""
    it, now = turned(0.25, 20)
    for quarter in range(int(late_for_s * 4) + 1):
        it.late(now + quarter / 4, target_s)
    at = now + late_for_s + since_s
    it.emptied()
    assert it.refuses(8, at, target_s=target_s, left_s=4.0 + since_s, quick_s=0.0) == (2.0 if refused else 0.0)


@pytest.mark.parametrize(("after_s", "refused"), [(1.0, True), (1.25, False)])
def test_a_queue_that_stood_is_cut_until_nobody_had_to_be_refused_for_a_target(after_s: float, refused: bool) -> None:
    it, now = turned(0.25, 20)
    it.emptied()
    for quarter in range(17):
        it.late(now + quarter / 4, 1.0)
    assert it.refuses(8, now + 4.0, target_s=1.0, left_s=4.0, quick_s=0.0) == 2.0
    at = now + 4.0 + after_s
    it._late_s = 0.0  # no call has been late since
    assert it.refuses(8, at, target_s=1.0, left_s=4.0, quick_s=0.0) == (2.0 if refused else 0.0)


@pytest.mark.parametrize(("pause_s", "standing"), [(1.0, True), (1.25, False)])
def test_lateness_begins_anew_after_a_target_without_a_late_call(pause_s: float, standing: bool) -> None:
    it, now = turned(0.25, 20)
    it.emptied()
    it.late(now, 1.0)
    it.late(now + pause_s, 1.0)
    found = it.refuses(8, now + pause_s, target_s=1.0, left_s=pause_s, quick_s=-2.0 + 1.0 + 0.25)
    assert found == (2.0 if standing else 0.0)


def test_each_twentieth_refusal_is_a_probe() -> None:
    it, now = turned(0.25, 20)
    found = [it.refuses(8, now, target_s=1.0, left_s=1.0, quick_s=0.0) for _ in range(60)]
    assert [number for number, wait_s in enumerate(found, 1) if not wait_s] == [20, 40, 60]


# Ejections ------------------------------------------------------------------------------------------------------------


def record(errors: float = 0.0, mean_s: float = 0.0, answers: int = 20) -> Record:
    it = Record()
    it.answers, it.error_rate, it.mean_s = answers, errors, mean_s
    return it


@pytest.mark.parametrize(("answers", "judged"), [(19, False), (20, True)])
def test_an_endpoint_is_judged_from_20_answers_on(answers: int, judged: bool) -> None:
    assert outliers([record(), record(1.0, answers=answers)]) == ([(1, Cause.ERRORS)] if judged else [])
    assert outliers([record(answers=answers), record(1.0)]) == ([(1, Cause.ERRORS)] if judged else [])
    one = record(answers=answers)
    assert silent_for_too_long(one, 9.0) is judged


@pytest.mark.parametrize(("errors", "out"), at(0.5, False, False, True))
def test_an_endpoint_fails_above_half(errors: float, out: bool) -> None:
    assert bool(outliers([record(0.125), record(0.125), record(errors)])) is out


@pytest.mark.parametrize(("others", "out"), [(0.2499, True), (0.25, False), (0.2501, False)])
def test_an_endpoint_fails_above_three_times_the_others(others: float, out: bool) -> None:
    assert bool(outliers([record(others), record(others), record(0.75)])) is out


def test_answers_and_errors_weigh_a_tenth() -> None:
    it = Record()
    it.succeeded(2.0)
    assert (it.answers, it.mean_s) == (1, 2.0)
    it.succeeded(1.0)
    assert it.mean_s == pytest.approx(1.9)
    it.erred()
    assert (it.answers, it.error_rate, it.broken) == (3, pytest.approx(0.1), 0)
    assert not it.broke()
    assert (it.answers, it.error_rate, it.broken) == (3, pytest.approx(0.19), 1)
    assert not it.broke() and it.broke()
    it.declined()
    assert (it.answers, it.broken) == (3, 0) and it.error_rate == pytest.approx(0.3439 * 0.9)
    it.broke()
    it.succeeded(1.9)
    assert (it.broken, it.mean_s) == (0, pytest.approx(1.9)) and it.error_rate < 0.4
    it.broke()
    it.erred()
    assert it.broken == 0


@pytest.mark.parametrize(
    ("mean_s", "silence_s", "silent"),
    [
        (0.0, 0.6, False),
        (0.0, nextafter(0.6, 1.0), True),
        (0.125, 0.625, False),
        (0.125, nextafter(0.625, 1.0), True),
        (0.0625, 0.5, False),
    ],
)
def test_silence_is_too_long_after_600_ms_or_five_usual_answers(mean_s: float, silence_s: float, silent: bool) -> None:
    assert silent_for_too_long(record(mean_s=mean_s), silence_s) is silent
    assert silent_for_too_long(record(), silence_s, [record(mean_s=mean_s)]) is silent


@pytest.mark.parametrize(("after_s", "span_s"), at(30.0, 8.0, 8.0, 1.0))
def test_an_ejection_is_forgiven_after_30_s(after_s: float, span_s: float) -> None:
    it = Ejection()
    for _ in range(3):
        it.eject(Cause.BROKEN, 0.0)
    it.admit(0.0)
    it.eject(Cause.BROKEN, after_s)
    assert it.until_s == after_s + span_s
    still = Ejection()
    for _ in range(3):
        still.eject(Cause.BROKEN, 0.0)
    still.eject(Cause.BROKEN, 99.0)
    assert still.until_s == 107.0, "an ejection that lasts is not forgiven"


# A loop that is late --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("late_s", "requests", "beats"),
    [
        (nextafter(0.02, 0.0), 10_000, 0),
        (0.02, 10_000, 2),
        (nextafter(0.1, 0.0), 10_000, 2),
        (0.1, 10_000, 1),
        (0.075, 250, 2),
        (0.075, 249, 0),
    ],
)
def test_a_loop_is_behind_after_two_late_beats_or_one_very_late_one(late_s: float, requests: int, beats: int) -> None:
    """2,000 requests a second are a flood."""
    it = LoopOverload()
    found = [it.beat(late_s, requests) for _ in range(3)]
    assert found == [bool(beats) and number >= beats for number in (1, 2, 3)]
    it.resume_all()
    assert it.beat(late_s, requests) is (beats == 1), "it has to be late as often again"


def behind() -> LoopOverload:
    it = LoopOverload()
    it.beat(0.5, 10_000)
    return it


def test_the_room_of_a_turn_is_8_to_1024() -> None:
    it = behind()
    assert it.most == 32
    assert [it.turn(1.0) for _ in range(4)] == [16, 8, 8, 8]
    rooms = []
    for _ in range(128):
        it.went_on(1, it.most, 0.0)
        rooms.append(it.turn(0.0))
    assert rooms[:2] == [16, 24] and rooms[-2:] == [1024, 1024] and max(rooms) == 1024
    it.resume_all()
    assert it.most == 1024
    assert not it.behind and it.beat(0.5, 10_000) and it.most == 32


@pytest.mark.parametrize(("wait_s", "refused"), at(0.05, False, False, True))
def test_a_rank_is_refused_that_waits_for_more_than_50_ms(wait_s: float, refused: bool) -> None:
    it = behind()
    it.went_on(2, 1, wait_s)
    assert [it.refuses(rank) for rank in (0, 1, 2, 3)] == [False, False, refused, refused]
    it.went_on(0, 1, wait_s)
    assert [it.refuses(rank) for rank in (0, 1)] == [False, refused]


@pytest.mark.parametrize(("wait_s", "ends"), at(0.005, True, True, False))
def test_a_loop_is_behind_until_20_beats_in_which_nothing_waited_for_long(wait_s: float, ends: bool) -> None:
    it = behind()
    for _ in range(19):
        it.went_on(1, 1, wait_s)
        assert it.beat(0.0, 0)
    it.went_on(1, 1, wait_s)
    assert it.beat(0.0, 0) is not ends
    late = behind()
    for _ in range(19):
        late.beat(0.0, 0)
    assert late.beat(0.5, 10_000) and late.beat(0.0, 0), "a late beat begins them anew"


@pytest.mark.parametrize(
    ("waiting", "most", "found"),
    [
        ({}, 16, {}),
        ({3: 0}, 16, {}),
        ({3: 5}, 16, {3: 5}),
        ({3: 50}, 16, {3: 16}),
        ({1: 50, 3: 50}, 16, {1: 14, 3: 2}),
        ({1: 50, 3: 50}, 15, {1: 14, 3: 1}),
        ({1: 50, 3: 50}, 2, {1: 1, 3: 1}),
        ({1: 50, 3: 1}, 16, {1: 15, 3: 1}),
        ({1: 3, 2: 50, 3: 50}, 16, {1: 3, 2: 11, 3: 2}),
        ({1: 3, 2: 4, 3: 50}, 16, {1: 3, 2: 4, 3: 9}),
        ({1: 50, 2: 50, 3: 50}, 16, {1: 14, 3: 2}),
    ],
)
def test_an_eighth_of_a_turn_is_for_the_least_urgent(waiting: dict[int, int], most: int, found: dict[int, int]) -> None:
    assert shares(waiting, most) == found


# What calls of a kind take --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("samples", "known"), [(49, False), (50, True)])
def test_times_of_a_kind_of_calls_are_known_from_50_on(samples: int, known: bool) -> None:
    floor, times = ServiceFloor(), AnswerTimes()
    for _ in range(samples):
        floor.observe(4, 0.25)
        times.observe(1000, 0.25)
    assert bool(floor.seconds(4)) is known and floor.refuses(4, 0.125) is known
    assert floor.ceiling_s == pytest.approx(0.25, rel=0.1)
    assert (times.judge(1000, 0.125) is Verdict.TOO_SHORT) is known
    assert floor.seconds(3) == 0.0 and floor.refuses(4, 9.0) is False


def test_each_twentieth_call_that_should_be_refused_is_a_probe() -> None:
    floor, times = ServiceFloor(), AnswerTimes()
    for _ in range(50):
        floor.observe(4, 0.25)
        times.observe(1000, 0.25)
    assert [number for number in range(1, 61) if not floor.refuses(4, 0.125)] == [20, 40, 60]
    assert [number for number in range(1, 61) if times.judge(1000, 0.125) is Verdict.ADMIT] == [20, 40, 60]


def test_a_low_quantile_moves_by_a_tenth_up_and_nine_tenths_down() -> None:
    it = LowQuantile(0.5)
    assert it.value == inf
    it.observe(0.0)
    assert it.value == 1e-9
    it.value = 1.0
    it.observe(1.0)
    assert it.value == pytest.approx(1.05)
    it.observe(1.0)
    assert it.value == pytest.approx(1.05 * 0.55)


def test_few_calls_exceed_the_mean_and_twice_its_deviation() -> None:
    times = AnswerTimes()
    for _ in range(19):
        times.observe(0, 1.0)
        assert times.expected_s == 0.0 and times.fastest_s == 1.0
    times.observe(0, 2.0)
    assert times._mean_s == pytest.approx(1.05)
    deviation_s = times._deviation_s
    assert times.likely_s == times.expected_s == pytest.approx(1.05 + 2.0 * deviation_s)
    times.observe(0, 3.05)
    assert times._mean_s == pytest.approx(1.15) and times._deviation_s == pytest.approx(deviation_s * 0.95 + 0.1)


# Money ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("use", "nano"),
    [
        ({"device_ns": 3_600_000_000_000}, 7),
        ({"cpu_ns": 1_800_000_000_000}, 4),
        ({"cpu_ns": 1_799_999_999_999}, 3),
        ({"bytes_out": 1 << 30}, 5),
        ({"bytes_out": (1 << 30) * 3 // 10}, 1),
        ({"bytes_out": (1 << 30) * 3 // 10 + 1}, 2),
        ({"tokens_in": 1_000_000}, 3),
        ({"tokens_in": 166_666}, 0),
        ({"tokens_in": 166_667}, 1),
        ({"tokens_out": 500_000}, 6),
        ({}, 0),
    ],
)
def test_each_resource_is_rounded_to_the_nearest_billionth_and_half_of_one_up(use: dict[str, int], nano: int) -> None:
    price = Price(
        **{"name": "x", "device_class": "", "currency": "EUR", "valid_from": "2026-11-01"},  # type: ignore[arg-type]
        **{"device_hour": 7, "cpu_core_hour": 7, "gib_out": 5, "million_tokens_in": 3, "million_tokens_out": 11},
    )
    assert amounts(price, **use).total == nano


@pytest.mark.parametrize(
    ("nano", "text"),
    [
        (0, "0.000000000"),
        (1, "0.000000001"),
        (-1, "-0.000000001"),
        (10**9, "1.000000000"),
        (-12_345_678_901, "-12.345678901"),
    ],
)
def test_an_amount_has_nine_decimals(nano: int, text: str) -> None:
    assert decimal_text(nano) == text


def test_a_row_that_nobody_uses_goes_when_more_than_half_of_the_rows_are_there() -> None:
    for rows, kept in ((2, 2), (3, 1)):
        book = UsageBook(max_rows=4, quiet=2)
        for number in range(rows):
            book.row(UsageKey(str(number), "", "", "", "", "")).device_ns += 1
        for _ in range(2):
            book.added()
            book.row(UsageKey("0", "", "", "", "", "")).device_ns += 1
        book.added()
        assert (len(list(book.rows())), book.generation) == (kept, int(rows == 3))
        assert book.device_ns == rows + 2
    assert UsageBook()._quiet == 3600
