"""Clients of object stores use the credentials that each cloud gives to its pods, from where the cloud's own tools get
them.

A stub plays the metadata server, the token service and the store; the tests check the credentials that the store
receives.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from .object_stores import client_of, documents_at

TOKEN = {"access_token": "AMBIENT", "token_type": "Bearer", "resource": "x", "expires_on": "4000000000"}
POD_IDENTITY = {"AccessKeyId": "AMBIENT", "SecretAccessKey": "k", "Token": "t", "Expiration": "2099-01-01T00:00:00Z"}
Look = Callable[[str], Awaitable[object]]


@asynccontextmanager
async def cloud() -> AsyncIterator[tuple[str, list[str]]]:
    """Yield the address of the stub, and the list of (head, body) of each request."""
    seen: list[str] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if line)
        seen.append(head + (await reader.readexactly(int(fields.get("content-length", "0")))).decode())
        path = head.split(" ")[1]
        if "/token" in path:
            # Azure's managed identity writes this number as text.
            said = json.dumps(TOKEN | {"expires_in": "3600" if "/identity/" in path else 3600})
        elif path.startswith("/pod-identity"):
            said = json.dumps(POD_IDENTITY)
        elif "comp=list" in path:
            said = '<?xml version="1.0"?><EnumerationResults><Blobs></Blobs><NextMarker/></EnumerationResults>'
        else:
            said = "<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
        writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(said)}\r\nconnection: close\r\n\r\n{said}".encode())
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", seen
    server.close()


async def gateway(url: str) -> object:
    documents = documents_at(url)
    found = await documents.listing()
    await documents.close()
    return found


async def inference(url: str) -> object:
    client, prefix = client_of(url)
    found = await client.list(prefix, limit=10)
    await client.close()
    return found


# The environment of a pod in each cloud; {base} is the address of the stub, {file} the file with the mounted token.
PODS = {
    "eks-pod-identity": (
        "s3://bucket/p",
        {
            "AWS_CONTAINER_CREDENTIALS_FULL_URI": "{base}/pod-identity",
            "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": "{file}",
            "AWS_ENDPOINT_URL": "{base}",
            "AWS_REGION": "eu-west-1",
        },
    ),
    "gke": ("gs://bucket/p", {"GCE_METADATA_HOST": "{host}", "GOOGLE_BASE_URL": "{base}"}),
    "aks": (
        "az://account/container/p",
        {
            "AZURE_CLIENT_ID": "client",
            "AZURE_TENANT_ID": "tenant",
            "AZURE_FEDERATED_TOKEN_FILE": "{file}",
            "AZURE_AUTHORITY_HOST": "{base}/token",
            "AZURE_STORAGE_ENDPOINT": "{base}/account",
        },
    ),
    "azure-managed-identity": (
        "az://account/container/p",
        {"AZURE_IDENTITY_ENDPOINT": "{base}/identity/token", "AZURE_STORAGE_ENDPOINT": "{base}/account"},
    ),
}


@pytest.mark.parametrize("look", [gateway, inference], ids=["gateway", "inference"])
@pytest.mark.parametrize("pod", PODS)
async def test_a_pod_comes_with_the_identity_of_its_cloud(
    pod: str, look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, variables = PODS[pod]
    mounted = tmp_path / "token"
    mounted.write_text("OF-THE-POD")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    async with cloud() as (base, seen):
        for name, value in variables.items():
            monkeypatch.setenv(name, value.format(base=base, host=base.removeprefix("http://"), file=mounted))
        assert not await look(url)
        *asked, listing = seen
    assert asked, "no token was asked for"
    shown = "credential=ambient/" if url.startswith("s3") else "authorization: bearer ambient"
    assert shown in listing.lower()
    if "{file}" in variables.values():
        assert "OF-THE-POD" in asked[0]
