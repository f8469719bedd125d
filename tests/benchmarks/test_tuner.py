"""What `benchmarks/goodput.py tuner` computes from its figures, and in which order its rival walks its grid."""

import pytest
from inference_bench.tuner import CASES, DELAYS_US, Compared, Side, kept, objective_of, report, walk

from oriel_tools.simulate.profile import Profile, Size
from oriel_tools.tune.setting import Setting

PRESENT = Setting(max_rows=4, instances=1, threads=1)


def walked(throughput: dict[tuple[int, int], float]) -> list[tuple[int, int, int]]:
    """The (instances, rows, delay) that are visited, of a model with this throughput by instances and rows."""
    points, found = walk(PRESENT, DELAYS_US), list[tuple[int, int, int]]()
    setting = next(points)
    while True:
        found.append((setting.instances, setting.max_rows, setting.delay_us))
        try:
            setting = points.send(throughput.get((setting.instances, setting.max_rows), 0.0))
        except StopIteration:
            return found


def test_the_grid_is_walked_in_model_analyzers_order() -> None:
    growing = {(instances, rows): float(rows) for instances in range(1, 6) for rows in (1, 2, 4)}
    found = walked(growing)
    assert found[0] == (1, 4, 0), "the setting as it is"
    assert found[1:6] == [(1, 1, 0), (1, 1, 100), (1, 1, 200), (1, 1, 300), (1, 2, 0)]
    assert [each[0] for each in found[1:]] == [instances for instances in range(1, 6) for _ in range(12)]


def test_batches_grow_only_as_long_as_throughput_does() -> None:
    found = walked({(1, 1): 5.0, (1, 2): 5.0, (2, 1): 1.0, (2, 2): 2.0, (2, 4): 1.0})
    assert [each[:2] for each in found if each[2] == 300] == [(1, 1), (1, 2), (2, 1), (2, 2), (2, 4)] + [
        each for instances in (3, 4, 5) for each in ((instances, 1), (instances, 2))
    ]


def case(mine: float, theirs: float, *, same: bool = False, objection: str = "") -> Compared:
    other = PRESENT if same else Setting(max_rows=2, instances=1, threads=1)
    return Compared(
        case="c",
        objective="o",
        tuner=Side(setting=PRESENT, seconds=60.0, runs=80, goodput=mine, attained=0.9),
        grid=Side(setting=other, seconds=59.0, runs=12, goodput=theirs, attained=0.9),
        objection=objection,
    )


@pytest.mark.parametrize(
    ("compared", "verdict"),
    [
        (case(102.0, 100.0), "better"),
        (case(100.9, 100.0), "tie"),
        (case(100.0, 100.9), "tie"),
        (case(98.0, 100.0), "worse"),
        (case(120.0, 100.0, same=True), "tie"),
        (case(120.0, 100.0, objection="late"), "open"),
        (case(0.0, 0.0), "tie"),
    ],
)
def test_a_tie_or_an_open_case_is_no_win(compared: Compared, verdict: str) -> None:
    assert compared.verdict == verdict
    assert kept([compared]) is (verdict == "better")


def test_eight_of_ten_are_wanted() -> None:
    better, tie = case(110.0, 100.0), case(100.0, 100.0)
    assert kept([better] * 8 + [tie] * 2) and not kept([better] * 7 + [tie] * 3) and not kept([])
    text = "\n".join(report([better] * 8 + [tie, case(1.0, 2.0, objection="late")]))
    assert "better in 8, tie in 1, worse in 0, open in 1 of 10 cases" in text and "c: not quoted: late" in text


def test_objectives_are_multiples_of_what_was_measured() -> None:
    assert len(CASES) == 10 and len({each.model for each in CASES.values()}) == 4
    profile = Profile(model="m", max_rows=10, sizes=[Size(rows=1, mean_ms=2.0), Size(rows=10, mean_ms=20.0)])
    found = objective_of(CASES["encoder-2"], profile)
    assert (found.bound_ms, found.rate) == (20.0, 650.0)
