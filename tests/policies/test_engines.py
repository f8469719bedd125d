"""How engines of others are told the urgency of a call, and how their reports are read."""

import json
from itertools import pairwise

import pytest

from oriel_policies.upstreams.engines import ENGINES, EngineLimit, EngineLoad, read_load
from oriel_policies.upstreams.prefixes import BOUNDARIES, PrefixHomes, beginnings

URGENT_FIRST = [(0, 0.0), (0, 0.5), (0, 8.0), (0, 100.0), (1, -2.0), (1, 3600.0), (255, 1.0)]
NOW_S = 1.8e9


@pytest.mark.parametrize(("engine", "sign"), [("vllm", 1), ("sglang", -1), ("trtllm", -1), ("triton", 1)])
def test_bands_come_first_then_the_time_left_in_the_sense_of_each_engine(engine: str, sign: int) -> None:
    priority = ENGINES[engine].priority
    assert priority is not None
    numbers = [sign * float(priority(band, left_s, NOW_S + left_s)) for band, left_s in URGENT_FIRST]
    assert numbers == sorted(numbers)
    for (one, other), (before, after) in zip(pairwise(URGENT_FIRST), pairwise(numbers), strict=True):
        assert before < after or one[0] == other[0]


def test_numbers_stay_within_what_the_engines_take() -> None:
    for band in (0, 255):
        for left_s in (-5.0, 0.0, 86400.0):
            due_s = NOW_S + left_s
            assert 0 <= int(ENGINES["vllm"].priority(band, left_s, due_s)) < 2**53  # type: ignore[misc]
            assert 0.0 <= float(ENGINES["trtllm"].priority(band, left_s, due_s)) <= 1.0  # type: ignore[misc]
            assert 0 <= int(ENGINES["sglang"].priority(band, left_s, due_s)) < 2**31  # type: ignore[misc]


def test_sglang_preempts_for_another_tier_and_never_within_one() -> None:
    priority = ENGINES["sglang"].priority
    assert priority is not None
    assert int(priority(1, 0.0, 0.0)) - int(priority(1, 1e6, 0.0)) < 10  # its default threshold
    assert int(priority(0, 1e6, 0.0)) - int(priority(1, 0.0, 0.0)) > 10


@pytest.mark.parametrize(
    ("engine", "text", "load"),
    [
        ("vllm", b'vllm:num_requests_waiting{a="1"} 2.0\nvllm:num_requests_waiting{a="}"} 1\n', EngineLoad(3, 0, 0)),
        (
            "sglang",
            b"# x\nsglang:num_queue_reqs 1e0\nsglang:num_running_reqs 4\nsglang:token_usage 0.5\n",
            EngineLoad(1, 4, 0.5),
        ),
        ("trtllm", b"trtllm_num_requests_waiting_max 7\n", None),
        ("triton", b"nv_inference_pending_request_count NaN\n", None),
        ("vllm", b"vllm:num_requests_waiting -1\n" + b"vllm:num_requests_waiting " + b"9" * 5000, None),
        ("vllm", b"vllm:num_requests_waiting x\n" * 1024 + b"vllm:num_requests_waiting 1\n", None),
        ("openai", b"vllm:num_requests_waiting 1\n", None),
    ],
)
def test_the_load_is_read_by_the_engines_own_names(engine: str, text: bytes, load: EngineLoad | None) -> None:
    assert read_load(ENGINES[engine], text) == load


def test_limit_finds_the_seats_of_an_engine_and_leaves_one_call_waiting() -> None:
    limit, seats = EngineLimit(1024), 16
    for _ in range(50):
        limit.note(max(0, limit.limit - seats), limit.limit, engines=1, queued=True)
    assert limit.limit == seats + 1


def test_limit_follows_seats_that_become_fewer_and_stays_when_nobody_waits() -> None:
    limit = EngineLimit(1024, start=64)
    limit.note(60, 64, engines=2, queued=True)
    assert limit.limit == 64  # perhaps only until the engine's next step
    for _ in range(3):
        limit.note(60, 64, engines=2, queued=True)
        assert limit.limit == 6
    limit.note(0, 3, engines=2, queued=False)
    assert limit.limit == 6
    for _ in range(2):
        limit.note(500, 3, engines=2, queued=False)
    assert limit.limit == 2


def messages(*texts: str) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text} for text in texts]}).encode()


def test_a_conversation_goes_on_where_its_longest_known_beginning_is() -> None:
    homes = PrefixHomes[str]()
    first = beginnings("t", messages("a" * 900))
    assert len(first) == 1
    homes.note(first, "one")
    homes.note(beginnings("t", messages("a" * 900, "b" * 900)), "two")
    assert homes.find(beginnings("t", messages("a" * 900, "b" * 900, "c" * 9000))) == "two"
    assert homes.find(beginnings("t", messages("a" * 900, "d" * 900))) == "two"  # the shared beginning went there last
    assert homes.find(beginnings("t", messages("z" * 900))) is None


def test_a_tenant_learns_nothing_about_the_prompts_of_another() -> None:
    one, other = beginnings("a", messages("x" * 5000)), beginnings("b", messages("x" * 5000))
    assert len(one) == len(other) == 6 and not set(one) & set(other)


def test_work_and_memory_of_beginnings_are_bounded() -> None:
    assert len(beginnings("t", messages("x" * 3_000_000))) == len(BOUNDARIES)
    assert beginnings("t", b'{"model":"m"}') == beginnings("t", b"") == ()
    homes = PrefixHomes[int](3)
    for number in range(5):
        homes.note((b"%d" % number, b"same"), number)
    assert [homes.find((each,)) for each in (b"1", b"2", b"3", b"4", b"same")] == [None, None, 3, 4, 4]
