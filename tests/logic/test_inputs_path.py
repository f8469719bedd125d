"""Inputs and answers of every kind, from HTTP to the handler and back: in this process, and once through real ones."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from io import BytesIO
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from oriel_logic.bodies import audio, npy
from oriel_logic.bodies.audio import Audio
from oriel_logic.testing import AsyncClient

SOURCE = """
    import asyncio, os
    from collections.abc import AsyncIterator, Iterator
    from dataclasses import dataclass
    import numpy as np
    from numpy.typing import NDArray
    from PIL import Image
    from pydantic import BaseModel
    from oriel_logic import Audio, Context, Models, Refused, Tensors, Upload, service

    @dataclass
    class Item:
        price: float
        count: int = 1

    @dataclass
    class Basket:
        items: list[Item]

    class Person(BaseModel):
        name: str

    @service
    async def total(basket: Basket, ctx: Context) -> dict[str, float]:
        return {"total": sum(each.price * each.count for each in basket.items)}

    @service
    def there(basket: Basket) -> dict[str, float]:
        return {"total": sum(each.price for each in basket.items), "pid": os.getpid()}

    @service
    async def greet(person: Person, loud: bool = False) -> str:
        return "HELLO" if loud else f"hello {person.name}"

    @service
    def small(image: Image.Image, width: int = 2) -> Image.Image:
        return image.resize((width, width))

    @service
    async def mean(image: Image.Image) -> dict[str, float]:
        return {"mean": float(np.asarray(image).mean())}

    @service
    def louder(sound: Audio, by: float = 2.0) -> Audio:
        return Audio(sound.samples * by, sound.rate)

    @service
    async def doubled(rows: NDArray[np.float32], models: Models) -> NDArray[np.float32]:
        return (await models.infer("double", {"x": rows}))["y"]

    @dataclass
    class Labelled:
        label: str
        image: Image.Image | None = None

    @service
    async def labelled(image: Image.Image) -> Labelled:
        return Labelled("white", image)

    @service
    def blocking(rows: list[list[float]], models: Models, *, ctx: Context) -> dict[str, object]:
        with ctx.stage("inside"):
            outputs = models.infer("double", {"x": rows})
        return {"rows": outputs["y"], "tier": ctx.tier, "in_time": ctx.remaining_s > 0}

    @service
    async def tensors(given: Tensors) -> Tensors:
        return Tensors({"y": given["x"] + 1})

    @service
    async def count(upto: int) -> AsyncIterator[dict[str, int]]:
        for n in range(upto):
            if n == 3:
                raise Refused("only three", field="$.upto")
            yield {"n": n}

    @service
    def words(text: str) -> Iterator[str]:
        yield from text.split()

    @service
    async def sums(items: AsyncIterator[Item]) -> AsyncIterator[float]:
        total = 0.0
        async for each in items:
            total += each.price
            yield total

    @service(max_body_bytes=1000)
    async def size(file: Upload, note: str = "") -> dict[str, object]:
        total = 0
        async for piece in file:
            total += len(piece)
        return {"bytes": total, "name": file.filename, "note": note}

    @service
    class Counter:
        def setup(self): self.start = 10
        def predict(self, by: int = 1) -> int: return self.start + by

    @service
    class Doubler:
        model = "double"
        async def pre(self, rows: list[list[float]]): return {"x": np.array(rows, np.float32)}
        def post(self, outputs) -> dict[str, list[list[float]]]: return {"rows": outputs["y"].tolist()}
"""


def picture(colour: str = "white", size: tuple[int, int] = (4, 4)) -> bytes:
    file = BytesIO()
    Image.new("L", size, colour).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def logic(services: Any) -> AsyncClient:
    """Threads instead of worker processes."""
    return AsyncClient(services(kinds=SOURCE) / "kinds.py", models={"double": lambda x: {"y": x * 2}})


async def post(logic: AsyncClient, service: str, **more: Any) -> httpx.Response:
    return await logic.post(service, **more)


async def test_the_same_through_real_processes(stack: Any, services: Any) -> None:
    real = await stack(services(kinds=SOURCE))

    async def call(service: str, **more: Any) -> httpx.Response:
        answer: httpx.Response = await real.client.post(f"/v1/services/{service}", **more)
        return answer

    answer = await call("there", json={"items": [{"price": 1}]})
    assert answer.json()["pid"] == real.unit.pool.pids[0]
    assert refusal(await call("there", json={"items": [{}]})) == (422, "input_refused", "$.items[0].price")
    answer = await call("total", json={"items": [{"price": 1.0}] * 6000})
    assert answer.json() == {"total": 6000.0} and "logic-read" in answer.headers["server-timing"]
    answer = await call("small", files={"image": ("a.png", picture(), "image/png")}, data={"width": "3"})
    assert Image.open(BytesIO(answer.content)).size == (3, 3)
    answer = await call("labelled", content=picture(), headers={"content-type": "image/png"})
    assert answer.json()["label"] == "white" and "logic-encode" in answer.headers["server-timing"]
    assert (await call("words", json={"text": "a b c"})).text == '"a"\n"b"\n"c"\n'
    answer = await call("blocking", json={"rows": [[1, 2]]}, headers={"x-oriel-tier": "gold"})
    assert answer.json() == {"rows": [[2, 4]], "tier": "gold", "in_time": True}
    await answered_while_it_comes(real.port)


def refusal(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["reason"], error.get("field")


async def test_json_with_a_schema_on_the_loop_and_in_a_worker(logic: Any) -> None:
    good = {"items": [{"price": 1.5, "count": 2}, {"price": 1}]}
    bad = {"items": [{"price": 1}, {"price": 2}, {"price": "three"}]}
    assert (await post(logic, "total", json=good)).json() == {"total": 4.0}
    assert (await post(logic, "there", json=good)).json()["total"] == 2.5
    for service in ("total", "there"):
        answer = await post(logic, service, json=bad)
        assert refusal(answer) == (422, "input_refused", "$.items[2].price"), answer.text
        assert "Expected `float`, got `str`" in answer.json()["error"]["message"]
    answer = await post(logic, "greet", json={"person": {"name": 7}})
    assert refusal(answer) == (422, "input_refused", "$.person.name")


async def test_large_json_is_read_in_a_worker(logic: Any) -> None:
    items: list[dict[str, Any]] = [{"price": 1.0}] * 6000
    answer = await post(logic, "total", json={"items": items})
    assert answer.json() == {"total": 6000.0} and "logic-read" in answer.headers["server-timing"]
    answer = await post(logic, "total", json={"items": [*items, {}]})
    assert refusal(answer) == (422, "input_refused", "$.items[6000].price")


async def test_the_answer_is_what_accept_likes_best(logic: Any) -> None:
    body = {"person": {"name": "Ada"}}
    for accept, kind, text in (
        ("*/*", "text/plain; charset=utf-8", "hello Ada"),
        ("application/json", "application/json", '"hello Ada"'),
        ("text/plain;q=0.1, application/*;q=0.5", "application/json", '"hello Ada"'),
    ):
        answer = await post(logic, "greet", json=body, headers={"accept": accept})
        assert (answer.text, answer.headers["content-type"]) == (text, kind)
    answer = await post(logic, "greet", json=body, headers={"accept": "image/png"})
    assert refusal(answer)[:2] == (406, "not_acceptable")
    assert "text/plain, application/json" in answer.json()["error"]["message"]


async def test_pictures_in_and_out(logic: Any) -> None:
    png = picture()
    base64_text = base64.b64encode(png).decode()
    for more in (
        {"content": png, "headers": {"content-type": "image/png"}, "params": {"width": 3}},
        {"files": {"image": ("a.png", png, "image/png")}, "data": {"width": "3"}},
        {"json": {"image": base64_text, "width": 3}},
    ):
        answer = await post(logic, "small", **more)
        assert answer.headers["content-type"] == "image/png", answer.text
        assert Image.open(BytesIO(answer.content)).size == (3, 3)
    answer = await post(logic, "small", content=png, headers={"content-type": "image/png", "accept": "image/jpeg"})
    assert Image.open(BytesIO(answer.content)).format == "JPEG"
    answer = await post(logic, "mean", content=png, headers={"content-type": "image/png"})  # read in a worker
    assert answer.json() == {"mean": 255.0} and "logic-read" in answer.headers["server-timing"]
    answer = await post(logic, "mean", json={"image": "aGVsbG8="})
    assert refusal(answer) == (422, "input_refused", "$.image")
    assert refusal(await post(logic, "mean", content=b"x", headers={"content-type": "video/mp4"}))[0] == 415


async def test_pictures_within_an_answer_are_encoded_in_a_worker(logic: Any) -> None:
    answer = await post(logic, "labelled", files={"image": ("a.png", picture(), "image/png")})
    found = answer.json()
    assert found["label"] == "white" and "logic-encode" in answer.headers["server-timing"]
    assert Image.open(BytesIO(base64.b64decode(found["image"]))).size == (4, 4)


async def test_a_typed_function_in_a_worker_calls_models(logic: Any) -> None:
    answer = await post(logic, "blocking", json={"rows": [[1, 2]]}, tier="gold")
    assert answer.json() == {"rows": [[2, 4]], "tier": "gold", "in_time": True}


async def test_sounds_arrays_and_tensors_in_and_out(logic: Any) -> None:
    sound = Audio(np.full((4, 1), 0.25, np.float32), 8000)
    answer = await post(
        logic, "louder", content=audio.encode(sound), headers={"content-type": "audio/wav"}, params={"by": "2"}
    )
    read = audio.decode(answer.content)
    np.testing.assert_allclose(read.samples, 0.5, atol=1e-3)
    rows = np.array([[1, 2]], np.float32)
    for more in ({"json": {"rows": [[1, 2]]}}, {"content": npy.encode(rows)}):
        assert (await post(logic, "doubled", **more)).json() == [[2, 4]]
    answer = await post(logic, "doubled", json={"rows": [[1, 2]]}, headers={"accept": "application/x-npy"})
    assert npy.decode(answer.content).tolist() == [[2, 4]]
    v2 = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}
    answer = await post(logic, "tensors", json=v2)
    assert answer.json()["outputs"][0] == {"name": "y", "datatype": "FP32", "shape": [1, 2], "data": [2, 3]}
    answer = await post(logic, "tensors", json=v2, headers={"accept": "application/octet-stream"})
    at = int(answer.headers["inference-header-content-length"])
    assert np.frombuffer(answer.content[at:], "<f4").tolist() == [2, 3]


async def test_streams_out_of_the_loop_and_of_a_worker(logic: Any) -> None:
    answer = await post(logic, "count", json={"upto": 2})
    assert answer.headers["content-type"] == "application/x-ndjson" and answer.text == '{"n":0}\n{"n":1}\n'
    answer = await post(logic, "count", json={"upto": 2}, headers={"accept": "text/event-stream"})
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.text == 'data: {"n":0}\n\ndata: {"n":1}\n\n'
    answer = await post(logic, "words", content="a b c", headers={"content-type": "text/plain"})
    assert answer.text == '"a"\n"b"\n"c"\n'
    answer = await post(logic, "words", json={"text": "a b"}, headers={"accept": "text/plain"})
    assert answer.text == "ab"


async def test_a_stream_that_fails_says_so_at_its_end(logic: Any) -> None:
    answer = await post(logic, "count", json={"upto": 9})
    *good, last = answer.text.splitlines()
    assert len(good) == 3 and answer.status_code == 200
    error = json.loads(last)["error"]
    assert (error["message"], error["reason"], error["field"]) == ("only three", "input_refused", "$.upto")
    assert error["request_id"] == answer.headers["x-request-id"]
    answer = await post(logic, "count", json={"upto": 9}, headers={"accept": "text/event-stream"})
    assert answer.text.split("\n\n")[3].startswith('event: error\ndata: {"error":{"message":"only three"')
    assert refusal(await post(logic, "count", json={"upto": "x"})) == (422, "input_refused", "$.upto")


async def answered_while_it_comes(port: int) -> None:
    """By hand: httpx sends all before it reads anything."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)

    def send(text: bytes) -> None:
        writer.write(b"%x\r\n%s\r\n" % (len(text), text))

    writer.write(
        b"POST /v1/services/sums HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/x-ndjson\r\n"
        b"transfer-encoding: chunked\r\n\r\n"
    )
    send(b'{"price": 1}\n{"price"')
    await reader.readuntil(b"\r\n1.0\n\r\n")
    send(b": 2}\n")
    await reader.readuntil(b"\r\n3.0\n\r\n")
    send(b'{"price": "x"}\n')
    last = await reader.readuntil(b"\r\n0\r\n")
    assert b'"field":"$[2].price"' in last
    writer.close()
    await writer.wait_closed()


async def test_a_file_streams_to_the_handler_up_to_the_services_limit(logic: Any) -> None:
    async def pieces(size: int) -> AsyncIterator[bytes]:
        for _ in range(size // 100):
            yield b"x" * 100

    headers = {"content-type": "video/mp4"}
    answer = await post(logic, "size", content=pieces(1000), headers=headers, params={"note": "a"})
    assert answer.json() == {"bytes": 1000, "name": "", "note": "a"}
    answer = await post(logic, "size", files={"file": ("a.mp4", b"x" * 900)}, data={"note": "b"})
    assert answer.json() == {"bytes": 900, "name": "a.mp4", "note": "b"}
    for more in ({"content": pieces(1100)}, {"files": {"file": ("a.mp4", b"x" * 1100)}}):
        answer = await post(logic, "size", **more)
        assert refusal(answer)[:2] == (413, "input_too_large"), answer.text
    answer = await post(logic, "size", data={"note": "b"}, files={"other": b""})
    assert refusal(answer) == (422, "input_refused", "$.file")


async def test_classes_predict_and_chains_are_typed_too(logic: Any) -> None:
    assert (await post(logic, "counter", json={"by": 5})).json() == 15
    assert (await post(logic, "counter")).json() == 11
    assert (await post(logic, "doubler", json={"rows": [[1, 2]]})).json() == {"rows": [[2, 4]]}
    assert refusal(await post(logic, "doubler", json={"rows": [[1, "2"]]})) == (422, "input_refused", "$.rows[0][1]")
