import pickle
import re
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from openapi_spec_validator import OpenAPIV31SpecValidator
from PIL import Image
from pydantic import BaseModel

from oriel_logic.bodies.audio import Audio
from oriel_logic.bodies.tensors import Tensors
from oriel_logic.bodies.upload import Upload
from oriel_logic.openai.dispatch import ANSWERS
from oriel_logic.server.openapi import document
from oriel_logic.services.definition import SHOWN_BYTES, NotAService, define, options_of
from oriel_wire.process.api_page import PAGE, SAMPLE, policy


@dataclass
class Item:
    price: float
    image: Image.Image | None = None


class Place(BaseModel):
    city: str


class Person(BaseModel):
    name: str
    home: Place | None = None


@dataclass
class Order:
    items: list[Item]
    buyer: Person


async def order(order: Order) -> Order: ...
async def text(text: Annotated[str, msgspec.Meta(max_length=9)], top: int = 3) -> str: ...
def seen(image: Image.Image, threshold: float = 0.5) -> Image.Image: ...
def heard(sound: Audio) -> Audio: ...
async def rows(rows: NDArray[np.float32]) -> NDArray[np.float32]: ...
async def named(tensors: Tensors) -> Tensors: ...
async def filed(file: Upload, note: str = "") -> dict[str, int]: ...
async def streamed(items: AsyncIterator[Item]) -> AsyncIterator[Item]:
    yield Item(1)


async def raw(request: Any, models: Any, ctx: Any) -> Any:
    """Takes anything.

    At length.
    """


async def nothing() -> bytes: ...
async def untyped(a, b=None): ...  # type: ignore[no-untyped-def]


EVERY = (order, text, seen, heard, rows, named, filed, streamed, raw, nothing, untyped)


def test_the_document_is_valid_openapi_3_1() -> None:
    """Judged by another project's validator, and read back by way of the description that workers send."""
    definitions = [define(each) for each in EVERY]
    made = document(definitions)
    OpenAPIV31SpecValidator(made).validate()
    definitions = [each for each in definitions if not each.reads_stream]
    made = document(definitions)
    again = [pickle.loads(pickle.dumps(each.without_code())).in_workers() for each in definitions]
    assert document(again) == made


def test_a_service_is_described_by_its_types() -> None:
    made = document([define(order), define(seen), define(raw), define(streamed)])
    post = made["paths"]["/v1/services/order"]["post"]
    assert post["requestBody"]["content"]["application/json"]["schema"] == {"$ref": "#/components/schemas/order.Order"}
    assert "multipart/form-data" in post["requestBody"]["content"]  # there are pictures within
    schemas = made["components"]["schemas"]
    assert schemas["order.Item"]["properties"]["price"] == {"type": "number"}
    assert schemas["order.Person"]["properties"]["home"]["anyOf"][0] == {"$ref": "#/components/schemas/order.Place"}
    post = made["paths"]["/v1/services/seen"]["post"]
    assert list(post["requestBody"]["content"]) == [
        "application/json",
        "image/png",
        "image/jpeg",
        "multipart/form-data",
    ]
    assert list(post["responses"]["200"]["content"]) == ["image/png", "image/jpeg", "application/json"]
    assert [each["name"] for each in post["parameters"]] == ["threshold"]
    assert made["paths"]["/v1/services/raw"]["post"]["summary"] == "Takes anything."
    post = made["paths"]["/v1/services/streamed"]["post"]
    assert list(post["responses"]["200"]["content"]) == ["application/x-ndjson", "text/event-stream"]


def test_two_services_may_have_types_of_one_name() -> None:
    def other() -> Any:
        @dataclass
        class Item:
            weight: int

        async def weigh(item: Item) -> None: ...

        return weigh

    schemas = document([define(order), define(other())])["components"]["schemas"]
    assert "price" in schemas["order.Item"]["properties"] and "weight" in schemas["weigh.Item"]["properties"]
    assert "weight" in document([define(other()).renamed("heavy")])["components"]["schemas"]["heavy.Item"]["properties"]


def test_what_reads_a_stream_runs_in_no_other_environment() -> None:
    with pytest.raises(NotAService, match="it gets requests whole"):
        define(filed).without_code().in_workers()


def test_a_sample_is_the_example() -> None:
    options = options_of({"sample": {"text": "hi"}})
    post = document([define(text, "", options)])["paths"]["/v1/services/text"]["post"]
    assert post["requestBody"]["content"]["application/json"]["example"] == {"text": "hi"}


def test_a_sample_that_is_no_json_is_offered_as_its_bytes() -> None:
    """Whatever its media type is, if the service takes it; one that is too large is not."""
    content = content_of(seen, ("image/png", b"\x89PNG"))
    assert b64decode(content["image/png"][SAMPLE]) == b"\x89PNG" and SAMPLE not in content["image/jpeg"]
    assert SAMPLE not in str(content_of(seen, ("audio/wav", b"RIFF")))
    assert SAMPLE not in str(content_of(seen, ("image/png", b"x" * (SHOWN_BYTES + 1))))
    assert content_of(raw, ("text/plain", b"hi"))["text/plain"] == {SAMPLE: b64encode(b"hi").decode()}
    assert content_of(text, ("application/json", b'"hi"'))["application/json"]["example"] == "hi"
    assert "example" not in content_of(text, ("application/json", b"{"))["application/json"]
    options = options_of({"sample": b"\x89PNG", "sample_type": "image/png"})
    post = document([define(seen, "", options)])["paths"]["/v1/services/seen"]["post"]
    assert b64decode(post["requestBody"]["content"]["image/png"][SAMPLE]) == b"\x89PNG"


def content_of(handler: Any, shown: tuple[str, bytes]) -> dict[str, Any]:
    """What the service takes, with that sample beside it."""
    definition = replace(define(handler), shown=shown)
    (post,) = [item["post"] for item in document([definition])["paths"].values()]
    return dict(post["requestBody"]["content"])


def test_every_path_of_the_openai_api_is_in_the_document() -> None:
    made = document([], dict.fromkeys(ANSWERS, ["chat"]))
    OpenAPIV31SpecValidator(made).validate()
    assert made["paths"].keys() == ANSWERS.keys()


def test_the_page_needs_nothing_from_elsewhere() -> None:
    page = PAGE.read_text()
    assert not re.findall(r"""(?:src|href|url|import|fetch)\s*[=(]\s*["'`]?(?:https?:)?//""", page)
    assert "innerHTML" not in page and "document.write" not in page and "eval(" not in page
    assert page.count("<script>") == page.count("<style>") == 1 and " style=" not in page and " onclick" not in page
    rules = dict(each.split(" ", 1) for each in policy(PAGE.read_bytes()).split("; "))
    assert rules["default-src"] == "'none'" and rules["connect-src"] == "'self'"
    for name in ("script-src", "style-src"):
        assert re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", rules[name])


async def test_both_are_served_with_the_sample_beside_the_handler(stack: Any, services: Any) -> None:
    source = "from oriel_logic import service\n@service\nasync def hello(name: str) -> str:\n    return name\n"
    folder = services(hello=source)
    (folder / "hello.sample.json").write_text('{"name": "Ada"}')
    client = (await stack(folder)).client
    page, described = await client.get("/docs"), await client.get("/openapi.json")
    for answer in (page, described):
        assert answer.status_code == 200 and answer.headers["x-content-type-options"] == "nosniff"
        assert (await client.post(answer.url.path)).status_code == 405
    assert page.headers["content-security-policy"].startswith("default-src 'none'; script-src 'sha256-")
    assert page.text == PAGE.read_text()
    ((path, item),) = described.json()["paths"].items()
    assert path == "/v1/services/hello"
    assert item["post"]["requestBody"]["content"]["application/json"]["example"] == {"name": "Ada"}
