"""Reads what the servers of a pool report of their models, at `/v2/repository/memory`."""

import asyncio
from typing import TYPE_CHECKING, Final

import msgspec

from oriel_gateway.pools.endpoint_state import EndpointState
from oriel_gateway.pools.pool import PoolGate

if TYPE_CHECKING:
    import httpx

REPORT_S: Final = 2.0
MOST_BYTES: Final = 4 << 20
MOST_SERVERS: Final = 256
_PATH: Final = "/v2/repository/memory"


class ReportedModel(msgspec.Struct):
    """A model on demand as one server reports it."""

    name: str
    state: str
    bytes: dict[str, int]
    load_s: float
    busy_s: float
    calls: int
    waiting: int
    wanted: bool


class Report(msgspec.Struct):
    """A server's report of its models. `oriel_inference.servers.memory_report` explains the fields."""

    up_s: float
    loading: tuple[int, int]
    budgets: dict[str, int]
    fixed: dict[str, int]
    models: list[ReportedModel]


_decode = msgspec.json.Decoder(Report).decode


async def read_progress(client: "httpx.AsyncClient", gate: PoolGate) -> None:
    """Ask the servers that are not ready how many bytes of their models are loaded."""
    names = [server_name(member) for member in gate.endpoints.members[:MOST_SERVERS]]
    reports = await asyncio.gather(*(read_report(client, name) for name in names))
    found = [report.loading for report in reports if report is not None and report.loading[1]]
    if gate.cold_start is not None and found:
        gate.cold_start.loading = max(found, key=lambda each: each[0] / each[1])


async def read_report(client: "httpx.AsyncClient", server: str) -> Report | None:
    """Return what a server reports; None if it does not, or not in time."""
    try:
        async with asyncio.timeout(REPORT_S), client.stream("GET", f"http://{server}{_PATH}") as answer:
            if answer.status_code != 200:
                return None
            data = b""
            async for piece in answer.aiter_bytes():
                data += piece
                if len(data) > MOST_BYTES:
                    return None
        return _decode(data)
    except Exception:  # httpx raises more than its own errors for addresses that cannot be used
        return None


def server_name(member: EndpointState) -> str:
    host, port = member.address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
