import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from pydantic import BaseModel

from oriel_logic.bodies.audio import Audio
from oriel_logic.bodies.messages import Request
from oriel_logic.bodies.signature import Form, NotAService, plan_of, read
from oriel_logic.bodies.tensors import Tensors
from oriel_logic.bodies.upload import Upload
from oriel_logic.client.models import Models
from oriel_logic.services.context import Context


@dataclass
class Item:
    price: float


class Point(msgspec.Struct):
    x: float


class Row(msgspec.Struct, array_like=True):
    x: float


class Named(TypedDict):
    x: float


class Person(BaseModel):
    name: str


@pytest.mark.parametrize("kind", [Item, Point, Named, Person, dict, dict[str, int], Item | None, Item | Person])
def test_one_object_alone_is_the_body(kind: Any) -> None:
    async def handler(item: Any, ctx: Any) -> None: ...

    handler.__annotations__["item"] = kind
    assert read(handler).body == "whole"


@pytest.mark.parametrize("kind", [str, int, list[Item], Row, Any, Image.Image, Audio, NDArray[Any], Item | int, bytes])
def test_everything_else_is_a_field(kind: Any) -> None:
    async def handler(item: Any, models: Any) -> None: ...

    handler.__annotations__["item"] = kind
    assert read(handler).body == "fields"


def test_two_objects_are_two_fields() -> None:
    async def handler(first: Item, second: Item) -> None: ...

    assert read(handler).body == "fields"


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        (str, Form.TEXT),
        (str | None, Form.TEXT),
        (Annotated[str, msgspec.Meta(max_length=3)], Form.TEXT),
        (bytes, Form.BYTES),
        (Image.Image, Form.IMAGE),
        (Image.Image | None, Form.IMAGE),
        (NDArray[np.float32], Form.ARRAY),
        (np.ndarray, Form.ARRAY),
        (Audio, Form.AUDIO),
        (Tensors, Form.TENSORS),
        (Upload, Form.UPLOAD),
        (AsyncIterator[Item], Form.LINES),
        (Item, Form.JSON),
        (list[Image.Image], Form.JSON),
    ],
)
def test_the_form_of_a_type(kind: Any, form: Form) -> None:
    async def handler(value: Any) -> None: ...

    handler.__annotations__["value"] = kind
    (parameter,) = read(handler).inputs
    assert parameter.form is form


def test_what_is_injected_is_told_by_name_or_annotation() -> None:
    async def by_name(request, models, ctx): ...  # type: ignore[no-untyped-def]
    async def by_annotation(a: Context, b: Request, c: Models, *, d: int = 1) -> None: ...
    async def typed_request(request: Item) -> None: ...

    assert read(by_name).body == "raw" and read(by_name).inputs == ()
    found = read(by_annotation)
    assert [each.injected for each in found.parameters] == ["ctx", "request", "models", ""]
    assert plan_of(found).call(lambda a, b, c, *, d: (a, b, c, d), ("r", "m", "x", 7)) == ("x", "r", "m", 7)
    assert read(typed_request).body == "whole"


def test_annotations_as_text_are_looked_up_where_the_function_stands() -> None:
    @dataclass
    class Local:
        x: int

    async def handler(item: "Local | None", other: "Item") -> "list[Item]":
        assert Local
        return []

    found = read(handler)
    assert found.inputs[0].type == Local | None and found.inputs[1].type is Item
    assert found.output.type == list[Item] and found.output.declared


def test_streams_are_told_by_annotation_or_by_yield() -> None:
    async def annotated() -> AsyncIterator[Item]:
        yield Item(1)

    def plain() -> Iterator[str]:
        yield "a"

    async def bare():  # type: ignore[no-untyped-def]
        yield 1

    assert [read(each).output.form for each in (annotated, plain, bare)] == [Form.LINES] * 3
    assert (read(annotated).output.type, read(plain).output.type, read(bare).output.type) == (Item, str, Any)


def test_the_outputs_of_a_chain_are_handed_in() -> None:
    class Chain:
        def post(self, outputs: Any, ctx: Any) -> Item: ...  # type: ignore[empty-body]

    found = read(Chain.post, method=True, given="outputs")
    assert found.body == "raw" and found.injects("ctx") and found.output.type is Item


LATER = """
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from somewhere import Models, Missing

async def handler(text: str, models: Models) -> str: ...
async def reads(text: Missing, models: Models) -> str: ...
async def gives(text: str, models: Models) -> list[Missing]: ...
"""


@pytest.fixture(
    params=[
        "from __future__ import annotations",
        *([""] if sys.version_info >= (3, 14) else []),
    ]  # else evaluated at once
)
def later(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Handlers with annotations that exist for type checkers only."""
    names: dict[str, Any] = {}
    exec(compile(f"{request.param}\n{LATER}", "later.py", "exec", dont_inherit=True), names)
    return names


def test_what_is_injected_may_be_annotated_for_type_checkers_only(later: dict[str, Any]) -> None:
    signature = read(later["handler"])
    assert [each.form for each in signature.inputs] == [Form.TEXT] and signature.output.form is Form.TEXT


@pytest.mark.parametrize(("name", "where"), [("reads", "parameter 'text'"), ("gives", "answer")])
def test_an_input_or_answer_that_cannot_be_looked_up_is_named(later: dict[str, Any], name: str, where: str) -> None:
    with pytest.raises(NotAService, match=rf"the annotation of the {where} of `{name}` cannot be looked up: .*Missing"):
        read(later[name])


if sys.version_info >= (3, 12):  # with which the statement came

    def test_an_alias_is_what_it_stands_for() -> None:
        names: dict[str, Any] = {
            "np": np,
            "Item": Item,
            "Image": Image.Image,
            "Annotated": Annotated,
            "meta": msgspec.Meta(),
        }
        source = """
type Name = str
type Maybe = Picture | None
type Picture = Image
type Swapped[A, B] = np.ndarray[B, np.dtype[A]]
type One = Item
async def handler(name: Annotated[Name, meta], picture: Maybe, rows: Swapped[np.int8, tuple[int, int]] | None): ...
async def alone(item: One) -> Picture: ...
"""
        exec(compile(source, "aliases.py", "exec", dont_inherit=True), names)
        name, picture, rows = read(names["handler"]).inputs
        assert (name.form, picture.form, picture.optional, rows.form, rows.optional) == (
            *(Form.TEXT, Form.IMAGE, True),
            *(Form.ARRAY, True),
        )
        assert rows.type == np.ndarray[tuple[int, int], np.dtype[np.int8]]
        assert read(names["alone"]).body == "whole" and read(names["alone"]).output.form is Form.IMAGE
