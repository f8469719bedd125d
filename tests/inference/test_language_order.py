"""The order of a language model's steps: who has a place, who pauses, who goes on; in virtual time."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_inference.batching.call import Answer
from oriel_inference.errors import CallerLeft, DeadlineExceeded, DeadlineTooShort, QueueFull
from oriel_inference.language.double import next_token
from oriel_inference.language.generation import NEXT_SEED
from oriel_inference.language.order import SLICE
from oriel_policies.waiting.shares import FLOOR_SHARE

from .language_bench import Asked, LanguageBench

GUIDE = {"presence_penalty": 0.5}  # as a guide, it would be lost in a pause


def gaps(asked: Asked) -> list[float]:
    """The seconds between the responses of a stream."""
    return [after - before for before, after in pairwise(asked.times)]


def whole(asked: Asked) -> bool:
    return isinstance(asked.result, Answer) and asked.ids == asked.undisturbed


def test_a_more_urgent_newcomer_joins_the_next_step_and_the_newest_of_the_others_pauses() -> None:
    bench = LanguageBench()
    bronze = [bench.ask(f"bronze {each}", band=1, max_tokens=150) for each in range(4)]
    bench.run(0.3)
    gold, asked_s = bench.ask("gold", max_tokens=20), bench.clock.now()
    bench.settle()
    assert gold.times[0] - asked_s < 2.2 * 0.012, "what is left of one step, and one of its own"
    assert bronze[3].ending["paused"] == 1 and sum([each.ending["paused"] for each in bronze]) <= 2, "they take turns"
    assert all(whole(each) for each in (gold, *bronze))
    paused_s = bronze[3].ending["paused_ms"] / 1e3
    assert max(gaps(bronze[3])) == pytest.approx(paused_s, abs=0.03) and paused_s < 0.3


def test_a_seed_goes_on_after_a_pause_with_one_made_of_it_and_the_position() -> None:
    bench = LanguageBench(max_running=1)
    bronze = bench.ask("bronze", band=1, max_tokens=60, seed=7)
    bench.run(0.2)
    bench.ask("gold")
    bench.settle()
    before = gaps(bronze).index(max(gaps(bronze))) + 1
    ids = list(bronze.prompt)
    for each in range(60):
        ids.append(next_token(ids, 7 if each < before else (7 + before * NEXT_SEED) % (1 << 63)))
    assert bronze.ending["paused"] == 1 and bronze.ids == ids[len(bronze.prompt) :]


def test_nothing_pauses_while_there_are_places() -> None:
    bench = LanguageBench()
    calls = [bench.ask(f"call {each}", band=each % 3, max_tokens=100) for each in range(4)]
    bench.settle()
    assert all(whole(each) and not each.ending["paused"] for each in calls)


def test_wanted_times_per_token_are_kept_by_pausing_the_less_urgent() -> None:
    bench = LanguageBench(sequence_s=0.004, max_running=8)  # 12 ms a step alone, 40 ms with eight
    bench.warm()
    bronze = [bench.ask(f"bronze {each}", band=2, max_tokens=300) for each in range(7)]
    bench.run(0.5)
    gold = bench.ask("gold", token_s=0.022, max_tokens=60)
    bench.run(1.5)
    assert (gold.times[-1] - gold.times[0]) / 59 <= 0.0225 and max(gaps(gold)[1:]) <= 0.0225
    assert max(bench.decoder.sizes[-60:]) >= 3, "as many of the others run beside it as its time allows"
    bench.settle()
    assert all(whole(each) for each in bronze)
    unhurried = bench.ask("gold", max_tokens=60)
    bronze = [bench.ask(f"bronze {each}", band=2, max_tokens=90) for each in range(7)]
    bench.settle()
    assert whole(unhurried) and not any(each.ending["paused"] for each in bronze)


def test_a_whole_answer_that_would_be_late_makes_the_less_urgent_pause() -> None:
    bench = LanguageBench(sequence_s=0.004, max_running=8)
    bench.warm()
    bronze = [bench.ask(f"bronze {each}", band=2, max_tokens=300) for each in range(7)]
    bench.run(0.5)
    gold = bench.ask("gold", stream=False, timeout_s=0.9, max_tokens=30)  # 1.2 s beside seven, 0.36 s alone
    bench.settle()
    assert whole(gold) and sum([each.ending["paused"] for each in bronze]) > 0


def test_the_prompt_of_a_less_urgent_call_waits_until_a_stream_is_ahead_of_its_times() -> None:
    for tokens, before_its_end in ((40, False), (200, True)):
        bench = LanguageBench(prompt_s=0.001, max_running=8, step_tokens=64)
        bench.warm()
        gold = bench.ask("gold", token_s=0.012, max_tokens=tokens)
        bench.run(0.1)
        bronze = bench.ask("b" * 256, band=1)  # 0.26 s of prompt
        bench.settle()
        assert (gold.times[-1] - gold.times[0]) / (tokens - 1) <= 0.012 and whole(bronze)
        assert (bronze.times[0] < gold.times[-1]) == before_its_end


def test_prompts_make_way_for_a_more_urgent_one() -> None:
    for tokens in (200, 2000):
        bench = LanguageBench(prompt_s=0.001, step_tokens=64)
        bronze = bench.ask("b" * tokens, band=1)
        bench.run(0.05)
        gold, asked_s = bench.ask("gold" * 10), bench.clock.now()
        bench.settle()
        assert gold.times[0] - asked_s < 0.15 and whole(bronze) and whole(gold)


def test_nobody_pauses_for_a_call_that_cannot_begin_yet() -> None:
    bench = LanguageBench(prompt_s=0.002, max_running=6, step_tokens=16)
    bronze = [bench.ask(f"bronze {each}", band=1, max_tokens=200) for each in range(3)]
    bench.run(0.3)
    gold = [bench.ask(f"{each}" * 300) for each in range(2)]  # one prompt at a time: 0.6 s each
    bench.settle()
    assert gold[0].times[0] < gold[1].times[0] - 0.5
    assert all(whole(each) and not each.ending["paused"] for each in bronze)


def test_a_band_that_is_passed_over_keeps_its_floor_and_its_silence_is_bounded() -> None:
    bench = LanguageBench()
    bronze = [bench.ask(f"bronze {each}", band=1, max_tokens=400, timeout_s=999) for each in range(4)]
    bench.run(0.3)
    bench.asked.clear()
    made = sum([len(each.ids) for each in bronze])
    gold = [bench.ask(f"gold {each}", max_tokens=2500, timeout_s=999) for each in range(6)]
    bench.run(25.0)
    assert not any(each.replies for each in gold), "there was no place that gold left free"
    golden, bronzed = (sum([len(each.ids) for each in of]) for of in (gold, bronze))
    assert 0.8 * FLOOR_SHARE < (bronzed - made) / (golden + bronzed - made) < 1.5 * FLOOR_SHARE
    steps = (len(bronze) + 1) * SLICE / (FLOOR_SHARE * 4)
    assert 0.5 < max([max(gaps(each)) for each in bronze]) < steps * 0.0125
    assert min([len(each.ids) for each in bronze]) > 50, "they take turns"


def test_a_newcomer_does_not_wait_for_the_floor_of_a_band_that_has_a_place() -> None:
    bench = LanguageBench(max_running=2)
    bench.warm()
    for each in range(5):
        bench.ask(f"bronze {each}", band=1, max_tokens=900)
    waits = []
    for each in range(60):
        bench.run(0.1)
        gold, asked_s = bench.ask(f"gold {each}", max_tokens=3), bench.clock.now()
        bench.run(0.2)
        waits.append(gold.times[0] - asked_s)
    assert max(waits) < 2.5 * 0.011


def test_tenants_share_a_band_by_tokens_also_with_those_that_run() -> None:
    bench = LanguageBench()
    many = [bench.ask(f"many {each}", tenant="many", max_tokens=400) for each in range(12)]
    bench.run(1.0)
    before = sum([len(each.ids) for each in many])
    one, asked_s = bench.ask("one", tenant="one", max_tokens=400), bench.clock.now()
    bench.run(0.4)
    assert one.times[0] - asked_s < SLICE * 0.012, "it does not wait for the end of an answer"
    for each in range(5):
        bench.ask(f"more {each}", tenant="one", max_tokens=400)
    bench.run(4.0)
    of_many = sum([len(each.ids) for each in many]) - before
    of_one = sum([len(each.ids) for each in bench.asked if each.call.ticket.tenant == "one"])
    assert of_one == pytest.approx(of_many, rel=0.2)
    bench.settle()
    assert all(whole(each) for each in bench.asked)


def test_a_tenant_is_charged_the_tokens_that_it_had() -> None:
    bench = LanguageBench(max_running=1)
    for each in range(60):
        bench.ask(f"short {each}", tenant="short", max_tokens=4)
        bench.ask(f"long {each}", tenant="long", max_tokens=200)
    bench.run(4.0)
    tokens = {"short": 0, "long": 0}
    for one in bench.asked:
        tokens[one.call.ticket.tenant] += len(one.ids) + len(one.prompt) * bool(one.ids)
    assert tokens["short"] == pytest.approx(tokens["long"], rel=0.25)


def test_a_call_that_is_late_already_does_not_interrupt_one_that_has_begun() -> None:
    bench = LanguageBench(max_running=1, prompt_s=0.001)
    bench.warm()
    begun = bench.ask("begun", max_tokens=100)
    bench.run(0.01)
    late = bench.ask("l" * 300, timeout_s=0.75)  # has to begin at 0.45 s, before the end of the second slice
    bench.settle()
    assert not begun.ending["paused"] and isinstance(late.result, DeadlineExceeded | QueueFull)


def test_one_tenants_calls_begin_by_deadline_and_what_has_begun_goes_on() -> None:
    bench = LanguageBench(max_running=1)
    first = bench.ask("first", max_tokens=100)
    bench.run(0.1)
    late, early = bench.ask("late", timeout_s=50), bench.ask("early", timeout_s=20)
    bench.settle()
    assert first.times[-1] < early.times[0] < early.times[-1] < late.times[0]
    assert not any(each.ending["paused"] for each in bench.asked)


def test_what_ends_sooner_than_a_resume_costs_is_not_paused() -> None:
    bench = LanguageBench(max_running=1)
    bench.warm()
    bronze = bench.ask("bronze", band=1, max_tokens=30)
    while len(bronze.ids) < 28:
        bench.run(0.001)
    gold = bench.ask("gold")
    bench.settle()
    assert not bronze.ending["paused"] and bronze.times[-1] < gold.times[0]


def test_what_a_pause_would_change_goes_on_but_less_urgent_bands_have_few_places_for_it() -> None:
    bench = LanguageBench(max_running=8)
    guided = [bench.ask(f"guided {each}", band=1, max_tokens=100, **GUIDE) for each in range(5)]
    plain = [bench.ask(f"plain {each}", band=1, max_tokens=100) for each in range(3)]
    bench.run(0.5)
    assert [bool(each.ids) for each in guided] == [True, True, False, False, False] and all(each.ids for each in plain)
    gold = [bench.ask(f"gold {each}", max_tokens=50, **GUIDE) for each in range(7)]
    bench.settle()
    assert all(whole(each) for each in bench.asked)
    assert not any(each.ending["paused"] for each in (*guided, *gold)) and any(each.ending["paused"] for each in plain)
    assert max([each.times[0] for each in gold]) < min([each.times[-1] for each in guided])


def test_what_a_pause_would_change_begins_anew_if_it_paused_in_the_step_of_its_first_token() -> None:
    bench = LanguageBench(max_running=1)
    bound = bench.ask("bound", band=1, **GUIDE)
    bench.run(0.005)  # its first step
    gold = bench.ask("gold")
    bench.settle()
    assert gold.times[-1] < bound.times[0] and not bound.ending["paused"] and whole(bound) and whole(gold)


def test_the_least_urgent_pauses_when_the_cache_is_full_and_a_newcomer_waits_for_room() -> None:
    bench = LanguageBench(cache_mb=1, max_running=4)  # 16 blocks of 16 tokens
    for learned in (False, True):
        calls = [bench.ask(f"{each}" * 50, band=each, max_tokens=150) for each in range(3)]
        while not all(each.replies for each in calls):
            bench.run(0.05)
            running = bench.served.order.running
            assert len(running) == 1 or sum([each.tokens for each in running]) <= 256 + len(running)
        assert all(whole(each) for each in calls)
        assert not calls[0].ending["paused"] and calls[0].times[-1] < calls[2].times[-1]
        if not learned:  # answers are short, it learns: more is admitted than has room in the end
            for _ in range(60):
                bench.ask("a", max_tokens=2)
            bench.settle()


def test_a_call_that_cannot_be_in_time_is_refused_with_the_time_when_one_like_it_will_be() -> None:
    bench = LanguageBench(max_running=2)
    bench.warm()
    for each in range(10):
        bench.ask(f"call {each}", max_tokens=100, ignore_eos=True)
    bench.run(0.2)
    refused = bench.ask("late", timeout_s=2.0)
    assert isinstance(refused.result, QueueFull) and "2." in refused.result.message
    retry_s = refused.result.retry_s
    patient = bench.ask("patient", band=1, timeout_s=30.0)
    bench.run(retry_s)
    again, asked_s = bench.ask("again", timeout_s=2.0), bench.clock.now()
    bench.settle()
    assert again.times[0] - asked_s <= 2.0 and whole(patient)
    never = bench.ask("n" * 8000, timeout_s=0.5)
    assert isinstance(never.result, DeadlineTooShort)


def test_a_prompt_that_may_be_cached_is_not_refused_for_its_length() -> None:
    bench = LanguageBench(prompt_s=0.001)
    bench.warm()
    bench.ask("p" * 4000, timeout_s=10)
    bench.settle()
    asked = []
    for each in range(40):
        asked.append(bench.ask("p" * 4000 + str(each), timeout_s=3.0))
        bench.settle()
    assert sum([whole(each) for each in asked]) >= 20, "the first that it admits shows that they are cached"


def silence_s(bench: LanguageBench, *streams: Asked) -> float:
    """The longest gap in these streams so far."""
    ends = [[] if each.replies else [bench.clock.now()] for each in streams]
    return max(
        [after - before for of, end in zip(streams, ends, strict=True) for before, after in pairwise(of.times + end)]
    )


def test_a_stream_is_not_silenced_by_guides_of_its_own_band() -> None:
    bench = LanguageBench()
    guided = bench.ask("guided", band=1, tenant="other", max_tokens=4000, timeout_s=999, **GUIDE)
    bronze = [bench.ask(f"bronze {each}", band=1, max_tokens=400, timeout_s=999) for each in range(2)]
    bench.run(0.3)
    for each in range(6):
        bench.ask(f"gold {each}", max_tokens=4000, timeout_s=999)
    bench.run(25)
    assert silence_s(bench, *bronze) < 3 * SLICE / (FLOOR_SHARE * 3) * 0.0125 and not guided.replies


def test_a_stream_is_not_silenced_by_a_whole_answer_that_will_be_late() -> None:
    bench = LanguageBench(max_running=2)
    stream = bench.ask("stream", max_tokens=2000, timeout_s=999)
    late = bench.ask("whole", stream=False, timeout_s=20, max_tokens=6000, ignore_eos=True)
    bench.run(0.3)
    for each in range(2):
        bench.ask(f"other {each}", tenant="other", max_tokens=5000, timeout_s=999)
    bench.run(15)
    assert silence_s(bench, stream) < 2.5 * SLICE * 0.0105 and not late.replies


@pytest.mark.parametrize("bound", [{}, GUIDE])
def test_long_prompts_of_less_urgent_bands_delay_neither_first_tokens_nor_streams(bound: dict[str, float]) -> None:
    bench = LanguageBench(prompt_s=0.001)
    stream = bench.ask("stream", band=1, max_tokens=1000, timeout_s=999)
    bench.run(0.1)
    for each in range(4):
        bench.ask(f"gold {each}", max_tokens=7000, timeout_s=999)
        bench.ask(f"{each}" * 7000, band=1, tenant="other", max_tokens=2, timeout_s=999, **bound)
    waits = []
    for each in range(60):
        gold, asked_s = bench.ask(f"newcomer {each}", tenant="newcomers", max_tokens=3), bench.clock.now()
        bench.run(1.0)
        waits.append(gold.times[0] - asked_s)
    assert max(waits) < 0.3 + SLICE * 0.0125, "a piece of a prompt, and the rest of a slice"
    assert silence_s(bench, stream) < 20


def test_paused_streams_use_the_slots_that_the_prompts_before_them_may_not_have_yet() -> None:
    bench = LanguageBench(prompt_s=0.001, max_running=8, step_tokens=64)
    bench.warm()
    bench.ask("gold", token_s=0.0125, max_tokens=3000, timeout_s=999)
    stream = bench.ask("stream", band=1, max_tokens=1000, timeout_s=999)
    bench.run(0.5)
    for each in range(8):
        bench.ask(f"burst {each}", max_tokens=40)
    bench.run(0.05)
    for each in range(5):
        bench.ask(f"{each}" * 1000, band=1, tenant=f"other {each}", timeout_s=999)
    bench.run(5)
    assert silence_s(bench, stream) < 1.0


def test_a_resume_that_was_slow_once_lets_short_answers_pause() -> None:
    bench = LanguageBench(max_running=2, prompt_s=0.001, cache_mb=16)
    long = bench.ask("l" * 3000, band=1, max_tokens=160)
    bench.run(3.4)
    for each in range(8):
        bench.ask(f"{each} gold" * 90)  # nothing of the long prompt stays cached
    bench.settle()
    assert long.ending["paused"] == 1 and long.ending["paused_ms"] > 1000
    short = [bench.ask(f"short {each}", band=1, max_tokens=100) for each in range(2)]
    bench.run(0.1)
    gold, asked_s = bench.ask("gold"), bench.clock.now()
    bench.settle()
    assert gold.times[0] - asked_s < 0.05 and all(whole(each) for each in (gold, *short))


KINDS = st.tuples(
    st.integers(0, 2),  # band
    st.sampled_from("ab"),  # tenant
    st.integers(1, 90),  # tokens
    st.booleans(),  # stream
    st.sampled_from([0.0, 0.01]),  # wanted time per token
    st.booleans(),  # a grammar or the like
    st.integers(0, 60),  # then this many milliseconds
    st.sampled_from(["", "", "", "leave", "die"]),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(KINDS, max_size=25), st.integers(1, 4), st.sampled_from([1, 64]))
def test_every_call_ends_once_with_each_of_its_tokens_once(
    kinds: list[tuple[int, str, int, bool, float, bool, int, str]], places: int, cache_mb: int
) -> None:
    bench = LanguageBench(max_running=places, cache_mb=cache_mb, fixed_s=0.004, sequence_s=0.002)
    for number, (band, tenant, tokens, stream, token_s, bound, then_ms, event) in enumerate(kinds):
        bench.ask(
            f"{number} of {tenant} ",
            band=band,
            tenant=tenant,
            stream=stream,
            token_s=token_s,
            max_tokens=tokens,
            **(GUIDE if bound else {}),
        )
        bench.run(then_ms / 1e3)
        if event == "leave":
            for each in bench.asked[number // 2 : number // 2 + 1]:
                if not each.replies and not each.left:
                    bench.leave(each)
        if event == "die":
            bench.decoder.die()
            bench.run(0.02)
            bench.decoder.restart()
    bench.settle()
    charged = 0
    for each in bench.asked:
        if each.left:
            assert not each.replies and each.ids == each.undisturbed[: len(each.ids)]
        elif isinstance(each.result, Answer):
            assert each.ids == each.undisturbed and each.ending["finish_reason"] == "length"
            assert each.ending["prompt_tokens"] == len(each.prompt)
            assert not (each.sampling.presence_penalty and each.ending["paused"])
            assert each.ending["completion_tokens"] == each.result.decoding.tokens_out == len(each.ids)
        else:
            assert each.ids == each.undisturbed[: len(each.ids)]
        if each.ids:
            charged += len(each.ids)
    order = bench.served.order
    assert not (len(order.waiting) or order.running or order.paused or bench.served._calls or bench.served._numbers)
    assert sum([row.tokens_out for row in bench.machine.devices.book.rows()]) == charged
    assert bench.machine.devices.host.read()[1] == bench.machine.devices.book.device_ns, "all device time has a row"
    answered = [each for each in bench.asked if each.replies and isinstance(each.result, Answer)]
    assert bench.statistics.success.count == len(answered)
    assert bench.statistics.failures[CallerLeft.outcome] == sum([each.left for each in bench.asked])
