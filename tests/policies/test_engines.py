"""How engines of others are told the urgency of a call, and how their reports are read."""

from itertools import pairwise

import pytest

from oriel_policies.upstreams.engines import ENGINES, EngineLimit, EngineLoad, read_load

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
