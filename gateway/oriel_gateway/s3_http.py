"""How S3 is spoken to over HTTP: each request once, to the host it was signed for, and no more of an answer than fits.

No redirect is followed. The signature covers the host, so it would be of no use anywhere else; but a session token goes
along in a header that HTTP clients do not know as a credential, and whatever answered there would be believed.

The gateway and the inference server each have this file, word for word (tests/house keeps it so): units share no code.
"""

import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiobotocore.config import AioConfig
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.session import get_session

__all__ = ["OddAnswer", "elsewhere", "s3_client"]

MAX_ANSWER_BYTES = 8 * 1024 * 1024  # a page of 1000 keys of 1024 bytes, each byte written as three, is half of that
_REGION = re.compile(r"[a-z0-9-]{1,32}")


class OddAnswer(Exception):
    """The answer is not taken. The text is for the operator, goes on from the bucket's name and quotes nothing."""


class _Straight:
    """An aiohttp session as aiobotocore uses it, that follows no redirect."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def request(self, method: str, **how: Any) -> aiohttp.ClientResponse:
        return await self._session.request(method, allow_redirects=False, **how)


class _Bounded(AIOHTTPSession):  # type: ignore[misc]
    async def _get_session(self, proxy_url: str | None) -> Any:
        session = await super()._get_session(proxy_url)
        # aiohttp sends a request again when its connection breaks: twice as many as were meant to a store that is down.
        session._retry_connection = False
        return _Straight(session)

    async def send(self, request: Any) -> Any:
        # aiobotocore reads what is not a stream to its end, however far that is.
        streamed, request.stream_output = request.stream_output, True
        answer = await super().send(request)
        if 300 <= answer.status_code < 400:
            answer.raw.close()
            raise OddAnswer(elsewhere(answer.status_code, answer.headers.get("x-amz-bucket-region", "")))
        if not streamed or answer.status_code >= 300:
            answer._content = await _whole(answer.raw)
        return answer


def elsewhere(status: int, region: str) -> str:
    """What to say of an answer that sends elsewhere. region: as the store names it, "" if it does not."""
    if _REGION.fullmatch(region):
        return f"lies in another region ({status}): set AWS_REGION to {region}"
    return f"sends elsewhere ({status}), which is not followed: set AWS_REGION to the bucket's, or the right endpoint"


async def _whole(body: aiohttp.ClientResponse) -> bytes:
    taken = bytearray()
    try:
        async for chunk in body.content.iter_any():
            taken += chunk
            if len(taken) > MAX_ANSWER_BYTES:
                raise OddAnswer(f"answers with more than {MAX_ANSWER_BYTES} bytes")
    except BaseException:
        body.close()
        raise
    return bytes(taken)


@asynccontextmanager
async def s3_client(
    *, endpoint: str, connect_timeout_s: float, read_timeout_s: float, keepalive_s: float, connections: int
) -> AsyncIterator[Any]:
    """A client of the loop it is entered on. endpoint: "": the environment's. read_timeout_s: without a byte."""
    own = endpoint or any(map(os.environ.get, ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")))
    config = AioConfig(
        # Who calls decides when it is tried again.
        retries={"total_max_attempts": 1},
        connect_timeout=connect_timeout_s,
        read_timeout=read_timeout_s,
        max_pool_connections=connections,
        http_session_cls=_Bounded,
        connector_args={"keepalive_timeout": keepalive_s},
        # Whole objects are checked after all their parts have come.
        response_checksum_validation="when_required",
        s3={"addressing_style": "path"} if own else None,
        user_agent_extra="oriel",
    )
    session = get_session()
    # For the token service too, which is shown the pod's web identity.
    session.set_default_client_config(config)
    # AWS's other SDKs know AWS_REGION, this one does not.
    region = os.environ.get("AWS_DEFAULT_REGION") or os.environ.get("AWS_REGION") or None
    async with session.create_client("s3", region_name=region, endpoint_url=endpoint or None) as client:
        client.meta.events.register("before-call.s3", _stay)
        yield client


def _stay(params: dict[str, Any], **_: Any) -> None:
    """botocore itself asks where a bucket lies and turns there, once: let it think that it has."""
    params.setdefault("context", {}).setdefault("s3_redirect", {})["redirected"] = True
