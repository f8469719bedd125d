"""Test doubles for services: no server, no worker process and no model are needed.

    from oriel_logic.testing import Client, FakeModels

    def test_a_seven_is_read():
        models = FakeModels({"digits": {"label": [[7]]}})
        answer = Client(digits, models=models).post(content=PNG, headers={"content-type": "image/png"})
        assert answer.json()["label"] == 7
        assert models.calls[0].inputs["image"].shape == (1, 64)

The server's own code runs from the parsed request on: routing, decoding, checks, the pipeline, its deadline,
encoding, errors and their statuses. Doubles replace the socket, the worker processes (`def` stages run in a thread
of this process) and the inference servers.
"""

from oriel_logic.testing.client import AsyncClient, Client, FakeClock
from oriel_logic.testing.models import FakeModels, ModelCall, spec

__all__ = ["AsyncClient", "Client", "FakeClock", "FakeModels", "ModelCall", "spec"]
