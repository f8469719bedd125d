"""Which optimisation profile of an engine runs a batch, and what is said about shapes that none takes."""

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_policies.upstreams.engine_profiles import Profile, Shape, Span, most_rows, smallest_fitting, why_outside

NAMES = ("ids", "mask")


def profile(smallest: Shape, largest: Shape, best: Shape | None = None) -> Profile:
    return Profile(dict.fromkeys(NAMES, Span(smallest, best or largest, largest)))


@st.composite
def spans(draw: st.DrawFn, rank: int) -> Span:
    low = draw(st.tuples(*[st.integers(0, 6)] * rank))
    best = tuple(size + draw(st.integers(0, 4)) for size in low)
    return Span(low, best, tuple(size + draw(st.integers(0, 4)) for size in best))


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Profile], dict[str, Shape]]:
    ranks = {name: draw(st.integers(0, 3)) for name in NAMES}
    made = st.builds(lambda a, b: Profile({"ids": a, "mask": b}), spans(ranks["ids"]), spans(ranks["mask"]))
    profiles = draw(st.lists(made, min_size=1, max_size=4))
    return profiles, {name: draw(st.tuples(*[st.integers(0, 12)] * rank)) for name, rank in ranks.items()}


@given(cases())
def test_the_chosen_profile_takes_the_batch_and_no_smaller_one_does(
    case: tuple[list[Profile], dict[str, Shape]],
) -> None:
    profiles, shapes = case
    chosen = smallest_fitting(profiles, shapes)
    fitting = [
        index
        for index, each in enumerate(profiles)
        if all(
            low <= size <= high
            for name, span in each.spans.items()
            for low, size, high in zip(span.smallest, shapes[name], span.largest, strict=True)
        )
    ]
    assert (chosen is None) == (not fitting)
    if chosen is not None:
        sizes = {i: sum(prod(span.largest) for span in profiles[i].spans.values()) for i in fitting}
        assert chosen in fitting and sizes[chosen] == min(sizes.values())


@given(cases())
def test_what_no_profile_takes_is_named_with_its_shape_and_with_what_is_allowed(
    case: tuple[list[Profile], dict[str, Shape]],
) -> None:
    profiles, shapes = case
    if smallest_fitting(profiles, shapes) is not None:
        return
    text = why_outside(profiles, shapes)
    named = [name for name in NAMES if text.startswith(f"input {name!r} has shape {list(shapes[name])}, ")]
    assert len(named) == 1 and len(text) < 500
    wrong = [each.spans[named[0]] for each in profiles if not each.spans[named[0]].takes(shapes[named[0]])]
    assert any(str(list(span.largest)) in text for span in wrong)


def test_among_profiles_of_one_size_the_one_that_was_optimised_for_such_a_batch_runs_it() -> None:
    few, many = profile((1, 1), (8, 512), best=(1, 512)), profile((1, 1), (8, 512), best=(8, 512))
    for rows, expected in ((1, 1), (8, 0)):
        assert smallest_fitting([many, few], dict.fromkeys(NAMES, (rows, 512))) == expected


@pytest.mark.parametrize(
    ("profiles", "shapes", "text"),
    [
        (
            [profile((1, 1), (1, 512))],
            {"ids": (1, 600), "mask": (1, 600)},
            "input 'ids' has shape [1, 600], its profile takes [1, 1] to [1, 512]",
        ),
        (
            [profile((1, 1), (1, 64)), profile((1, 65), (1, 512))],
            {"ids": (2, 8), "mask": (2, 8)},
            "input 'ids' has shape [2, 8], its 2 profiles take [1, 1] to [1, 64] or [1, 65] to [1, 512]",
        ),
        (
            [profile((1, 1), (1, 64)), profile((1, 65), (1, 512))],
            {"ids": (1, 8), "mask": (1, 100)},
            "input 'mask' has shape [1, 100], and no profile takes it beside the other inputs: profile 0 takes [1, 1] "
            "to [1, 64]",
        ),
        (
            [profile((2, 3), (2, 3))],
            {"ids": (2, 3), "mask": (2,)},
            "input 'mask' has shape [2], its profile takes [2, 3]",
        ),
    ],
)
def test_the_sentence_about_a_shape(profiles: list[Profile], shapes: dict[str, Shape], text: str) -> None:
    assert smallest_fitting(profiles, shapes) is None
    assert why_outside(profiles, shapes) == text


def test_most_rows() -> None:
    assert most_rows([profile((1, 1), (1, 512)), profile((1, 1), (8, 64))]) == 8
    mixed = Profile({"ids": Span((1, 1), (4, 4), (8, 8)), "mask": Span((1,), (2,), (3,))})
    assert most_rows([mixed]) == 3
    assert most_rows([Profile({"scale": Span((), (), ())})]) == 0
    assert most_rows([]) == 0
