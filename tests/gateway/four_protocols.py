"""Sends one request with a header over each protocol, and tells how each was refused."""

import asyncio
import json
from collections.abc import Sequence

import grpc
import httpx

from oriel_gateway.core import Gateway
from oriel_policies.documents import ApiKey
from oriel_wire.h1.request import Field, LineMemo

from .gate import INFER
from .stack import GOLD, Client, documents, gateway, upstream

METHOD = "/inference.GRPCInferenceService/ModelInfer"
MESSAGE = b"\x0a\x06digits"  # model_name


class Counting(Gateway):
    """Counts how often a sender is looked for."""

    identified = 0

    def identify_fields(self, fields: Sequence[Field] | None, memo: LineMemo) -> ApiKey:
        type(self).identified += 1
        return super().identify_fields(fields, memo)


async def reasons(header: str) -> dict[str, str]:
    """Return the `error.reason` of a request that has this header, by how it was sent."""
    found = {}
    async with upstream() as up, gateway(documents([up.port]), make=Counting) as (port, _), Client(port) as client:
        headers = f"{header}: 1\r\n"
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


def main(header: str) -> None:
    """Print the reasons as JSON."""
    print(json.dumps(asyncio.run(reasons(header))))  # noqa: T201
