import os
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from oriel_logic.bodies.upload import Upload
from oriel_logic.services.definition import NotAService, define, definition_of, service


def test_an_async_function_takes_request_models_and_context() -> None:
    @service
    async def digits(request: Any, models: Any, ctx: Any) -> None:
        """Reads digits.

        At length.
        """

    found = definition_of(digits)
    assert found is not None
    assert (found.name, found.shape, found.description) == ("digits", "function", "Reads digits.")
    assert not found.runs_in_worker("")


def test_a_plain_function_runs_in_a_worker() -> None:
    @service(name="thumb-nail")
    def thumbnail(request: Any) -> bytes:
        return b""

    found = definition_of(thumbnail)
    assert found is not None and found.name == "thumb-nail" and found.runs_in_worker("")
    assert thumbnail(None) == b""


def test_a_class_is_a_chain_around_one_model() -> None:
    @service
    class Digits:
        model = "mnist"
        model_version = 3

        def pre(self, request: Any) -> Any: ...
        async def post(self, outputs: Any) -> Any: ...

    found = definition_of(Digits)
    assert found is not None
    assert (found.name, found.shape, found.model, found.model_version) == ("digits", "chain", "mnist", "3")
    assert found.stages() == ("pre", "post")
    assert found.runs_in_worker("pre") and not found.runs_in_worker("post")


def test_the_mark_is_not_inherited() -> None:
    @service
    class Base:
        model = "m"

        def pre(self, request: Any) -> Any: ...
        def post(self, outputs: Any) -> Any: ...

    class Child(Base): ...

    assert definition_of(Child) is None


def any_number(*images: Any) -> None: ...


def misspelt(item: "Itme") -> None: ...  # type: ignore[name-defined]  # noqa: F821


def unreadable(value: object) -> None: ...


def two_streams(first: AsyncIterator[int], second: AsyncIterator[int]) -> None: ...


def late(file: Upload) -> None: ...


class NoStage:
    def pre(self, request: Any) -> Any: ...


class TakesMore:
    model = "m"

    def pre(self, request: Any) -> Any: ...
    def post(self, outputs: Any, threshold: float) -> Any: ...


class NoModel:
    def pre(self, request: Any) -> Any: ...
    def post(self, outputs: Any) -> Any: ...


class NoPost:
    model = "m"

    def pre(self, request: Any) -> Any: ...


class NeedsArguments:
    model = "m"

    def __init__(self, path: str) -> None: ...
    def pre(self, request: Any) -> Any: ...
    def post(self, outputs: Any) -> Any: ...


@pytest.mark.parametrize(
    ("target", "remedy"),
    [
        (any_number, r"must name its parameters: '\*images: Any'"),
        (misspelt, "parameter 'item' of `misspelt` cannot be looked up: name 'Itme' is not defined"),
        (unreadable, "type object has no JSON form: use a dataclass"),
        (two_streams, "can read one stream, not first and second"),
        (late, "'file' is read while it comes: make `late` an `async def`"),
        (NoStage, "or one method `predict`"),
        (TakesMore, "takes outputs, and beside it only `ctx`, not 'threshold'"),
        (NoModel, "needs `model"),
        (NoPost, r"needs a method post\(self, outputs\)"),
        (NeedsArguments, "without arguments"),
        (3, "goes on a function or a class"),
    ],
)
def test_what_cannot_be_a_service_says_what_to_change(target: Any, remedy: str) -> None:
    with pytest.raises(NotAService, match=remedy):
        define(target)


def test_names_must_fit_in_a_path() -> None:
    def given(request: Any) -> None: ...

    assert define(given, "").name == "given"
    for name in ("a/b", " ", "-x", "x" * 65, "a\n"):
        with pytest.raises(NotAService, match="not a service name"):
            define(given, name)


@pytest.mark.parametrize(
    ("source", "loaded"),
    [
        ("def f(request): ...", set()),
        ("def f(text: str): ...", {"bodies.decoding"}),
        ("from PIL.Image import Image\ndef f(image: Image): ...", {"bodies.decoding", "images"}),
        ("from PIL.Image import Image\ndef f(request) -> list[Image]: ...", {"images"}),
    ],
)
def test_what_requests_need_is_loaded_before_workers_are_forked(source: str, loaded: set[str]) -> None:
    """Each worker loaded it for its first request, which took a tenth of a second."""
    script = f"import sys\nfrom oriel_logic.services.definition import define\n{source}\ndefine(f)\n"
    script += "print(*[name for name in sys.modules if name.startswith('oriel_logic.')])"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    found = {name.removeprefix("oriel_logic.") for name in done.stdout.split()}
    assert found & {"bodies.decoding", "images"} == loaded
