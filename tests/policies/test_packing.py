"""Packing services into nodes: never over-committed, never dearer than one node for each replica."""

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oriel_tools.simulate.packing import Need, NodeKind, Packing, lower_bound, one_node_each, pack

from oriel_policies.errors import DoesNotFit

ACCELERATORS = ("", "a", "b")


@st.composite
def kinds(draw: st.DrawFn) -> list[NodeKind]:
    found = []
    for number in range(draw(st.integers(1, 5))):
        accelerator = draw(st.sampled_from(ACCELERATORS))
        found.append(
            NodeKind(
                name=f"k{number}",
                cpu_millis=draw(st.integers(0, 16_000)),
                memory_mib=draw(st.integers(0, 65_536)),
                price=draw(st.integers(0, 10**10)),
                accelerator=accelerator,
                accelerators=draw(st.integers(1, 4)) if accelerator else 0,
            )
        )
    return found


@st.composite
def needs(draw: st.DrawFn) -> list[list[Need]]:
    found = []
    for number in range(draw(st.integers(1, 6))):
        choices = []
        for _ in range(draw(st.integers(1, 2))):
            accelerator = draw(st.sampled_from(ACCELERATORS))
            choices.append(
                Need(
                    service=f"s{number}",
                    cpu_millis=draw(st.integers(0, 8000)),
                    memory_mib=draw(st.integers(0, 32_768)),
                    replicas=draw(st.integers(0, 200)),
                    accelerator=accelerator,
                    accelerators=draw(st.integers(1, 2)) if accelerator else 0,
                )
            )
        found.append(choices)
    return found


def check(packing: Packing, services: Sequence[Sequence[Need]], *, apart: bool) -> None:
    """Every replica has one place, and no node holds more than it has."""
    placed: dict[str, int] = {}
    of = {need.service: need for need in packing.needs}
    for nodes in packing.nodes:
        assert nodes.count > 0 and nodes.replicas
        content = [(of[service], count) for service, count in nodes.replicas.items()]
        assert all(count > 0 for _, count in content)
        assert sum([need.cpu_millis * count for need, count in content]) <= nodes.kind.cpu_millis
        assert sum([need.memory_mib * count for need, count in content]) <= nodes.kind.memory_mib
        assert sum([need.accelerators * count for need, count in content]) <= nodes.kind.accelerators
        assert all(need.accelerator == nodes.kind.accelerator for need, _ in content if need.accelerators)
        if apart and nodes.kind.accelerators:
            assert all(need.accelerators for need, _ in content)
        for service, count in nodes.replicas.items():
            placed[service] = placed.get(service, 0) + nodes.count * count
    assert placed == {need.service: need.replicas for need in packing.needs if need.replicas}
    for choices in services:
        assert any(need in packing.needs or not need.replicas for need in choices)


@settings(max_examples=150, deadline=None)
@given(needs(), kinds(), st.booleans())
def test_a_packing_holds_everything_and_is_not_dearer_than_a_node_for_each(
    services: list[list[Need]], offered: list[NodeKind], apart: bool
) -> None:
    try:
        packing = pack(services, offered, apart=apart)
    except DoesNotFit:
        assert all(
            any(need.replicas and not any(need.fits(kind) for kind in offered) for need in choices) or apart
            for choices in services
        ) or any(
            all(need.replicas and not any(need.fits(kind) for kind in offered) for need in choices)
            for choices in services
        )
        return
    check(packing, services, apart=apart)
    assert lower_bound(packing.needs, offered) <= packing.price
    assert packing.price <= one_node_each(packing.needs, offered, apart=apart).price


@settings(max_examples=100, deadline=None)
@given(needs(), kinds())
def test_a_further_kind_of_node_is_used_only_if_it_saves_money(
    services: list[list[Need]], offered: list[NodeKind]
) -> None:
    """The sets of kinds that are tried include those of the smaller offer."""
    try:
        before = pack(services, offered[:-1]) if len(offered) > 1 else None
    except DoesNotFit:
        return
    if before is not None:
        assert pack(services, offered).price <= before.price


def test_idle_cpus_of_accelerated_nodes_are_filled_before_nodes_are_opened() -> None:
    gpu = NodeKind(name="gpu", cpu_millis=8000, memory_mib=32_768, price=750, accelerator="t4", accelerators=1)
    cpu = NodeKind(name="cpu", cpu_millis=4000, memory_mib=8192, price=170)
    model = Need(service="m", cpu_millis=2000, memory_mib=8192, replicas=4, accelerator="t4", accelerators=1)
    text = Need(service="t", cpu_millis=2000, memory_mib=5120, replicas=13)
    together, apart = pack([[model], [text]], [gpu, cpu]), pack([[model], [text]], [gpu, cpu], apart=True)
    assert (together.price, apart.price) == (4 * 750 + 170, 4 * 750 + 13 * 170)


def test_the_cheaper_accelerator_is_chosen() -> None:
    own = NodeKind(name="own", cpu_millis=4000, memory_mib=8192, price=228, accelerator="own", accelerators=1)
    gpu = NodeKind(name="gpu", cpu_millis=8000, memory_mib=32_768, price=750, accelerator="t4", accelerators=1)
    size = {"service": "m", "cpu_millis": 1000, "memory_mib": 1024, "accelerators": 1}
    choices = [Need(accelerator="own", replicas=66, **size), Need(accelerator="t4", replicas=44, **size)]
    assert pack([choices], [own, gpu]).price == 66 * 228
    assert pack([choices], [gpu]).price == 44 * 750


def test_what_fits_nowhere_is_named() -> None:
    small = NodeKind(name="small", cpu_millis=1000, memory_mib=1024, price=1)
    with pytest.raises(DoesNotFit, match="big"):
        pack([[Need(service="big", cpu_millis=2000, memory_mib=1, replicas=1)]], [small])
    assert pack([], [small]).price == 0


@pytest.mark.parametrize(("replicas", "price"), [(1, 2), (4, 7), (5, 9), (8, 14)])
def test_the_lower_bound_is_what_the_dearest_resource_costs_rounded_up(replicas: int, price: int) -> None:
    """Four replicas fill the processors of a node for 7, and a part of its memory."""
    node = NodeKind(name="n", cpu_millis=4000, memory_mib=64_000, price=7, accelerator="", accelerators=0)
    need = Need(service="s", cpu_millis=1000, memory_mib=1000, replicas=replicas, accelerator="", accelerators=0)
    assert lower_bound([need], [node]) == price
