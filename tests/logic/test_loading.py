"""Loading handler files, and the modules and files beside them."""

import os
import pickle
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from oriel_logic.loading.handlers import forget, load
from oriel_logic.loading.sources import HandlerFile, handler_files

HANDLER = """
    from oriel_logic import service
    import prep, tools.text
    from prep import WORD, Thing

    @service
    def words(request):
        import late
        return [WORD, prep.helper.WHO, tools.text.NAME, late.SAID]
"""


def lay(root: Path, **files: str) -> Path:
    for name, source in files.items():
        path = root / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
    return root


def version(root: Path, number: int) -> None:
    lay(
        root / f"words/{number}",
        handler=HANDLER,
        prep=f"import helper\nWORD = {number}\nclass Thing: pass",
        helper=f"WHO = 'helper {number}'",
        late=f"SAID = 'late {number}'",
        tools__text="from helper import WHO\nNAME = WHO + ' of text'",
    )


def test_every_version_has_its_own_neighbours(tmp_path: Path) -> None:
    version(tmp_path, 1)
    version(tmp_path, 2)
    first, second = load(handler_files([tmp_path]))
    assert (first.problem, second.problem) == ("", "")
    assert first.definition is not None and second.definition is not None
    assert first.definition.target(None) == [1, "helper 1", "helper 1 of text", "late 1"]
    assert second.definition.target(None) == [2, "helper 2", "helper 2 of text", "late 2"]


def test_values_of_a_neighbour_travel(tmp_path: Path) -> None:
    version(tmp_path, 1)
    (loaded,) = load(handler_files([tmp_path]))
    assert loaded.definition is not None
    thing = sys.modules[loaded.file.module].Thing
    assert pickle.loads(pickle.dumps(thing)) is thing


class Late(str):
    """The name of a module; while it is looked at, another thread's import of a further module ends."""

    def startswith(self, *words: Any) -> bool:
        sys.modules.setdefault("oriel_test_imported_meanwhile", sys)
        return super().startswith(*words)


def test_handlers_load_and_are_forgotten_while_another_thread_imports(tmp_path: Path, monkeypatch: Any) -> None:
    version(tmp_path, 1)
    monkeypatch.setitem(sys.modules, Late("oriel_test_late"), sys)
    try:
        (loaded,) = load(handler_files([tmp_path]))
        assert loaded.problem == ""
        del sys.modules["oriel_test_imported_meanwhile"]
        forget(loaded.file.module)
    finally:
        sys.modules.pop("oriel_test_imported_meanwhile", None)


def test_what_is_installed_goes_before_a_neighbour(tmp_path: Path) -> None:
    source = "from oriel_logic import service\nimport json, msgspec\n@service\ndef f(request): return json, msgspec\n"
    lay(tmp_path, json=source, msgspec="raise ValueError")
    loaded = load(handler_files([tmp_path]))
    (good,) = [each for each in loaded if each.definition is not None]
    assert good.definition is not None
    assert [module.__name__ for module in good.definition.target(None)] == ["json", "msgspec"]


def test_a_newer_file_of_the_same_size_and_second_is_another(tmp_path: Path) -> None:
    source = "from oriel_logic import service\nfrom helper import X\n@service\ndef one(request): return {0}, X\n"
    answers = []
    for turn in (1, 2):
        lay(tmp_path, one=source.format(turn), helper=f"X = {turn}")
        os.utime(tmp_path / "helper.py", (1000, 1000))
        os.utime(tmp_path / "one.py", (1000, 1000))
        file = HandlerFile(module=f"oriel_services.one@{turn}", path=tmp_path / "one.py", folder=tmp_path, name="one")
        (loaded,) = load([file])
        assert loaded.definition is not None
        answers.append(loaded.definition.target(None))
    assert answers == [(1, 1), (2, 2)]
    assert not (tmp_path / "__pycache__").exists()


def test_a_handler_that_is_forgotten_leaves_nothing(tmp_path: Path) -> None:
    version(tmp_path, 1)
    (loaded,) = load(handler_files([tmp_path]))
    assert [name for name in sys.modules if name.startswith(f"{loaded.file.module}.")]
    forget(loaded.file.module)
    assert not [name for name in sys.modules if name.startswith("oriel_services.words")]


def test_a_service_may_be_named_by_module_and_attribute(tmp_path: Path, monkeypatch: Any) -> None:
    lay(tmp_path, shipped="from oriel_logic import service\n@service\ndef ours(request): return 7\nother = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    files = [HandlerFile(module="shipped", attribute=name, name=name) for name in ("ours", "other", "none")]
    ours, other, none = load(files, log=False)
    assert ours.definition is not None and ours.definition.target(None) == 7
    assert other.problem == "TypeError: other is not a service: put @service on it"
    assert none.problem.startswith("AttributeError: ")
    del sys.modules["shipped"]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("import nothing_like_it", "line 1: ModuleNotFoundError: No module named 'nothing_like_it'"),
        ("x = 1\ndef broken(:\n", "line 2: SyntaxError: invalid syntax"),
        ("import sys\nsys.exit(3)", "line 2: SystemExit: 3"),
        ("\n\ndef f():\n    raise KeyError('a\\nb')\nf()", r"line 4: KeyError: 'a\nb'"),
    ],
)
def test_a_file_that_fails_to_import_stops_no_other(tmp_path: Path, source: str, problem: str) -> None:
    lay(tmp_path, bad=source, good="from oriel_logic import service\n@service\ndef good(request): return 1\n")
    bad, good = load(handler_files([tmp_path]), log=False)
    assert (bad.name, bad.problem) == ("bad", problem) and good.definition is not None


def test_the_first_of_a_name_is_kept_and_the_other_reported(tmp_path: Path) -> None:
    source = "from oriel_logic import service\n@service(name='same')\ndef f(request): return 1\n"
    lay(tmp_path, a=source, b=source)
    first, second = load(handler_files([tmp_path]))
    assert first.definition is not None and second.problem == "the name 'same' is taken by a.py"


def test_a_lone_service_has_its_files_name_and_others_their_own(tmp_path: Path) -> None:
    lay(
        tmp_path,
        lone="from oriel_logic import service\n@service\ndef f(request): return 1\n",
        named="from oriel_logic import service\n@service(name='mine')\ndef f(request): return 1\n",
        two="from oriel_logic import service\n@service\ndef one(request): ...\n@service\ndef other(request): ...\n",
    )
    assert [each.name for each in load(handler_files([tmp_path]))] == ["lone", "mine", "one", "other"]
