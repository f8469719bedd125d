"""gRPC over TLS: clients that check the server, a server that checks its clients, and flags that do not fit."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import pytest
import tritonclient.grpc.aio as triton

from oriel_inference.app import open_unit
from oriel_inference.settings import Settings
from oriel_wire.errors import StartFailed
from oriel_wire.observe.trace import ListSink

from ..gateway.certificates import certificate, needs_openssl
from .grpc_calls import infer, ones

pytestmark = needs_openssl
Pair = tuple[Path, Path]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Pair]:
    folder = tmp_path_factory.mktemp("pairs")
    return {name: certificate(folder, name) for name in ("server", "client")}


def secured(settings: Settings, pair: Pair, **more: object) -> Settings:
    return replace(settings, grpc_tls=True, grpc_cert=pair[0], grpc_key=pair[1], **more)  # type: ignore[arg-type]


async def test_clients_that_trust_the_certificate_are_answered(settings: Settings, pairs: dict[str, Pair]) -> None:
    chain = pairs["server"][0]
    async with open_unit(secured(settings, pairs["server"]), sink=ListSink()) as unit:
        address = f"localhost:{unit.grpc_port}"
        async with grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(chain.read_bytes())) as channel:
            assert (await infer(channel)(ones())).model_name == "double"
        async with triton.InferenceServerClient(address, ssl=True, root_certificates=str(chain)) as client:
            assert await client.is_server_live()
        strangers = (
            grpc.aio.insecure_channel(address),
            grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(pairs["client"][0].read_bytes())),
        )
        for stranger in strangers:
            async with stranger as channel:
                assert await infer(channel)(ones()).code() is grpc.StatusCode.UNAVAILABLE


async def test_mutual_tls_answers_only_clients_of_the_authority(settings: Settings, pairs: dict[str, Pair]) -> None:
    root, (chain, key) = pairs["server"][0].read_bytes(), pairs["client"]
    mutual = secured(settings, pairs["server"], grpc_mutual_tls=True, grpc_authority=chain)
    async with open_unit(replace(mutual, grpc_tls=False), sink=ListSink()) as unit:
        address = f"localhost:{unit.grpc_port}"
        known = grpc.ssl_channel_credentials(root, key.read_bytes(), chain.read_bytes())
        async with grpc.aio.secure_channel(address, known) as channel:
            assert (await infer(channel)(ones())).model_name == "double"
        own = grpc.ssl_channel_credentials(root, pairs["server"][1].read_bytes(), root)
        for stranger in (grpc.ssl_channel_credentials(root), own):
            async with grpc.aio.secure_channel(address, stranger) as channel:
                assert await infer(channel)(ones()).code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda s: replace(s, grpc_tls=False), "need --grpc-use-ssl"),
        (lambda s: replace(s, grpc_key=None), "pass --grpc-server-cert and --grpc-server-key"),
        (lambda s: replace(s, grpc_mutual_tls=True), "pass --grpc-root-cert"),
        (lambda s: replace(s, grpc_mutual_tls=True, grpc_authority=s.grpc_key), "--grpc-root-cert cannot be read"),
        (lambda s: replace(s, grpc_cert=s.grpc_key), "certificate of --grpc-server-cert and the key of"),
    ],
)
async def test_flags_that_do_not_fit_stop_the_start(
    settings: Settings, pairs: dict[str, Pair], change: Callable[[Settings], Settings], why: str
) -> None:
    with pytest.raises(StartFailed, match=why):
        async with open_unit(change(secured(settings, pairs["server"])), sink=ListSink()):
            pass
