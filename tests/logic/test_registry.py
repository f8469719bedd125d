from collections.abc import Callable
from pathlib import Path

import pytest

from oriel_logic.errors import ServiceBroken, ServiceUnknown
from oriel_logic.loading import load
from oriel_logic.registry import Registry
from oriel_logic.sources import handler_files

Services = Callable[..., Path]
GOOD = """
    from oriel_logic import service
    @service
    def {0}(request): return 1
"""


def test_a_file_with_a_decorated_function_is_a_service(services: Services) -> None:
    registry = Registry(
        load(handler_files([services(one=GOOD.format("one"), helper="X = 1", _private="raise ValueError")]))
    )
    assert registry.find("one").target(None) == 1
    assert [facts["name"] for facts in registry.describe()] == ["one"]
    assert registry.describe_one("one")["state"] == "ready"


def test_a_handler_may_import_its_neighbour_but_not_serve_its_services(services: Services) -> None:
    folder = services(
        one=GOOD.format("one"), two="from oriel_services.one import one\nfrom helper import X\n", helper="X = 1"
    )
    assert [(each.name, each.file.label) for each in load(handler_files([folder]))] == [("one", "one.py")]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("import nothing_like_it", "line 1: ModuleNotFoundError: No module named 'nothing_like_it'"),
        ("x = 1\ndef broken(:\n", "line 2: SyntaxError: invalid syntax"),
        ("import sys\nsys.exit(3)", "line 2: SystemExit: 3"),
        (
            "from oriel_logic import service\n@service\ndef f(*a): ...",
            "line 2: NotAService: `f` must name its parameters: '*a' cannot be served",
        ),
        ("\n\ndef f():\n    raise KeyError('a\\nb')\nf()", r"line 4: KeyError: 'a\nb'"),
    ],
)
def test_a_file_that_fails_to_import_stops_no_other(services: Services, source: str, problem: str) -> None:
    registry = Registry(load(handler_files([services(bad=source, good=GOOD.format("good"))])))
    assert registry.find("good")
    with pytest.raises(ServiceBroken, match="GET /v1/services says why"):
        registry.find("bad")
    facts = registry.describe_one("bad")
    assert (facts["state"], facts["problem"]) == ("broken", problem)


def test_unknown_names_are_unknown() -> None:
    with pytest.raises(ServiceUnknown):
        Registry([]).find("x")
    with pytest.raises(ServiceUnknown):
        Registry([]).describe_one("x")


def test_the_first_of_a_name_is_served_and_the_other_reported(services: Services, tmp_path: Path) -> None:
    first = services(a=GOOD.format("same"), b=GOOD.format("same"))
    other = tmp_path / "other"
    other.mkdir()
    (other / "a.py").write_text("")
    registry = Registry(load(handler_files([first, other])))
    assert registry.describe_one("same")["file"] == "a.py"
    problems = [(facts["name"], facts["file"], facts.get("problem")) for facts in registry.describe()]
    assert ("same", "b.py", "the name 'same' is taken by a.py") in problems
    assert len(problems) == 2, "a second file of the same name is served like any other"


def test_a_service_may_turn_out_broken_later(services: Services) -> None:
    registry = Registry(load(handler_files([services(one=GOOD.format("one"))])))
    registry.mark_broken("one", "its setup failed")
    registry.mark_broken("one", "again")
    registry.mark_broken("unknown", "ignored")
    with pytest.raises(ServiceBroken):
        registry.find("one")
    assert registry.describe_one("one")["problem"] == "its setup failed"
    assert len(registry.definitions()) == 1
