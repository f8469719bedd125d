"""The same proxy with aiohttp's client, which is the faster one."""

import os

import aiohttp
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

UPSTREAM = os.environ["UPSTREAM"]
session: aiohttp.ClientSession | None = None


async def forward(request: Request) -> Response:
    global session
    if session is None:
        session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=64))
    async with session.request(
        request.method,
        f"{UPSTREAM}{request.url.path}",
        data=await request.body(),
        headers={"content-type": request.headers.get("content-type", "")},
    ) as answer:
        return Response(await answer.read(), answer.status, media_type=answer.headers.get("content-type"))


app = Starlette(routes=[Route("/{path:path}", forward, methods=["GET", "POST"])])
