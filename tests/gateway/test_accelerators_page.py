"""docs/accelerators.md: its document in a folder puts a v2 server and one of the OpenAI API behind the gateway."""

import re
from pathlib import Path

from oriel_gateway.documents.source import FolderSource
from oriel_policies.documents import compile_documents

from .stack import GOLD, Client, documents, gateway, upstream

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "accelerators.md").read_text()


async def test_documents_of_the_page_reach_servers_of_other_makers(tmp_path: Path) -> None:
    (text,) = re.findall(r"^```toml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    pools = compile_documents({"page.toml": text.encode()}).pools
    assert {name: pool.probe for name, pool in pools.items()} == {"neuron": "/v2/health/ready", "language": "/health"}
    async with upstream() as neuron, upstream() as language, upstream() as own:
        page = text.replace("10.0.0.20:8000", f"127.0.0.1:{neuron.port}")
        page = page.replace("10.0.0.21:8000", f"127.0.0.1:{language.port}")
        for name, data in (*documents([own.port]).items(), ("accelerators.toml", page.encode())):
            (tmp_path / name).write_bytes(data)
        async with gateway(FolderSource(tmp_path).read()) as (port, _), Client(port) as client:
            for path in ("/v2/models/resnet-neuron/infer", "/v1/chat/completions", "/v2/models/digits/infer"):
                head = "content-type: application/json\r\n"
                assert (await client.ask(path, b'{"model": "m"}', key=GOLD, headers=head)).status == 200
        first, second = ({seen.head.split(" ")[1] for seen in server.seen} for server in (neuron, language))
        assert {"/v2/health/ready", "/v2/models/resnet-neuron/infer"} <= first and "/v1/chat/completions" not in first
        assert {"/health", "/v1/chat/completions"} <= second and "/v2/models/digits/infer" not in second
