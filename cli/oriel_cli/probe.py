"""One bounded GET to a unit's control port."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

from oriel_wire.engine.client import HttpClient
from oriel_wire.errors import UpstreamError

MAX_ANSWER_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a probe.

    status: HTTP status; document: the decoded JSON body, None if it is not JSON.
    """

    status: int
    document: Any


async def get(
    host: str, port: int, path: str, *, timeout_s: float, headers: Sequence[tuple[str, str]] = ()
) -> Answer | None:
    """Send GET `path` and return the answer; None if no valid one came within `timeout_s`.

    If this is cancelled, the connection is closed.
    """
    client = HttpClient(host=host, port=port, max_response_bytes=MAX_ANSWER_BYTES)
    try:
        answer = await client.request("GET", path, headers, deadline=monotonic() + timeout_s)
    except UpstreamError:
        return None
    finally:
        await client.close()
    return Answer(answer.status, _decoded(answer.body))


def _decoded(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None
