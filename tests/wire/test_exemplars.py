"""Which traces are shown as examples of what a metric counts."""

from oriel_wire.observe.exemplars import MAX_AGE_S, Exemplar, Exemplars


def test_the_latest_trace_of_each_bucket_is_kept_until_it_is_too_old() -> None:
    now = [1000.0]
    exemplars: Exemplars[str] = Exemplars(clock=lambda: now[0])
    exemplars.note("gold", 0.02, "a", (0.01, 0.1))
    exemplars.note("gold", 0.03, "b", (0.01, 0.1))
    now[0] += MAX_AGE_S
    exemplars.note("gold", 7.0, "c", (0.01, 0.1))
    exemplars.note("bad", 1.0, "d")
    assert exemplars.of("gold") == {1: Exemplar("b", 0.03, 1000.0), 2: Exemplar("c", 7.0, 1300.0)}
    assert exemplars.of("bad") == {0: Exemplar("d", 1.0, 1300.0)} and not exemplars.of("other")
    now[0] += 0.1
    assert list(exemplars.of("gold")) == [2]


def test_series_are_bounded_and_old_ones_make_room() -> None:
    now = [0.0]
    exemplars: Exemplars[int] = Exemplars(max_series=2, clock=lambda: now[0])
    for number in range(3):
        exemplars.note(number, 1.0, "a")
    assert exemplars.of(1) and not exemplars.of(2)
    now[0] = MAX_AGE_S + 1.0
    exemplars.note(2, 1.0, "b")
    assert exemplars.of(2)[0].trace == "b" and not exemplars.of(0)
