"""The proxy most teams write first: Starlette and httpx, one client, bodies whole."""

import os

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

UPSTREAM = os.environ["UPSTREAM"]
client = httpx.AsyncClient(limits=httpx.Limits(max_connections=64, max_keepalive_connections=64))


async def forward(request: Request) -> Response:
    answer = await client.request(
        request.method,
        f"{UPSTREAM}{request.url.path}",
        content=await request.body(),
        headers={"content-type": request.headers.get("content-type", "")},
    )
    return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))


app = Starlette(routes=[Route("/{path:path}", forward, methods=["GET", "POST"])])
