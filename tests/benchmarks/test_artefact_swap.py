"""How the benchmark of swaps under load judges its windows."""

import pytest
from inference_bench.artefact_swap import WINDOWS, Latencies, verdict


@pytest.mark.parametrize(("swap_s", "failed", "met"), [(0.014, 0, [True, True]), (0.016, 1, [False, False])])
def test_a_swap_is_held_to_the_steady_window_and_to_no_failed_call(swap_s: float, failed: int, met: list[bool]) -> None:
    found = Latencies()
    for window in WINDOWS:
        found.seconds[window] = [0.01] * 100
    found.seconds["swap"] = [swap_s] * 100
    found.failed["reload"] = failed
    assert [each for _, _, each in verdict(found)] == met
