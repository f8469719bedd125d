"""`models.scan` of the logic server against Oriel's own inference server and a recurrent model."""

from pathlib import Path
from time import monotonic

import numpy as np
import pytest

from oriel_inference.app import open_unit
from oriel_inference.settings import Settings
from oriel_logic.client.upstreams import Upstreams
from oriel_logic.errors import ModelInputWrong
from oriel_logic.observe.stages import Ledger
from oriel_wire.context import CallContext
from oriel_wire.observe.trace import new_trace

from ..inference.sequence_models import Recurrent


@pytest.mark.parametrize("batched", [True, False])
async def test_a_scan_of_a_service_equals_the_loop(tmp_path: Path, batched: bool) -> None:
    model = Recurrent(16, 24, batched=batched)
    model.put(tmp_path, "vad", "oldest { max_candidate_sequences: 4 }")
    chunks = np.random.default_rng(3).normal(size=(200, 16)).astype(np.float32)
    speech, last = model.loop(chunks)
    settings = Settings(repositories=(tmp_path,), http_port=0, grpc_port=0, metrics_port=0, cores=1)
    async with open_unit(settings) as unit:
        upstreams = Upstreams([("127.0.0.1", unit.http_port)], [])
        await upstreams.start()
        call = CallContext(
            request_id="", deadline=monotonic() + 60, tier="", band=0, tenant="", models=(), trace=new_trace(False)
        )
        models = upstreams.servers.bind(call, Ledger(call.trace))
        first = await models.scan("vad", {"chunk": chunks[:150]}, outputs=["speech", "hidden_out"])
        state = {"hidden": first["hidden_out"]}
        second = await models.scan("vad", {"chunk": chunks[150:]}, state=state, outputs=["hidden_out", "speech"])
        assert list(await models.scan("vad", {"chunk": chunks[:1]})) == ["speech"]
        with pytest.raises(ModelInputWrong, match="state 'hidden' of a scan must have 1 row"):
            await models.scan("vad", {"chunk": chunks}, state={"hidden": np.zeros((2, 24), np.float32)})
        await upstreams.close()
    np.testing.assert_allclose(np.concatenate([first["speech"], second["speech"]]), speech, atol=1e-4)
    np.testing.assert_allclose(second["hidden_out"], last, atol=1e-4)
