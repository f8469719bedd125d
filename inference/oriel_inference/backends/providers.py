"""Execution providers of ONNX Runtime: turns the names in a configuration into sessions that use them, or into a
refusal.

`prepare` reports what is missing before a session is opened. `verify` checks the session afterwards, because ONNX
Runtime falls back to the CPU without an error.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import onnxruntime as ort

from oriel_inference.errors import LoadFailed

CPU = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"
OPENVINO = "OpenVINOExecutionProvider"
TENSORRT = "TensorrtExecutionProvider"
_EXTRAS = {CPU: "cpu", CUDA: "gpu", TENSORRT: "tensorrt", OPENVINO: "openvino"}
_FOLDERS = ("trt_engine_cache_path", "trt_timing_cache_path")
_RECORD = "session.record_ep_graph_assignment_info"

Provider = tuple[str, Mapping[str, str]]


def prepare(settings: Any, wanted: Sequence[Provider]) -> list[Any]:
    """Return the `providers` argument of a session. Raises LoadFailed that names the missing provider and what to
    install.
    """
    available = ort.get_available_providers()
    if not wanted:
        return [CPU]
    settings.add_session_config_entry(_RECORD, "1")
    if any(name in (CUDA, TENSORRT) and name in available for name, _ in wanted):
        _preload()
    for name, _ in wanted:
        if lack := missing(name):
            raise LoadFailed(lack)
    for key in _FOLDERS:
        for _, given in wanted:
            if key in given:
                # TensorRT creates only the last folder of a path.
                Path(given[key]).mkdir(parents=True, exist_ok=True)
    return [*((name, dict(options)) for name, options in wanted if name != CPU), CPU]


def verify(session: Any, names: Sequence[str]) -> None:
    """Raise LoadFailed unless `session` uses every provider of `names`, and the first of them for a part of the
    model.
    """
    actual = session.get_providers()
    for name in names:
        if name not in actual:
            raise LoadFailed(
                f"the model asks for {name}, but ONNX Runtime could not start it and would run the model on {actual[0]}"
            )
    if not names or names[0] == CPU or not hasattr(session, "get_provider_graph_assignment_info"):
        return
    used = {part.ep_name for part in session.get_provider_graph_assignment_info()}
    if used and names[0] not in used:
        raise LoadFailed(
            f"{names[0]} supports no part of this model: ONNX Runtime would run all of it on {sorted(used)[0]}"
        )


def missing(name: str) -> str:
    """Return why the provider cannot be used in this installation and what to install; "" if it can be used."""
    available = ort.get_available_providers()
    if name in available:
        return ""
    usable = ", ".join(each for each in available if each != "AzureExecutionProvider")
    text = f"execution provider {name[:64]!r} is not available, only {usable}"
    return f"{text}; install it: pip install 'oriel-serving[{_EXTRAS[name]}]'" if name in _EXTRAS else text


@cache
def _preload() -> None:
    """Load the CUDA libraries of pip's packages, which lie where the system's loader does not search."""
    if hasattr(ort, "preload_dlls"):
        ort.preload_dlls()
