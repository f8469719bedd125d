"""The servers that the language benches measure, and the documents of their gateway."""

import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path

from harness.processes import accepts, cpu_s, free_port, inference, serving

from language_bench.plans import Target, generate_stream
from oriel_inference.language.engine import Options

__all__ = ["ENGINE", "RUNNING", "THREADS", "bearer", "logic", "model_server", "policies"]

RUNNING, THREADS = Options().max_running, os.cpu_count() or 1
ENGINE = (RUNNING, Options().step_tokens, THREADS)  # of the bare engine: as a model without a configuration
DOCUMENTS = """
[tiers]
gold = {{ band = 0, target_ms = 500, token_ms = 25 }}
bronze = {{ band = 2, target_ms = 60000 }}
[tenants]
gold = {{ tier = "gold", models = ["*"], services = ["*"], keys = [{{ sha256 = "{gold}" }}], limit = {limit} }}
bronze = {{ tier = "bronze", models = ["*"], services = ["*"], keys = [{{ sha256 = "{bronze}" }}], limit = {limit} }}
[pools]
p = {{ endpoints = ["127.0.0.1:{port}"], max_inflight = 2000, max_streams = 2000, learn_concurrency = false }}
[[routes]]
model = "*"
pool = "p"
[[routes]]
service = "*"
pool = "p"
"""
SERVICE = """from oriel_logic.openai import LanguageModel

chat = LanguageModel(model="chat", served_as="chat")
"""
LIMIT = "{ requests_per_s = 1000, burst = 1000, concurrency = 1000 }"


def bearer(tier: str) -> str:
    """The line with the key of a tier's tenant."""
    return f"authorization: Bearer bench-{tier}"


def policies(folder: Path, port: int) -> Path:
    """The documents of a gateway whose calls all go to this port."""
    keys = {tier: sha256(f"bench-{tier}".encode()).hexdigest() for tier in ("gold", "bronze")}
    folder.mkdir()
    (folder / "bench.toml").write_text(DOCUMENTS.format(port=port, limit=LIMIT, **keys))
    return folder


@contextmanager
def model_server(model: Path, folder: Path) -> Iterator[Target]:
    """An inference server with this GGUF file as the model `chat`."""
    with inference(_repository(folder / "models", model, {})) as (pid, port, _):
        yield generate_stream(port, lambda: cpu_s(pid))


@contextmanager
def logic(folder: Path, parameters: Mapping[str, str]) -> Iterator[tuple[int, int]]:
    """A logic server with the OpenAI API before two strict doubles of a model: its process id and its port."""
    (folder / "services").mkdir(parents=True)
    (folder / "services" / "chat.py").write_text(SERVICE)
    models = _repository(folder / "models", Path(__file__), parameters)
    with inference(models) as (_, *first), inference(models) as (_, *second):
        port = free_port()
        command = [sys.executable, "-m", "oriel_cli.main", "logic", "--services", str(folder / "services")]
        for http, grpc in (first, second):
            command += ["--inference", f"127.0.0.1:{http}", "--inference-grpc", f"127.0.0.1:{grpc}"]
        command += ["--http-port", str(port), "--admin-port", str(free_port())]
        with serving(command, lambda: accepts(port), own_session=False) as pid:
            yield pid, port


def _repository(folder: Path, file: Path, parameters: Mapping[str, str]) -> Path:
    (folder / "chat" / "1").mkdir(parents=True)
    shutil.copy(file, folder / "chat" / "1" / "model.gguf")
    lines = [f'parameters {{ key: "{key}" value {{ string_value: "{text}" }} }}' for key, text in parameters.items()]
    (folder / "chat" / "config.pbtxt").write_text("\n".join(lines))
    return folder
