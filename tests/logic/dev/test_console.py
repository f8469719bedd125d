"""What `oriel logic dev` prints for the author of a service."""

import logging
from pathlib import Path

import pytest

from oriel_logic.dev.beside import Listed
from oriel_logic.dev.console import Shown, TracebackOfOwnFiles, banner, model_lines, place_of
from oriel_logic.errors import HandlerFailed
from oriel_logic.services.definition import define


async def label(text: str, models: object) -> str:
    """What it is."""
    return text


def test_the_banner_says_where_everything_is_and_what_cannot_run() -> None:
    services = [
        Shown(name="label", file="label.py", definition=define(label)),
        Shown(name="other", file="my/other.py", problem="line 3: SyntaxError: '(' was never closed"),
    ]
    lines = banner("http://127.0.0.1:8090", services, "faked by fakes.py").splitlines()
    assert lines[0] == "label   POST http://127.0.0.1:8090/v1/services/label"
    assert lines[1].startswith("  curl -H 'content-type: application/json' -d '{\"text\": \"text\"}' http://")
    assert lines[2] == "other   cannot run: my/other.py:3: SyntaxError: '(' was never closed"
    assert lines[3:5] == ["models  faked by fakes.py", "docs    http://127.0.0.1:8090/docs"]


@pytest.mark.parametrize(
    ("problem", "said"),
    [
        ("its setup failed: OSError: x", "a.py: its setup failed: OSError: x"),
        ("line 3: KeyError: 'x'", "a.py:3: KeyError: 'x'"),
        (
            "its self-test with s.json failed: line 3: KeyError: 'x'",
            "a.py:3: KeyError: 'x' (its self-test with s.json failed)",
        ),
        (
            "line 1: ModuleNotFoundError: No module named 'a.b'",
            "a.py:1: ModuleNotFoundError: No module named 'a.b': install it (python -m pip install a)",
        ),
        (
            "line 9: TypeError: 'coroutine' object is not subscriptable",
            "a.py:9: TypeError: 'coroutine' object is not subscriptable: is an `await` missing?",
        ),
    ],
)
def test_a_problem_has_its_place_and_the_remedy(problem: str, said: str) -> None:
    assert place_of(problem, "a.py") == said


def record(error: BaseException) -> logging.LogRecord:
    return logging.LogRecord(
        "x", logging.ERROR, __file__, 1, "it failed", (), (type(error), error, error.__traceback__)
    )


def failing(path: Path, source: str) -> BaseException:
    path.write_text(source)
    try:
        exec(compile(source, str(path), "exec"), {"fail": lambda: 1 / 0})
    except Exception as error:
        try:
            raise HandlerFailed("what the server makes of it") from error
        except HandlerFailed as wrapped:
            return wrapped
    raise AssertionError


def test_a_traceback_is_of_their_own_files(tmp_path: Path) -> None:
    error = failing(tmp_path / "mine.py", "def inner():\n    fail()\ninner()\n")
    text = TracebackOfOwnFiles(tmp_path).format(record(error))
    assert text.startswith("ERROR it failed\nTraceback") and text.endswith("ZeroDivisionError: division by zero")
    assert text.count("mine.py") == 2 and "test_console" not in text and "HandlerFailed" not in text


def test_a_syntax_error_has_no_frames_of_ours(tmp_path: Path) -> None:
    text = TracebackOfOwnFiles(tmp_path).format(record(failing(tmp_path / "mine.py", "x = (\n")))
    assert "mine.py" in text and "line 1" in text and "test_console" not in text


def test_without_a_frame_of_theirs_all_are_shown(tmp_path: Path) -> None:
    text = TracebackOfOwnFiles(tmp_path / "elsewhere").format(record(failing(tmp_path / "mine.py", "fail()\n")))
    assert "test_console" in text


def test_models_that_cannot_be_loaded_have_a_line_each() -> None:
    found = [
        Listed(name="good"),
        Listed(name="a", state="UNAVAILABLE", reason="a/config.pbtxt: max_batch_size: wrong"),
        Listed(name="b", state="UNAVAILABLE", reason="there is no model.onnx"),
        Listed(name="b", state="UNAVAILABLE", reason="there is no model.onnx"),
    ]
    assert model_lines(found, "http://h:1").splitlines() == [
        "good at http://h:1",
        "  cannot be loaded: a/config.pbtxt: max_batch_size: wrong",
        "  cannot be loaded: b: there is no model.onnx",
    ]
