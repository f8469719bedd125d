"""Sends one request with a header over each protocol, and tells how each was refused."""

import asyncio
import json
from collections.abc import Sequence

import grpc
import httpx

from oriel_gateway.identity.callers import Callers
from oriel_policies.documents import ApiKey
from oriel_wire.h1.request import Field, LineMemo

from .gate import INFER
from .stack import GOLD, Client, documents, gateway, upstream

METHOD = "/inference.GRPCInferenceService/ModelInfer"
MESSAGE = b"\x0a\x06digits"  # model_name


class Counting(Callers):
    """Counts how often a sender is looked for."""

    identified = 0

    def identify(self, fields: Sequence[Field] | None, memo: LineMemo) -> ApiKey:
        type(self).identified += 1
        return super().identify(fields, memo)


def limited(port: int, limit: str) -> dict[str, bytes]:
    """Return documents with one more line for the tenant who sends."""
    text = documents([port])["all.toml"].decode()
    return {"all.toml": text.replace("[tenants.g]\n", f"[tenants.g]\n{limit}\n").encode()}


async def reasons(header: str, limit: str) -> dict[str, str]:
    """Return the `error.reason` of a request that has this header, by how it was sent, after one that was."""
    found = {}
    async with (
        upstream() as up,
        gateway(limited(up.port, limit), callers=Counting) as (port, _),
        Client(port) as client,
    ):
        headers = f"{header}: 1\r\n"
        await client.ask("/v2/models/other/infer", b"x", headers=headers)
        first = await client.ask(INFER, b"x", headers=headers)
        found["HTTP/1.1"] = json.loads(first.body)["reason"]
        for _ in range(2):  # the second one of a head finds the first one's shape
            before = Counting.identified
            again = await client.ask(INFER, b"x", headers=headers)
        assert Counting.identified == before, "the head was not recognised"
        found["a recognised head"] = json.loads(again.body)["reason"]
        async with httpx.AsyncClient(http1=False, http2=True, base_url=f"http://127.0.0.1:{port}") as http2:
            answer = await http2.post(INFER, content=b"x", headers={"x-api-key": GOLD, header: "1"})
            assert answer.http_version == "HTTP/2"
            found["HTTP/2"] = answer.json()["reason"]
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            try:
                await channel.unary_unary(METHOD)(MESSAGE, metadata=(("x-api-key", GOLD), (header, "1")))
            except grpc.aio.AioRpcError as error:
                found["gRPC"] = dict(error.trailing_metadata() or ())["x-oriel-reason"]
    return found


def main(header: str, limit: str = "") -> None:
    """Print the reasons as JSON. limit: a line of the document of the tenant who sends."""
    print(json.dumps(asyncio.run(reasons(header, limit))))  # noqa: T201


def passed(header: str, limit: str) -> None:
    """Print the status of a second request with this header."""

    async def status() -> int:
        async with upstream() as up, gateway(limited(up.port, limit)) as (port, _), Client(port) as client:
            await client.ask(INFER, b"x", headers=f"{header}: 1\r\n")
            return (await client.ask(INFER, b"x", headers=f"{header}: 1\r\n")).status

    print(asyncio.run(status()))  # noqa: T201
