"""The inputs of `model_warmup`."""

from dataclasses import replace

import numpy as np
import pytest

from oriel_inference.errors import LoadFailed
from oriel_inference.model import ModelSpec, TensorSpec
from oriel_inference.repository.warmup import warmup_inputs
from oriel_wire.v2.metadata import parse_config_text


def test_rows_of_warm_up_files_are_repeated_and_text_too(caplog: pytest.LogCaptureFixture) -> None:
    """A file had to hold all rows; a sample without `batch_size` failed the load; a sample had at most 256 MiB."""
    inputs = (TensorSpec(name="t", datatype="BYTES", dims=(2,)), TensorSpec(name="n", datatype="INT32", dims=(1,)))
    spec = ModelSpec(
        name="m", version=1, platform="", backend="", max_batch_size=4, inputs=inputs, outputs=(), bounds=None
    )
    config = parse_config_text("""
        model_warmup { name: "none" inputs { key: "t" value { data_type: TYPE_STRING dims: [ 2 ] zero_data: true } } }
        model_warmup { name: "two" batch_size: 2
            inputs { key: "t" value { data_type: TYPE_STRING dims: [ 2 ] input_data_file: "texts" } }
            inputs { key: "n" value { data_type: TYPE_INT32 dims: [ 1 ] input_data_file: "number" } } }""")
    files = {"texts": b"\1\0\0\0a\2\0\0\0bc\1\0\0\0d", "number": np.array([7, 8], np.int32).tobytes()}
    (found,) = warmup_inputs(config, spec, "m/config.pbtxt", read=files.__getitem__)
    assert found["t"].tolist() == [[b"a", b"bc"], [b"a", b"bc"]] and found["n"].tolist() == [[7], [7]]
    assert "m/config.pbtxt: model_warmup[0] is skipped: it has no batch_size" in caplog.text
    large = parse_config_text("""
        model_warmup { name: "large" batch_size: 4
            inputs { key: "t" value { data_type: TYPE_STRING dims: [ 20000000 ] zero_data: true } } }""")
    wide = replace(spec, inputs=(replace(inputs[0], dims=(-1,)),))
    with pytest.raises(LoadFailed, match="the sample is larger than 1024 MiB"):
        list(warmup_inputs(large, wide, "m/config.pbtxt", read=files.__getitem__))
