"""Which servers of a pool have which models."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from oriel_policies.upstreams.placement import FULL, PAYBACK_S, PlacedModel, PlacedServer, Placement

GIB = 1 << 30


def server(
    name: str,
    *,
    gib: int = 4,
    stays: bool = True,
    spare: Sequence[str] = (),
    refused: Sequence[str] = (),
    **work: float,
) -> PlacedServer:
    """Make a server. spare: models that it has without work for them. work: of the others that it has."""
    return PlacedServer(
        name=name, budgets={"host": gib * GIB}, work=work, has={*work, *spare}, refused=refused, stays=stays
    )


def model(name: str, *, gib: int = 1, load_s: float = 10.0, in_use: bool = True) -> PlacedModel:
    return PlacedModel(name=name, sizes={"host": gib * GIB}, load_s=load_s, in_use=in_use)


def test_models_that_no_server_has_spread_and_few_move_when_a_server_comes() -> None:
    names = [f"m{number}" for number in range(200)]
    three = ["s0", "s1", "s2"]

    def firsts(servers: list[str]) -> list[str | None]:
        placement = Placement([PlacedServer(name=name) for name in servers], ())
        return [placement.first_server(name, servers) for name in names]

    before = firsts(three)
    assert firsts(three[::-1]) == before
    assert all(40 <= before.count(name) <= 95 for name in three)
    after = firsts([*three, "s3"])
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"s3"} and len(moved) < 90


def test_the_first_server_is_one_that_can_be_called_and_stays() -> None:
    placement = Placement([server("a"), server("b"), server("c", stays=False)], ())
    assert {placement.first_server(f"m{number}", ["a", "b", "c"]) for number in range(50)} == {"a", "b"}
    assert placement.first_server("m", ["b"]) == "b" and placement.first_server("m", ["c"]) is None


@given(
    st.lists(st.dictionaries(st.sampled_from("abcd"), st.floats(0.0, 1.0), max_size=4), min_size=1, max_size=6),
    st.integers(0, 6),
    st.floats(0.0, 600.0),
)
def test_a_model_gets_servers_until_they_have_room_for_its_work(
    works: list[dict[str, float]], staying: int, load_s: float
) -> None:
    servers = [server(f"s{number}", stays=number < staying, **work) for number, work in enumerate(works)]
    placement, able = Placement(servers, ()), [each for each in servers if each.stays] or servers
    for name in "abcd":
        chosen = placement.servers_for(model(name, load_s=load_s))
        assert chosen and len(set(chosen)) == len(chosen) and set(chosen) <= {each.name for each in able}
        named = {each.name: each for each in servers}
        room = [FULL - sum(v for k, v in named[each].work.items() if k != name) for each in chosen]
        left = placement.work(name) - sum(max(0.0, each) for each in room)
        worthwhile = {each.name for each in able if (FULL - sum(each.work.values())) * PAYBACK_S > load_s}
        assert left * PAYBACK_S <= load_s + 1e-6 or worthwhile <= set(chosen)


def test_work_beyond_a_server_is_loaded_on_another_if_that_pays_for_the_load() -> None:
    servers = [server("a", m=FULL + 0.1), server("b")]
    assert Placement(servers, [model("m", load_s=0.09 * PAYBACK_S)]).next_loads() == {"b": "m"}
    assert Placement(servers, [model("m", load_s=0.11 * PAYBACK_S)]).next_loads() == {}


def test_a_pool_whose_servers_are_all_full_loads_nothing() -> None:
    servers = [server("a", m=0.9), server("b", n=0.85, o=0.1), server("c", p=0.79)]
    models = [model(name) for name in "mnop"]
    assert Placement(servers, models).next_loads() == {}
    assert Placement([*servers, server("d")], models).next_loads() == {"d": "m"}


def test_a_server_that_refused_a_model_is_passed_over() -> None:
    servers = [server("a", m=0.9), server("b"), server("c")]
    (first,) = Placement(servers, [model("m")]).next_loads()
    refusing = [server(name, refused=["m"] if name == first else []) for name in ("b", "c")]
    (second,) = Placement([servers[0], *refusing], [model("m")]).next_loads()
    assert {first, second} == {"b", "c"}


def test_two_models_that_share_a_full_server_are_loaded_on_others() -> None:
    servers = [server("a", m=0.5, n=0.5), server("b"), server("c")]
    loads = Placement(servers, [model("m"), model("n")]).next_loads()
    assert set(loads.values()) <= {"m", "n"} and loads and "a" not in loads
    quiet = [server("a", m=0.4, n=0.3), server("b"), server("c")]
    assert Placement(quiet, [model("m"), model("n")]).next_loads() == {}


def test_a_model_stays_where_it_is_although_its_order_names_another() -> None:
    servers = [server("a"), server("b"), server("c")]
    first = Placement(servers, ()).first_server("m", ["a", "b", "c"])
    others = [each for each in servers if each.name != first]
    there = [server(others[0].name, m=0.3), others[1], server(str(first))]
    placement = Placement(there, [model("m")])
    assert placement.servers_for(model("m")) == [others[0].name] and placement.next_loads() == {}


def test_only_models_in_use_that_some_server_has_are_loaded() -> None:
    servers = [server("a", m=0.9), server("b")]
    assert Placement(servers, [model("m", in_use=False), model("nowhere")]).next_loads() == {}


def test_a_server_loads_one_model_at_a_time() -> None:
    servers = [server("a", m=0.9), server("b", n=0.9), server("c", m=0.9, n=0.9), server("d")]
    assert list(Placement(servers, [model("m"), model("n")]).next_loads()).count("d") <= 1


def test_a_model_of_a_server_that_the_autoscaler_removes_next_is_loaded_on_another_one() -> None:
    servers = [server("old"), server("young", stays=False, m=0.2)]
    assert Placement(servers, [model("m")]).next_loads() == {"old": "m"}


def test_models_in_use_need_servers_for_their_bytes() -> None:
    two = [server("a", spare=["m"]), server("b")]
    models = [model(f"m{number}", gib=3) for number in range(4)]
    assert Placement(two, [*models, model("cold", gib=4, in_use=False)]).replicas() == 3.0
    two = [server("a", spare=["m"], refused=["n"]), server("b", refused=["m"])]
    assert Placement(two, [model("m")]).replicas() == 0.25
    assert Placement(two, [model("n")]).replicas() == 3.0, "it found no room, and no server has it"
    assert Placement(two, [model("n", gib=5)]).replicas() == 0.0, "no server could ever hold it"
