"""Inputs and answers of every kind, from HTTP to the handler and back: in this process, and once through real ones."""

import asyncio
import json
from collections.abc import AsyncIterator
from io import BytesIO
from typing import Any

import httpx
import pytest
from PIL import Image

from oriel_logic.testing import AsyncClient

SOURCE = """
    import asyncio, os
    from collections.abc import AsyncIterator, Iterator
    from dataclasses import dataclass
    import numpy as np
    from PIL import Image
    from oriel_logic import Context, Models, Refused, Upload, service

    @dataclass
    class Item:
        price: float
        count: int = 1

    @dataclass
    class Basket:
        items: list[Item]

    @service
    async def total(basket: Basket, ctx: Context) -> dict[str, float]:
        return {"total": sum(each.price * each.count for each in basket.items)}

    @service
    def there(basket: Basket) -> dict[str, float]:
        return {"total": sum(each.price for each in basket.items), "pid": os.getpid()}

    @service
    def small(image: Image.Image, width: int = 2) -> Image.Image:
        return image.resize((width, width))

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


async def test_a_stream_that_fails_says_so_at_its_end(logic: Any) -> None:
    answer = await logic.post("count", json={"upto": 9})
    *good, last = answer.text.splitlines()
    assert len(good) == 3 and answer.status_code == 200
    error = json.loads(last)["error"]
    assert (error["message"], error["reason"], error["field"]) == ("only three", "input_refused", "$.upto")
    assert error["request_id"] == answer.headers["x-request-id"]
    answer = await logic.post("count", json={"upto": 9}, headers={"accept": "text/event-stream"})
    assert answer.text.split("\n\n")[3].startswith('event: error\ndata: {"error":{"message":"only three"')
    assert refusal(await logic.post("count", json={"upto": "x"})) == (422, "input_refused", "$.upto")


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
    answer = await logic.post("size", content=pieces(1000), headers=headers, params={"note": "a"})
    assert answer.json() == {"bytes": 1000, "name": "", "note": "a"}
    answer = await logic.post("size", files={"file": ("a.mp4", b"x" * 900)}, data={"note": "b"})
    assert answer.json() == {"bytes": 900, "name": "a.mp4", "note": "b"}
    for more in ({"content": pieces(1100)}, {"files": {"file": ("a.mp4", b"x" * 1100)}}):
        answer = await logic.post("size", **more)
        assert refusal(answer)[:2] == (413, "input_too_large"), answer.text
    answer = await logic.post("size", data={"note": "b"}, files={"other": b""})
    assert refusal(answer) == (422, "input_refused", "$.file")


async def test_classes_predict_and_chains_are_typed_too(logic: Any) -> None:
    assert (await logic.post("counter", json={"by": 5})).json() == 15
    assert (await logic.post("counter")).json() == 11
    assert (await logic.post("doubler", json={"rows": [[1, 2]]})).json() == {"rows": [[2, 4]]}
    assert refusal(await logic.post("doubler", json={"rows": [[1, "2"]]})) == (422, "input_refused", "$.rows[0][1]")
