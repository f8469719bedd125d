"""Queue depth and expected wait per priority, on a batcher in virtual time."""

import pytest

from .bench import Bench, spec


def test_wait_is_unknown_until_a_batch_has_run() -> None:
    bench = Bench(spec())
    bench.call()
    bench.clock.run()
    bench.call(band=1)
    assert bench.batcher.depths() == [(0, 0, 0.0), (1, 1, None)]
    assert bench.batcher.expected_wait_s(0) == 0.0, "nothing is known of what runs, and nothing waits"


def test_waits_by_priority_count_what_runs_and_what_goes_first() -> None:
    bench = Bench(spec(max_rows=8))
    bench.batcher.curve.observe(8, 0.080)  # 100 rows a second
    bench.batcher.curve.observe(1, 0.010)
    bench.call(rows=8)
    bench.clock.run()
    bench.clock.advance(0.040)  # half of it is done: 4 rows are left
    bench.call(rows=2, band=0)
    bench.call(rows=6, band=2)
    bench.call(rows=1, band=2)
    depths = {band: (items, wait) for band, items, wait in bench.batcher.depths()}
    assert depths[0] == (1, pytest.approx(0.06))
    assert depths[2] == (2, pytest.approx(0.13))
    assert bench.batcher.expected_wait_s(1) == pytest.approx(0.06), "a band that holds nothing waits for those above"


def test_calls_that_run_alone_wait_for_every_call_ahead() -> None:
    bench = Bench(spec(alone=True))
    bench.batcher.curve.observe(1, 0.010)
    bench.call()
    bench.clock.run()
    for _ in range(3):
        bench.call()
    assert bench.batcher.expected_wait_s(0) == pytest.approx(0.04)
