"""The service of the bench with nothing between ASGI and aiohttp's client. TARGET: host:port of HTTP.

It sends what Oriel sends: a v2 request with one binary tensor, on kept connections.
"""

import json
import os

import aiohttp
import numpy as np

HEADERS = [(b"content-type", b"application/json")]
HEAD = json.dumps(
    {
        "inputs": [
            {"name": "image", "datatype": "FP32", "shape": [1, 64], "parameters": {"binary_data_size": 256}},
        ],
        "outputs": [{"name": "label", "parameters": {"binary_data": True}}],
    }
).encode()
CALL = {"content-type": "application/octet-stream", "inference-header-content-length": str(len(HEAD))}


class App:
    def __init__(self) -> None:
        self.session = None
        self.url = f"http://{os.environ['TARGET']}/v2/models/digits/infer"

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] == "lifespan":
            await self.lifespan(receive, send)
            return
        body = b""
        more = True
        while more:
            message = await receive()
            body += message.get("body", b"")
            more = message.get("more_body", False)
        image = np.array([json.loads(body)["image"]], np.float32)
        async with self.session.post(self.url, data=HEAD + image.tobytes(), headers=CALL) as answer:
            answer.raise_for_status()
            content = await answer.read()
        label = int(np.frombuffer(content, np.int64, 1, int(answer.headers["inference-header-content-length"]))[0])
        await send({"type": "http.response.start", "status": 200, "headers": HEADERS})
        await send({"type": "http.response.body", "body": json.dumps({"label": label}).encode()})

    async def lifespan(self, receive, send) -> None:
        await receive()
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as self.session:
            await send({"type": "lifespan.startup.complete"})
            await receive()
        await send({"type": "lifespan.shutdown.complete"})


app = App()
