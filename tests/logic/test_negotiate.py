import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_logic.server.negotiate import MAX_ACCEPT, MAX_RANGES, choose

PICTURE = ("image/png", "image/jpeg", "application/json")
MEDIA = st.sampled_from(["image/png", "image/jpeg", "text/plain", "application/json", "image/*", "*/*"])
QUALITY = st.integers(0, 1000).map(lambda thousandths: f"{thousandths / 1000:.3f}")


@pytest.mark.parametrize(
    ("accept", "chosen"),
    [
        ("", "image/png"),
        ("*/*", "image/png"),
        ("image/jpeg", "image/jpeg"),
        ("image/*", "image/png"),
        ("IMAGE/JPEG", "image/jpeg"),
        ("image/png;q=0.5, image/jpeg", "image/jpeg"),
        ("image/*;q=0.9, application/json", "application/json"),
        ("image/*, image/png;q=0", "image/jpeg"),  # the more specific range counts
        ("application/json;q=0.2, text/html", "application/json"),
        ("text/html,application/xhtml+xml,*/*;q=0.8", "image/png"),
        ("image/jpeg; level=1 ; q=0.3, image/png;q=0.2", "image/jpeg"),
        ("text/html", None),
        ("*/*;q=0", None),
        ("image/png;q=0, image/jpeg;q=0, application/json;q=0", None),
        ("nonsense", "image/png"),
        ("image/jpeg;q=2", "image/png"),
        ("image/jpeg;q=nan", "image/png"),
        ("image/jpeg;q=1e-1", "image/png"),
        ("*/png", "image/png"),
        (",,;,", "image/png"),
    ],
)
def test_the_client_gets_what_it_likes_best(accept: str, chosen: str | None) -> None:
    assert choose(accept, PICTURE) == chosen


def test_nothing_offered_is_nothing_chosen() -> None:
    assert choose("*/*", ()) is None


@pytest.mark.parametrize("accept", ["image/jpeg," * MAX_RANGES + "image/jpeg", "image/jpeg" + " " * MAX_ACCEPT])
def test_a_header_past_its_bounds_counts_as_absent(accept: str) -> None:
    assert choose(accept, PICTURE) == "image/png"


@given(st.text(max_size=200))
def test_any_header_has_an_answer(accept: str) -> None:
    assert choose(accept, PICTURE) in (*PICTURE, None)


@given(st.lists(st.tuples(MEDIA, QUALITY), min_size=1, max_size=5), st.permutations(PICTURE))
def test_nothing_refused_is_chosen_and_nothing_offered_is_liked_more(
    ranges: list[tuple[str, str]], offered: list[str]
) -> None:
    def liked(media: str) -> float:
        by_range = dict.fromkeys((each for each, _ in ranges), 0.0)
        for each, quality in ranges:
            by_range[each] = max(by_range[each], float(quality))
        return next((by_range[each] for each in (media, media.split("/")[0] + "/*", "*/*") if each in by_range), 0.0)

    chosen = choose(", ".join(f"{each};q={quality}" for each, quality in ranges), offered)
    best = max(map(liked, offered))
    assert (chosen is None) == (best == 0)
    if chosen is not None:
        assert liked(chosen) == best and chosen == next(each for each in offered if liked(each) == best)
