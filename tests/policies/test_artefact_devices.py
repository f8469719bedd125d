"""Names of devices for `oriel engines build --for`."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_policies.artefacts.devices import CAPABILITIES, Target, lacking, parse_targets


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nvidia-l4,a100", [Target("nvidia-l4", "8.9"), Target("a100", "8.0")]),
        ("nvidia-tesla-t4, CPU", [Target("nvidia-tesla-t4", "7.5"), Target("cpu", "")]),
        ("l4,nvidia-l4", [Target("nvidia-l4", "8.9")]),
        ("12.0", [Target("12.0", "12.0")]),
    ],
)
def test_names_of_cloud_providers_become_compute_capabilities(text: str, expected: list[Target]) -> None:
    assert parse_targets(text) == expected


@pytest.mark.parametrize("text", ["", "l4,", "nvidia", "8", "tpu-v5e", "l4;a100"])
def test_an_unknown_name_is_named_with_those_that_are_known(text: str) -> None:
    with pytest.raises(
        ValueError, match="is not a known device: use cpu, a compute capability such as 8.9, or one of p100"
    ):
        parse_targets(text)


@given(st.lists(st.sampled_from([*CAPABILITIES, "cpu"]), min_size=1, max_size=8, unique=True))
def test_every_known_name_is_read_once_in_its_order(names: list[str]) -> None:
    found = parse_targets(",".join(names))
    assert [each.name for each in found] == names
    assert all(lacking(each, "tensorrt", each.capability) == "" for each in found if each.capability)


@pytest.mark.parametrize(
    ("target", "device", "why"),
    [
        (Target("cpu", ""), "x86_64 avx2", ""),
        (Target("nvidia-l4", "8.9"), "8.9", ""),
        (
            Target("nvidia-l4", "8.9"),
            "8.0",
            "this machine builds for compute capability 8.0: build on a machine with a GPU of compute capability 8.9, "
            "as nvidia-l4 has it, into the same folder",
        ),
        (
            Target("8.9", "8.9"),
            "x86_64 avx2",
            "c builds for the CPU of this machine: it takes a compiler for GPUs, on a machine with a GPU of compute "
            "capability 8.9",
        ),
        (Target("cpu", ""), "8.9", "c builds for GPUs: it has nothing for the CPU"),
    ],
)
def test_what_this_machine_cannot_build_is_said_in_a_sentence(target: Target, device: str, why: str) -> None:
    assert lacking(target, "c", device) == why
