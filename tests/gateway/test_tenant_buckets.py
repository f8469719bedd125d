"""How many traces a tenant's clients may ask for."""

from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_gateway.identity.tenant_buckets import BURST, MAX_TENANTS, RATE_PER_S, TenantBuckets


@settings(max_examples=60)
@given(st.lists(st.floats(0.0, 0.5), min_size=1, max_size=120))
def test_no_window_has_more_than_the_burst_and_the_rate(gaps: list[float]) -> None:
    traces, now, kept = TenantBuckets(), 100.0, []
    for gap in gaps:
        now += gap
        if traces.allows("a", now):
            kept.append(now)
    for index, begin in enumerate(kept):
        for count, end in enumerate(kept[index:], 1):
            assert count <= BURST + (end - begin) * RATE_PER_S + 1e-6


def test_a_burst_is_kept_and_another_tenant_has_its_own() -> None:
    traces = TenantBuckets()
    assert [traces.allows("a", 5.0) for _ in range(25)] == [True] * 20 + [False] * 5
    assert traces.allows("b", 5.0)
    assert traces.allows("a", 5.1 + 1e-9) and not traces.allows("a", 5.1 + 1e-9)


def test_tenants_are_bounded_and_forgotten_when_their_bucket_is_empty() -> None:
    traces = TenantBuckets()
    for number in range(MAX_TENANTS):
        assert traces.allows(str(number), 1.0)
    assert not traces.allows("another", 1.0)
    assert traces.allows("another", 2.0)
    assert len(traces._empty_s) == 1


def test_of_8192_tenants_each_goes_on_and_one_more_has_to_wait() -> None:
    traces = TenantBuckets()
    for number in range(8191):
        assert traces.allows(str(number), 1.0)
    assert traces.allows("the 8192nd", 1.0)
    for known in ("0", "8190", "the 8192nd"):
        assert traces.allows(known, 1.0)
    assert not traces.allows("the 8193rd", 1.0)
