"""`fakes.py` in place of inference servers."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from oriel_logic.client.models import ModelSpec
from oriel_logic.dev.fakes import FakeServers, together
from oriel_logic.observe.stages import Ledger
from oriel_logic.testing import FakeModels
from oriel_wire.context import CallContext
from oriel_wire.errors import StartFailed

FAKES = """
from oriel_logic.testing import FakeModels
models = FakeModels({"any": {"y": NUMBER}})
"""


async def answer(servers: FakeServers, call: CallContext) -> object:
    ledger = Ledger(call.trace)
    found = await servers.bind(call, ledger).infer("any", {"x": 1})
    assert [(each.name, each.attributes["oriel.model"]) for each in ledger.stages] == [("infer", "any")]
    return int(found["y"])


async def test_they_answer_and_are_read_again_when_saved(
    tmp_path: Path, call: Callable[..., CallContext], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "fakes.py"
    path.write_text(FAKES.replace("NUMBER", "1"))
    servers = FakeServers([path])
    assert await answer(servers, call()) == 1
    path.write_text(FAKES.replace("NUMBER", "23"))
    assert await answer(servers, call()) == 23
    with caplog.at_level(logging.ERROR):
        path.write_text("models = (")
        assert await answer(servers, call()) == 23, "the old ones stay"
    assert "fakes.py: line 1: SyntaxError" in caplog.text
    path.write_text(FAKES.replace("NUMBER", "456"))
    assert await answer(servers, call()) == 456


@pytest.mark.parametrize(
    ("source", "words"),
    [("x = 1", "there is no `models` in it"), ("1 / 0", "line 1: ZeroDivisionError"), ("x = (", "line 1: SyntaxError")],
)
def test_fakes_that_cannot_be_loaded_are_said_at_the_start(tmp_path: Path, source: str, words: str) -> None:
    (tmp_path / "fakes.py").write_text(source)
    with pytest.raises(StartFailed, match=words):
        FakeServers([tmp_path / "fakes.py"])


async def test_the_fakes_of_several_services_stand_in_together(
    tmp_path: Path, call: Callable[..., CallContext]
) -> None:
    paths = [tmp_path / name / "fakes.py" for name in ("a", "b")]
    for path, number in zip(paths, (1, 2), strict=True):
        path.parent.mkdir()
        own = f'models.models["{path.parent.name}"] = {{"y": {number}}}'
        path.write_text(FAKES.replace("NUMBER", str(number)) + own)
    servers = FakeServers(paths)
    assert servers.names == ["a", "any", "b"]
    assert await answer(servers, call()) == 1, "the first one's"
    found = await servers.bind(call(), Ledger(call().trace)).infer("b", {"x": 1})
    assert int(found["y"]) == 2
    paths[1].write_text(FAKES.replace("any", "b").replace("NUMBER", "34"))
    found = await servers.bind(call(), Ledger(call().trace)).infer("b", {"x": 1})
    assert int(found["y"]) == 34


def test_a_model_that_is_faked_twice_is_what_the_first_one_says() -> None:
    first = FakeModels({"m": {}})
    second = FakeModels({"m": {}, "n": {}}, specs=[ModelSpec(name=name, inputs={}, outputs={}) for name in "mn"])
    assert list(together([first, second]).specs) == ["n"]
    assert together([first]) is first
