from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_logic.server.registry import Shares

VERSIONS = st.text("abc123.", min_size=1, max_size=4)
WEIGHTS = st.dictionaries(VERSIONS, st.integers(0, 1000), min_size=1, max_size=8).filter(lambda w: any(w.values()))


@given(weights=WEIGHTS, key=st.text(max_size=40))
def test_a_request_goes_where_it_went_before_and_only_where_there_is_a_share(weights: dict[str, int], key: str) -> None:
    picked = Shares("s", weights).pick(key)
    assert weights[picked] > 0
    assert Shares("s", dict(reversed(weights.items()))).pick(key) == picked


def test_the_shares_are_kept() -> None:
    shares = Shares("digits", {"1": 90, "2": 10})
    found = Counter(shares.pick(f"request-{number}") for number in range(20_000))
    assert 1800 < found["2"] < 2200


def test_a_larger_share_moves_only_what_it_gains() -> None:
    before, after = Shares("digits", {"1": 90, "2": 10}), Shares("digits", {"1": 80, "2": 20})
    keys = [f"request-{number}" for number in range(5000)]
    assert not [key for key in keys if before.pick(key) == "2" and after.pick(key) == "1"]


def test_two_services_split_the_same_ids_independently() -> None:
    keys = [f"request-{number}" for number in range(20_000)]
    one, other = Shares("one", {"1": 50, "2": 50}), Shares("other", {"1": 50, "2": 50})
    of_both = Counter((one.pick(key), other.pick(key)) for key in keys)
    assert min(of_both.values()) > 4500


def test_no_share_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="no version has a share"):
        Shares("s", {"1": 0})
