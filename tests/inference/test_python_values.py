"""User code may give any value to any name of pb_utils: it gets an exception, or its request an error. Nothing ends the
model's process.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oriel_inference.backends.python import pb_utils
from oriel_inference.backends.python.session import PythonSession
from oriel_inference.settings import Settings

from . import models
from .python_calls import put
from .thread_unit import unit_in_thread

ODD = """
backend: "python" max_batch_size: 4
input [ { name: "text" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "said" data_type: TYPE_STRING dims: [ 1 ] } ]
"""
VALUES = 76
OBJECTS: dict[str, Any] = {
    "request": pb_utils.InferenceRequest,
    "asking": pb_utils.InferenceRequest,
    "responses": pb_utils.InferenceResponse,
    "sender": pb_utils.InferenceResponseSender,
    "requests": list,
    "raised": pb_utils.TritonModelException,
    **{name: getattr(pb_utils, name) for name in pb_utils.__all__ if not name.isupper()},
}


def methods(name: str) -> list[str]:
    """Return the public methods of an object of this name; of a function, none."""
    of = OBJECTS[name]
    return (
        [each for each in dir(of) if not each.startswith("_") and each != "async_exec"] if isinstance(of, type) else []
    )


arguments = st.lists(st.integers(0, VALUES - 1), max_size=6)
calls = st.sampled_from(sorted(OBJECTS)).flatmap(
    lambda name: st.tuples(
        st.just(name),
        arguments,
        st.lists(st.tuples(st.sampled_from(methods(name)), arguments), max_size=2) if methods(name) else st.just([]),
    )
)


Call = tuple[str, list[int], list[tuple[str, list[int]]]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Call], tuple[int, Any]]]:
    """Return a function that has a model make a call; it returns the status and the model's process."""
    root = tmp_path_factory.mktemp("odd")
    put(root, "odd", "odd", ODD)
    models.put(root, "double", models.double(), models.DOUBLE)
    served = Settings(repositories=(root,), http_port=0, grpc_port=0, metrics_port=0, drain_s=0.2)
    with (
        unit_in_thread(served) as unit,
        httpx.Client(base_url=f"http://127.0.0.1:{unit.http_port}/v2", trust_env=False, timeout=60) as client,
    ):
        (session,) = unit.catalog.get("odd").sessions
        assert isinstance(session, PythonSession)

        def make(call: Call) -> tuple[int, Any]:
            name, given, then = call
            text = json.dumps([name, given, *then])
            body = {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1, 1], "data": [text]}]}
            return client.post("/models/odd/infer", json=body).status_code, session.pid

        yield make


@given(call=calls)
@settings(max_examples=300)
def test_no_value_ends_the_process(model: Callable[[Call], tuple[int, Any]], call: Call) -> None:
    _, before = model(("numpy_to_triton_type", [], []))
    status, after = model(call)
    assert status < 600 and after == before is not None, (status, after)
