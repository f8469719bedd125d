"""When a pool cannot serve a call in time, and which calls can be given another model."""

from hypothesis import given
from hypothesis import strategies as st

from oriel_policies.upstreams.fallback import MODEL_IN_JSON, Hindrance, Prospect, hindrance, passed_over

seconds = st.floats(0.0, 100.0)
prospects = st.builds(Prospect, usable=st.booleans(), room=st.booleans(), wait_s=seconds, service_s=seconds)


@given(prospects, seconds)
def test_a_pool_serves_a_call_if_it_has_a_server_and_room_and_answers_in_time(it: Prospect, left_s: float) -> None:
    in_time = it.wait_s + it.service_s <= left_s
    assert (hindrance(it, left_s) is None) == (it.usable and it.room and in_time)


@given(prospects, seconds, seconds)
def test_more_time_never_makes_a_pool_worse(it: Prospect, left_s: float, more_s: float) -> None:
    if hindrance(it, left_s) is None:
        assert hindrance(it, left_s + more_s) is None


@given(seconds)
def test_what_is_not_known_yet_is_tried(left_s: float) -> None:
    assert hindrance(Prospect(usable=True, room=True), left_s) is None


def test_the_reason_is_what_a_client_would_be_told_first() -> None:
    late = Prospect(usable=False, room=False, wait_s=9.0)
    assert hindrance(late, 1.0) is Hindrance.NO_SERVER
    assert hindrance(Prospect(usable=True, room=False, wait_s=9.0), 1.0) is Hindrance.FULL
    assert hindrance(Prospect(usable=True, room=True, wait_s=9.0), 1.0) is Hindrance.LATE


@given(st.booleans(), st.sampled_from(["model", "service"]), st.sampled_from([*MODEL_IN_JSON, "mine"]), st.text("1"))
def test_another_model_needs_the_tenants_list_a_body_that_is_read_and_no_version(
    may: bool, kind: str, name: str, version: str
) -> None:
    said = passed_over("small", may_use=may, kind=kind, name=name, version=version)
    assert (not said) == (may and (kind == "model" or name in MODEL_IN_JSON) and not version)
    assert not passed_over("", may_use=False, kind=kind, name=name, version=version)
