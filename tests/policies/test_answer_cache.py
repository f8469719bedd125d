"""The cache stays within its bytes, forgets in the right order and never gives out what is too old."""

from hypothesis import given
from hypothesis import strategies as st

from oriel_policies.upstreams.answer_cache import AnswerCache

steps = st.lists(
    st.tuples(
        st.sampled_from(["put", "get"]),
        st.integers(0, 12),  # key
        st.integers(0, 2),  # owner
        st.integers(0, 40),  # bytes
        st.floats(0.0, 3.0),  # time to live
        st.floats(0.0, 1.0),  # time that passes
    ),
    max_size=60,
)


@given(steps)
def test_bounds_and_ages_hold_whatever_is_done(done: list[tuple[str, int, int, int, float, float]]) -> None:
    cache: AnswerCache[int] = AnswerCache(max_bytes=100, owner_share=0.5)
    model: dict[bytes, tuple[int, float, float]] = {}
    now = 0.0
    for number, (what, key, owner, size, ttl_s, passes_s) in enumerate(done):
        now += passes_s
        name = bytes([key])
        if what == "put":
            kept = cache.put(name, str(owner), number, size, now, ttl_s)
            assert kept == (size <= 50 and ttl_s > 0.0)
            model.pop(name, None)
            if kept:
                model[name] = number, now, now + ttl_s
        elif (found := cache.get(name, now)) is not None:
            value, age_s = found
            stored, stored_s, until_s = model[name]
            assert value == stored and now < until_s and age_s == now - stored_s
        assert cache.size_bytes <= 100 and all(size <= 50 for size in cache._owner_bytes.values())
        assert cache.size_bytes == sum(entry.size_bytes for entry in cache._entries.values())
        assert sum(map(len, cache._owners.values())) == len(cache)


def test_the_least_recently_used_goes_first() -> None:
    cache: AnswerCache[str] = AnswerCache(max_bytes=30, owner_share=1.0)
    for name in "abc":
        cache.put(name.encode(), "t", name, 10, 0.0, 60.0)
    assert cache.get(b"a", 1.0) == ("a", 1.0)
    cache.put(b"d", "t", "d", 10, 1.0, 60.0)
    assert [name for name in "abcd" if cache.get(name.encode(), 1.0)] == ["a", "c", "d"]


def test_an_owner_that_stores_without_end_pushes_out_only_its_own() -> None:
    cache: AnswerCache[str] = AnswerCache(max_bytes=100)
    cache.put(b"quiet", "quiet", "kept", 20, 0.0, 60.0)
    for number in range(1000):
        cache.put(number.to_bytes(2, "big"), "loud", "x", 10, 0.0, 60.0)
    assert cache.get(b"quiet", 1.0) is not None and cache.size_bytes == 40


def test_nothing_is_kept_without_bytes_for_it() -> None:
    cache: AnswerCache[str] = AnswerCache(max_bytes=0)
    assert not cache.put(b"a", "t", "a", 1, 0.0, 60.0) and cache.get(b"a", 0.0) is None
