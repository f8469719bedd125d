"""The HTTP session of the S3 client: sends each request once, only to the host it was signed for, and bounds answers.

No redirect is followed. The signature covers the host, so it would be of no use anywhere else; but a session token
travels in a header that HTTP clients do not recognise as a credential, and the answer of the other host would be
trusted.
"""

import os
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiobotocore.config import AioConfig
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.session import get_session

MAX_ANSWER_BYTES = 8 * 1024 * 1024  # a page of 1000 keys of 1024 bytes, each byte written as three, is half of that
_REGION = re.compile(r"[a-z0-9-]{1,32}")


class BadAnswer(Exception):
    """The answer is refused. The text is for the operator, continues a sentence that begins with the bucket's URL, and
    quotes nothing of the answer.
    """


class _NoRedirects:
    """An aiohttp session with the one method that aiobotocore calls; it follows no redirect."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def request(self, method: str, **options: Any) -> aiohttp.ClientResponse:
        return await self._session.request(method, allow_redirects=False, **options)


class _BoundedSession(AIOHTTPSession):  # type: ignore[misc]
    """Sends each request once and reads at most MAX_ANSWER_BYTES of an answer that is not streamed."""

    async def _get_session(self, proxy_url: str | None) -> Any:
        session = await super()._get_session(proxy_url)
        # aiohttp sends a request again when its connection breaks, which doubles the load on a store that is down.
        session._retry_connection = False
        return _NoRedirects(session)

    async def send(self, request: Any) -> Any:
        # aiobotocore reads an answer that is not streamed to its end, without a bound.
        streamed, request.stream_output = request.stream_output, True
        answer = await super().send(request)
        if 300 <= answer.status_code < 400:
            answer.raw.close()
            raise BadAnswer(wrong_region(answer.status_code, answer.headers.get("x-amz-bucket-region", "")))
        if not streamed or answer.status_code >= 300:
            answer._content = await _read_bounded(answer.raw)
        return answer


def wrong_region(status: int, region: str) -> str:
    """Error text for an answer that points to another host. region: the region that the store names, "" if it does
    not.
    """
    if _REGION.fullmatch(region):
        return f"lies in another region ({status}): set AWS_REGION to {region}"
    return f"redirects ({status}), which is not followed: set AWS_REGION to the bucket's region, or the right endpoint"


async def _read_bounded(body: aiohttp.ClientResponse) -> bytes:
    content = bytearray()
    try:
        async for chunk in body.content.iter_any():
            content += chunk
            if len(content) > MAX_ANSWER_BYTES:
                raise BadAnswer(f"answers with more than {MAX_ANSWER_BYTES} bytes")
    except BaseException:
        body.close()
        raise
    return bytes(content)


@asynccontextmanager
async def s3_client(
    *,
    endpoint: str,
    connect_timeout_s: float,
    read_timeout_s: float,
    keepalive_s: float,
    connections: int,
    keys: Mapping[str, str | None],
) -> AsyncIterator[Any]:
    """An aiobotocore client that belongs to the running loop.

    endpoint: "" for the environment's. read_timeout_s: without a byte.
    keys: credentials as arguments of `create_client`; without them AWS's own places are searched.
    """
    own = endpoint or any(map(os.environ.get, ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL")))
    config = AioConfig(
        # The caller decides when to try again.
        retries={"total_max_attempts": 1},
        connect_timeout=connect_timeout_s,
        read_timeout=read_timeout_s,
        max_pool_connections=connections,
        http_session_cls=_BoundedSession,
        connector_args={"keepalive_timeout": keepalive_s},
        # The caller checks whole objects once all their parts have arrived.
        response_checksum_validation="when_required",
        s3={"addressing_style": "path"} if own else None,
        user_agent_extra="oriel",
    )
    session = get_session()
    # Applies to the token service as well, which receives the pod's web identity.
    session.set_default_client_config(config)
    # AWS's other SDKs read AWS_REGION, this one does not.
    region = os.environ.get("AWS_DEFAULT_REGION") or os.environ.get("AWS_REGION") or None
    async with session.create_client("s3", region_name=region, endpoint_url=endpoint or None, **keys) as client:
        client.meta.events.register("before-call.s3", _mark_redirected)
        yield client


def _mark_redirected(params: dict[str, Any], **_: Any) -> None:
    """Keep botocore from looking up the bucket's region and redirecting there, which it does once per request."""
    params.setdefault("context", {}).setdefault("s3_redirect", {})["redirected"] = True
