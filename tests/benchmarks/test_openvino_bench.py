"""How the benchmark of OpenVINO prints what was compared."""

from inference_bench.openvino import HEADING, rows_of

from oriel_inference.artefacts.compare import Comparison, Contestant
from oriel_policies.artefacts.comparison import OutputError


def comparison(openvino: Contestant) -> Comparison:
    reference = Contestant(name="fp32", state="reference", median_ms={1: 2.0, 8: 9.0}, cpu_ms={1: 2.5, 8: 9.5})
    return Comparison(model="tiny", version=1, contestants=[reference, openvino])


def test_each_batch_size_has_a_line_with_both_times() -> None:
    error = OutputError(name="y", datatype="FP32", elements=4, absolute=2e-6)
    openvino = Contestant(
        name="openvino", state="agrees", errors=[error], median_ms={1: 1.0, 8: 10.0}, cpu_ms={1: 1.5, 8: 11.0}
    )
    first, second = rows_of(comparison(openvino))
    assert first == ["tiny", "1", "2.000", "1.000", "2.00x", "2.500", "1.500", "2e-06"]
    assert second == ["tiny", "8", "9.000", "10.000", "0.90x", "9.500", "11.000", "2e-06"]


def test_a_model_that_openvino_does_not_run_has_the_reason() -> None:
    (line,) = rows_of(comparison(Contestant(name="openvino", state="failed", reason="no such operator")))
    assert line[:3] == ["tiny", "failed", "no such operator"] and len(line) == len(HEADING)
