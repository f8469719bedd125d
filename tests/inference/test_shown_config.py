"""`/v2/models/M/config` and `ModelConfig` of models that did not load."""

import asyncio
import dataclasses
from pathlib import Path

import pytest
import tritonclient.grpc
from tritonclient.utils import InferenceServerException

from oriel_inference.app import open_unit
from oriel_inference.settings import Settings
from oriel_wire.observe.trace import ListSink

from . import models
from .clients import client_of


async def test_configuration_of_a_model_that_failed_to_load_is_shown(settings: Settings, tmp_path: Path) -> None:
    """What is understood and not executed is seen by clients; where nothing was read there is nothing to show."""
    sequence = models.DOUBLE + "sequence_batching { max_sequence_idle_microseconds: 5000000 iterative_sequence: true }"
    models.put(tmp_path, "double", models.double(), sequence)
    models.put(tmp_path, "ok", models.double(), None)
    models.put(tmp_path, "typo", models.double(), "frobnicate: 3")
    unbroken = dataclasses.replace(settings, repositories=(tmp_path,))
    async with open_unit(unbroken, sink=ListSink()) as unit:
        async with client_of(unit.http_port) as http:
            shown = await http.get("/v2/models/double/config")
            assert shown.status_code == 200 and shown.json()["name"] == "double"
            assert shown.json()["sequence_batching"]["max_sequence_idle_microseconds"] in (5000000, "5000000")
            assert (await http.get("/v2/models/double")).status_code == 404
            assert (await http.get("/v2/models/typo/config")).status_code == 404
            assert (await http.get("/v2/models/absent/config")).status_code == 404
            assert (await http.get("/v2/models/double/versions/1/config")).status_code == 404
            assert (await http.get("/v2/models/ok/config")).json()["max_batch_size"] == 4
        with tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{unit.grpc_port}") as client:
            config = (await asyncio.to_thread(client.get_model_config, "double")).config
            assert config.sequence_batching.max_sequence_idle_microseconds == 5000000
            with pytest.raises(InferenceServerException, match="no available version"):
                await asyncio.to_thread(client.get_model_config, "typo")
