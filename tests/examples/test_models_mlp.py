"""The generated models that show batching."""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

GENERATOR = Path(__file__).resolve().parents[2] / "examples" / "models_mlp.py"


@pytest.fixture(scope="module")
def mlp() -> Any:
    pytest.importorskip("onnx")
    spec = importlib.util.spec_from_file_location("models_mlp", GENERATOR)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_both_models_have_one_set_of_weights_and_answer_alike_in_batches(mlp: Any, tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    repository = tmp_path / "state" / "models"
    mlp.write(repository)
    assert sorted(path.name for path in repository.iterdir()) == ["mlp", "mlp_single"]
    assert sorted(path.name for path in repository.parent.iterdir()) == ["models"]
    files = [repository / name / "1" / "model.onnx" for name in ("mlp", "mlp_single")]
    assert files[0].read_bytes() == files[1].read_bytes() == mlp.build()
    session = onnxruntime.InferenceSession(files[0], providers=["CPUExecutionProvider"])
    rows = np.random.default_rng(0).standard_normal((5, mlp.WIDTHS[0]), dtype=np.float32)
    (together,) = session.run(["y"], {"x": rows})
    alone = np.concatenate([session.run(["y"], {"x": row[None]})[0] for row in rows])
    assert together.shape == (5, mlp.WIDTHS[-1])
    np.testing.assert_allclose(together, alone, rtol=1e-4, atol=1e-4)


def test_what_is_complete_is_left_alone_and_what_is_not_is_replaced(mlp: Any, tmp_path: Path) -> None:
    repository = tmp_path / "models"
    mlp.write(repository)
    kept = repository / "mlp" / "1" / "model.onnx"
    kept.write_bytes(b"mine")
    (repository / "mlp_single" / "1" / "model.onnx").unlink()
    mlp.write(repository)
    assert kept.read_bytes() == b"mine"
    assert mlp.is_complete(repository / "mlp_single")


def test_only_one_of_the_two_is_batched(mlp: Any, tmp_path: Path) -> None:
    mlp.write(tmp_path / "models")
    batched, single = ((tmp_path / "models" / name / "config.pbtxt").read_text() for name in ("mlp", "mlp_single"))
    assert "dynamic_batching" in batched and "oriel.batching" not in batched
    assert "dynamic_batching" not in single and 'key: "oriel.batching"' in single
