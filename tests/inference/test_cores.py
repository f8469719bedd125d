from hypothesis import given
from hypothesis import strategies as st

from oriel_inference.batching.cores import Contender, Cores


class Model(Contender):
    """A contender that notes when it is granted."""

    def __init__(self, cores: Cores, units: int, deadline: float, band: int = 0) -> None:
        super().__init__(units, lambda: self.wish, self.grant)
        self.wish: tuple[int, float] | None = (band, deadline)
        self.grants = 0

    def grant(self) -> None:
        self.grants += 1


def test_the_most_urgent_waiter_gets_the_next_cores() -> None:
    cores = Cores(2)
    running, late, early, urgent = (Model(cores, 2, d, b) for d, b in ((0, 0), (9, 1), (5, 1), (30, 0)))
    assert cores.acquire(running)
    assert not any(cores.acquire(model) for model in (late, early, urgent))
    cores.release(2)
    assert (late.grants, early.grants, urgent.grants) == (0, 0, 1)
    cores.release(2)
    assert (late.grants, early.grants) == (0, 1)


def test_a_small_run_does_not_overtake_an_urgent_wide_one() -> None:
    cores = Cores(2)
    narrow, wide, other = Model(cores, 1, 1), Model(cores, 2, 2), Model(cores, 1, 3)
    assert cores.acquire(narrow)
    assert not cores.acquire(wide)
    assert not cores.acquire(other)  # one core is free, but it is wide's turn
    cores.release(1)
    assert wide.grants == 1 and other.grants == 0


def test_waiter_that_lost_interest_is_passed_over() -> None:
    cores = Cores(1)
    running, gone, next_one = Model(cores, 1, 0), Model(cores, 1, 1), Model(cores, 1, 2)
    assert cores.acquire(running)
    assert not cores.acquire(gone) and not cores.acquire(next_one)
    gone.wish = None
    cores.release(1)
    assert gone.grants == 0 and next_one.grants == 1


@given(st.integers(1, 8), st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=80))
def test_units_in_use_never_exceed_the_total_and_nobody_waits_beside_enough_free_cores(
    total: int, script: list[tuple[int, bool]]
) -> None:
    cores = Cores(total)
    models = [Model(cores, min(total, 1 + index), float(index)) for index in range(5)]
    held = [0] * 5
    granted = [0] * 5
    for index, takes in script:
        model = models[index]
        if takes and not held[index] and model not in cores._waiting:
            if cores.acquire(model):
                held[index] = model.units
        elif held[index]:
            units, held[index] = held[index], 0
            cores.release(units)
        for number, each in enumerate(models):
            if each.grants > granted[number]:
                granted[number] = each.grants
                held[number] = each.units
        assert cores.free == total - sum(held) >= 0
        waiting = [each for each in models if each in cores._waiting]
        assert not waiting or min(waiting, key=lambda each: each.wish).units > cores.free
