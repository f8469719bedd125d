"""Which servers of a pool have which models."""

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import example, given
from hypothesis import strategies as st

from oriel_policies.upstreams.placement import FULL, PAYBACK_S, PlacedModel, PlacedServer, next_steps, place

GIB = 1 << 30


def server(name: str, *, age_s: float = 1.0, gib: int = 4, loaded: Sequence[str] = (), **more: bool) -> PlacedServer:
    return PlacedServer(name=name, age_s=age_s, budgets={"host": gib * GIB}, loaded=tuple(loaded), **more)  # type: ignore[arg-type]


def model(name: str, work: float = 0.0, *, gib: int = 1, load_s: float = 10.0, in_use: bool = True) -> PlacedModel:
    return PlacedModel(name=name, sizes={"host": gib * GIB}, load_s=load_s, work=work, in_use=in_use)


def applied(servers: Sequence[PlacedServer], models: Sequence[PlacedModel]) -> list[PlacedServer]:
    """Carry out steps until there are none."""
    current = {each.name: each for each in servers}
    for _ in range(200):
        homes = place(current.values(), models)
        steps = next_steps(current.values(), models, homes)
        if not steps:
            return list(current.values())
        for step in steps:
            it = current[step.server]
            loaded = {*it.loaded, step.model} if step.action == "load" else {*it.loaded} - {step.model}
            current[step.server] = replace(it, loaded=tuple(sorted(loaded)))
    raise AssertionError("the steps do not come to an end")


_models = st.lists(
    st.builds(
        model,
        st.sampled_from("abcdefghij"),
        st.floats(0.0, 3.0),
        gib=st.integers(1, 5),
        load_s=st.floats(0.1, 600.0),
        in_use=st.booleans(),
    ),
    unique_by=lambda each: each.name,
    max_size=10,
)
_servers = st.lists(
    st.builds(
        server,
        st.sampled_from(["s1", "s2", "s3", "s4", "s5"]),
        age_s=st.floats(0.0, 1e5),
        loaded=st.lists(st.sampled_from("abcd"), unique=True, max_size=2),
        stays=st.booleans(),
    ),
    unique_by=lambda each: each.name,
    min_size=1,
    max_size=5,
)


@given(_servers, _models, st.randoms())
def test_the_order_in_which_servers_and_models_are_known_does_not_matter(
    servers: list[PlacedServer], models: list[PlacedModel], chance: object
) -> None:
    shuffled, others = list(servers), list(models)
    chance.shuffle(shuffled)  # type: ignore[attr-defined]
    chance.shuffle(others)  # type: ignore[attr-defined]
    assert place(servers, models) == place(shuffled, others)


@given(_servers, _models)
def test_what_is_placed_fits_into_every_server(servers: list[PlacedServer], models: list[PlacedModel]) -> None:
    homes = place(servers, models)
    for each in servers:
        here = [it for it in models if each.name in homes[it.name].servers]
        # A model that its first call loads needs no memory yet, and one that leaves none any more.
        here = [it for it in here if it.in_use or "stays" in homes[it.name].reason]
        assert sum(it.sizes["host"] for it in here) <= each.budgets["host"]


@given(_servers, _models)
def test_every_model_in_use_is_somewhere_unless_no_server_has_room_for_it(
    servers: list[PlacedServer], models: list[PlacedModel]
) -> None:
    homes = place(servers, models)
    for each in models:
        if not homes[each.name].servers:
            assert each.in_use and "no server has room" in homes[each.name].reason


@example(
    [server("s2", age_s=0, loaded=["d"]), server("s1", age_s=0, loaded=["c"], stays=False)],
    [
        model("c", 3.0, gib=4, in_use=True),
        model("d", 0.0, gib=1, in_use=True),
        model("e", 0.0, gib=1, in_use=True),
    ],
)
@example(
    [
        server("s1", age_s=0, loaded="b", stays=False),
        server("s2", age_s=0, loaded="b", stays=False),
        server("s3", age_s=0, loaded="a"),
    ],
    [model("a", gib=3, load_s=1), model("b", gib=4, load_s=1), model("c", gib=2, load_s=1)],
)
@given(_servers, _models)
def test_the_steps_end_with_every_placed_model_loaded_and_never_take_the_last_copy_of_one_in_use(
    servers: list[PlacedServer], models: list[PlacedModel]
) -> None:
    known = {each.name: each for each in models}
    fitting = []
    for each in servers:  # a server never holds more than its budget
        held, kept = 0, []
        for name in each.loaded:
            if name in known and held + known[name].sizes["host"] <= each.budgets["host"]:
                held += known[name].sizes["host"]
                kept.append(name)
        fitting.append(replace(each, loaded=tuple(kept)))
    before = {name for each in fitting for name in each.loaded if name in known and known[name].in_use}
    after = applied(fitting, models)
    homes = place(after, models)
    used = [each.name for each in models if each.in_use]
    if all(homes[name].servers for name in used):  # otherwise the pool needs another server
        assert all(any(name in it.loaded for it in after) for name in used)
    lost = before - {name for it in after for name in it.loaded}
    assert all(not homes[name].servers for name in lost)


def test_work_of_whole_servers_gets_whole_servers_and_the_rest_the_fullest_that_has_place() -> None:
    servers = [server("old", age_s=30), server("mid", age_s=20), server("new", age_s=10)]
    homes = place(servers, [model("big", 2 * FULL), model("half", 0.4), model("small", 0.3)])
    assert set(homes["big"].servers) == {"old", "mid"}
    assert homes["half"].servers == homes["small"].servers == ("new",)


def test_a_model_stays_where_it_is_unless_a_move_pays_for_its_load() -> None:
    # The server has 0.1 of its share too little for both: 60 s of work in ten minutes.
    servers = [server("a", loaded=["m", "n"]), server("b")]
    both = [model("m", 0.5), model("n", 0.4, load_s=0.1 * PAYBACK_S + 1.0)]
    assert place(servers, both)["n"].servers == ("a",)
    cheap = [model("m", 0.5), model("n", 0.4, load_s=0.1 * PAYBACK_S - 1.0)]
    assert "b" in place(servers, cheap)["n"].servers


def test_a_model_is_loaded_elsewhere_before_it_is_taken_out() -> None:
    servers = [server("a", gib=2, loaded=["m", "n"]), server("b", gib=2)]
    models = [model("k", 0.7, gib=2), model("m", 0.1), model("n", 0.05)]
    homes = place(servers, models)
    (home,) = homes["k"].servers
    after = applied(servers, models)
    assert all(any(name in it.loaded for it in after) for name in ("k", "m", "n"))
    first = next_steps(servers, models, homes)
    assert all(step.action == "load" for step in first if home == "a")


def test_a_server_that_loads_gets_nothing_else_to_do() -> None:
    servers = [replace(server("a"), loading=("m",))]
    models = [model("m", 0.1), model("n", 0.1)]
    assert next_steps(servers, models, place(servers, models)) == []


def test_what_only_the_youngest_server_has_is_loaded_on_an_older_one_before_the_autoscaler_removes_it() -> None:
    servers = [server("old", age_s=100), server("young", age_s=1, loaded=["m"], stays=False)]
    models = [model("m", 0.2)]
    homes = place(servers, models)
    assert "old" in homes["m"].servers
    steps = next_steps(servers, models, homes)
    assert [(step.action, step.server, step.model) for step in steps] == [("load", "old", "m")]


def test_a_cold_model_has_the_same_server_for_every_gateway_and_few_models_move_when_a_server_comes() -> None:
    names = [f"m{number}" for number in range(200)]
    models = [model(name, in_use=False) for name in names]
    three = [server(f"s{number}") for number in range(3)]
    before = place(three, models)
    assert all(len(before[name].servers) == 1 for name in names)
    counts = {each.name: sum(before[name].servers == (each.name,) for name in names) for each in three}
    assert all(40 <= count <= 95 for count in counts.values())
    after = place([*three, server("s3")], models)
    moved = [name for name in names if before[name] != after[name]]
    assert all(after[name].servers == ("s3",) for name in moved) and len(moved) < 90


def test_a_cold_model_goes_where_there_is_room() -> None:
    full = server("full", gib=2, loaded=["x"])
    models = [model("x", 0.1, gib=2), *[model(f"m{number}", in_use=False) for number in range(20)]]
    homes = place([full, server("free")], models)
    assert all(homes[f"m{number}"].servers == ("free",) for number in range(20))


def test_a_model_that_fits_nowhere_is_named_with_the_reason() -> None:
    homes = place([server("a", gib=1)], [model("m", 0.1, gib=2)])
    assert homes["m"].servers == () and "no server has room for 2147483648 bytes on host" in homes["m"].reason
