"""Finding a route: the table says what a walk over all routes says."""

import gc
from fnmatch import fnmatchcase
from weakref import ref

from hypothesis import given
from hypothesis import strategies as st

from oriel_policies.documents import Route, compile_documents
from oriel_policies.promise.routing import RouteTable


def route(
    model: str | None,
    *,
    service: str | None = None,
    version: str | None = None,
    headers: int = 0,
    for_tiers: tuple[str, ...] = (),
) -> Route:
    return Route(
        name=f"{model}{service}{version}{headers}",
        pool="p",
        model=model,
        service=service,
        version=version,
        headers=(("x-a", str(headers)),) if headers else (),
        split=(),
        split_by="tenant",
        shadow_pool="",
        shadow_share=0.0,
        sticky="",
        deterministic=False,
        cache_s=0.0,
        cache_shared=False,
        idempotent=False,
        hedge_s=0.0,
        for_tiers=for_tiers,
    )


patterns = st.text("ab*.", min_size=1, max_size=4)
routes = st.builds(
    lambda pattern, service, version, headers, for_tiers: route(
        None if service else pattern,
        service=pattern if service else None,
        version=None if service else version,
        headers=headers,
        for_tiers=for_tiers,
    ),
    patterns,
    st.booleans(),
    st.sampled_from([None, "1", "2"]),
    st.integers(0, 2),
    st.sampled_from([(), ("bronze",), ("gold", "bronze")]),
)


def walked(table: list[Route], kind: str, name: str, version: str, tier: str) -> list[Route]:
    out = []
    for entry in table:
        pattern = entry.model if kind == "model" else entry.service
        fits = pattern is not None and fnmatchcase(name, pattern) and entry.version in (None, version)
        if fits and (not entry.for_tiers or tier in entry.for_tiers):
            out.append(entry)
            if not entry.headers:
                break
    return out


@given(
    st.lists(routes, max_size=12),
    st.text("ab.", max_size=4),
    st.sampled_from(["", "1", "3"]),
    st.sampled_from(["", "gold", "bronze"]),
)
def test_the_first_that_fits_decides_whatever_the_table_looks_at(
    table: list[Route], name: str, version: str, tier: str
) -> None:
    found = RouteTable(table)
    for _ in range(2):  # the second time from memory
        assert list(found.for_model(name, version, tier)) == walked(table, "model", name, version, tier)
        assert list(found.for_service(name, tier)) == walked(table, "service", name, "", tier)


def test_a_thousand_routes_are_not_walked() -> None:
    """Of a thousand routes only those that share the name's beginning are looked at."""
    table = RouteTable([*(route(f"team-{n}-*") for n in range(1000)), *(route(f"m{n}") for n in range(1000))])
    looked = table._models._by_prefix
    assert len(looked) == 1000 and max(map(len, looked.values())) == 1 and len(table._models._lengths) == 3
    assert [r.model for r in table.for_model("team-77-x")] == ["team-77-*"]
    assert [r.model for r in table.for_model("m999")] == ["m999"]
    assert table.for_model("other") == ()


def test_the_memory_of_names_is_bounded() -> None:
    table = RouteTable([route("*")])
    for number in range(20_000):
        table.for_model(str(number))
    assert table._found.cache_info().currsize <= 16384


def test_a_table_that_is_replaced_needs_no_garbage_collector() -> None:
    """A gateway keeps what it has at its start out of every collection."""
    table = RouteTable([route("a")])
    assert table.for_model("a")
    gone = ref(table)
    gc.disable()
    try:
        del table
        assert gone() is None
    finally:
        gc.enable()


def test_documents_end_up_in_the_table() -> None:
    snapshot = compile_documents(
        {"a.toml": b'[pools.p]\nendpoints = ["127.0.0.1:1"]\n[[routes]]\nmodel = "a*"\npool = "p"\n'}
    )
    assert [r.name for r in RouteTable(snapshot.routes).for_model("ab")] == ["model:a*"]
