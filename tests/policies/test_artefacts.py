"""Compiled artefacts: fingerprints, states, tolerances, refusals and retirement, over all orders of events."""

from dataclasses import fields, replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from oriel_policies.artefacts.comparison import (
    TOLERANCES,
    OutputError,
    Tolerance,
    disagreement,
    parse_tolerance,
    tolerance_of,
)
from oriel_policies.artefacts.fingerprint import ArtefactKey, is_fingerprint, key_of
from oriel_policies.artefacts.lifecycle import ArtefactLife, ArtefactState
from oriel_policies.artefacts.retirement import StoredArtefact, retired

PARTS = [field.name for field in fields(ArtefactKey)]
texts = st.text(max_size=6)
keys = st.builds(ArtefactKey, **dict.fromkeys(PARTS, texts))


# Fingerprints


@given(keys, keys)
def test_fingerprints_are_equal_exactly_if_all_parts_are(one: ArtefactKey, other: ArtefactKey) -> None:
    assert (one.fingerprint == other.fingerprint) == (one == other)
    assert is_fingerprint(one.fingerprint)


@given(keys, st.sampled_from(PARTS), texts)
def test_every_part_counts(key: ArtefactKey, part: str, text: str) -> None:
    assume(getattr(key, part) != text)
    assert replace(key, **{part: text}).fingerprint != key.fingerprint


@given(keys)
def test_text_that_moves_from_one_part_to_the_next_is_another_fingerprint(key: ArtefactKey) -> None:
    moved = replace(key, driver="", device=key.device + key.driver)
    assert (moved.fingerprint == key.fingerprint) == (key.driver == "")


@given(keys)
def test_a_key_that_was_written_is_read_again(key: ArtefactKey) -> None:
    assert key_of(key.parts()) == key


@pytest.mark.parametrize(
    "parts", [{}, {"model": "a"}, dict.fromkeys(PARTS, 1), {**dict.fromkeys(PARTS, "a"), "x": "y"}]
)
def test_other_parts_are_no_key(parts: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="not the parts"):
        key_of(parts)


# States


@given(st.lists(st.sampled_from(ArtefactState)))
def test_nothing_serves_that_was_not_checked_and_what_left_never_comes_back(states: list[ArtefactState]) -> None:
    life, lived = ArtefactLife("c"), [ArtefactState.ABSENT]
    for state in states:
        try:
            life.become(state)
        except ValueError:
            assert life.state is lived[-1]
            continue
        lived.append(state)
    for number, state in enumerate(lived):
        if state is ArtefactState.SERVING:
            assert lived[number - 2 : number] == [ArtefactState.CHECKING, ArtefactState.READY]
            assert lived[number + 1 :][:1] in ([], [ArtefactState.REFUSED], [ArtefactState.RETIRED])
        if state is ArtefactState.RETIRED:
            assert set(lived[number:]) == {ArtefactState.RETIRED}
        if state is ArtefactState.REFUSED:
            assert set(lived[number + 1 :]) <= {ArtefactState.RETIRED}


def test_every_artefact_can_serve_and_the_model_may_leave_in_any_state() -> None:
    life = ArtefactLife("c")
    for state in ("absent", "building", "checking", "ready", "serving", "refused", "retired", "retired"):
        life.become(ArtefactState(state))
        left = ArtefactLife("c")
        left.state = life.state
        left.become(ArtefactState.RETIRED)


def test_a_refused_artefact_says_why() -> None:
    life = ArtefactLife("onnxruntime-graph")
    life.become(ArtefactState.REFUSED, "it is too slow")
    assert life.text == "compiled by onnxruntime-graph: refused, it is too slow"


# Outputs


@pytest.mark.parametrize(
    ("datatype", "precision", "expected"),
    [
        ("FP32", "", TOLERANCES["FP32"]),
        ("FP32", "FP16", TOLERANCES["FP16"]),
        ("FP32", "FP64", TOLERANCES["FP32"]),
        ("FP16", "BF16", TOLERANCES["BF16"]),
        ("FP32", "INT8", Tolerance(1e-1, 1e-1)),
        ("INT8", "INT8", Tolerance()),
        ("INT64", "FP16", Tolerance()),
        ("BYTES", "", Tolerance()),
        ("BOOL", "", Tolerance()),
    ],
)
def test_the_coarser_of_output_and_computation_decides(datatype: str, precision: str, expected: Tolerance) -> None:
    assert tolerance_of(datatype, precision) == expected


def test_an_own_tolerance_is_for_floating_point_only() -> None:
    own = Tolerance(1.0, 0.0)
    assert tolerance_of("FP32", own=own) == own
    assert tolerance_of("INT32", own=own) == Tolerance()


tolerances = st.just(0.0) | st.floats(1e-30, 1e9)


@given(tolerances, tolerances)
def test_a_tolerance_that_was_written_is_read_again(absolute: float, relative: float) -> None:
    assert parse_tolerance(f"absolute={absolute:.6e}".replace("e+", "e")) == Tolerance(float(f"{absolute:.6e}"))
    read = parse_tolerance(f" relative={relative:.6e} , absolute = 1 ".replace("e+", "e"))
    assert read == Tolerance(1.0, float(f"{relative:.6e}"))


@pytest.mark.parametrize(
    "text", ["", "1e-3", "absolute=", "absolute=nan", "absolute=-1", "absolute=1,absolute=2", "x=1"]
)
def test_other_text_is_no_tolerance(text: str) -> None:
    with pytest.raises(ValueError, match="must be of the form"):
        parse_tolerance(text)


def test_the_first_output_that_disagrees_is_named_with_its_errors() -> None:
    good = OutputError(name="a", datatype="FP32", elements=4, absolute=1e-7)
    bad = OutputError(name="b", datatype="FP32", elements=8, outside=3, not_finite=1, absolute=0.5, relative=0.25)
    assert disagreement([good]) == ""
    assert disagreement([good, bad]) == (
        "output 'b' differs in 3 of 8 elements, 1 of them NaN or infinite in only one of the two: largest error 0.5 "
        "absolute, 0.25 relative"
    )
    assert disagreement([replace(good, shapes="[1] for [2]")]) == "output 'a' has another shape: [1] for [2]"


# Retirement

stored = st.lists(
    st.builds(
        StoredArtefact,
        fingerprint=st.uuids().map(str),
        size_bytes=st.integers(0, 100),
        used_s=st.floats(0, 100),
        in_use=st.booleans(),
    ),
    unique_by=lambda each: each.fingerprint,
)


@given(stored, st.integers(0, 500), st.floats(0, 100))
def test_what_stays_fits_or_is_in_use_and_what_goes_was_used_earlier(
    found: list[StoredArtefact], max_bytes: int, max_age_s: float
) -> None:
    gone = retired(found, 100.0, max_bytes=max_bytes, max_age_s=max_age_s)
    stays = [each for each in found if each.fingerprint not in gone]
    assert not any(each.in_use for each in found if each.fingerprint in gone)
    idle = [each for each in stays if not each.in_use]
    assert all(100.0 - each.used_s <= max_age_s for each in idle)
    assert not idle or sum(each.size_bytes for each in stays) <= max_bytes
    young = [each for each in found if each.fingerprint in gone and 100.0 - each.used_s <= max_age_s]
    assert all(each.used_s <= other.used_s for each in young for other in idle)
