"""Execution providers of ONNX Runtime: turns the names in a configuration into sessions that use them, or into a
refusal.

`prepare` reports what is missing before a session is opened. `verify` checks the session afterwards, because ONNX
Runtime falls back to the CPU without an error.
"""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from threading import Lock
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
_MODULE = "onnxruntime_ep_openvino"
# The OpenVINO plug-in takes OpenVINO's own properties instead of the options of the built-in provider.
_PROPERTIES = {
    "num_of_threads": "INFERENCE_NUM_THREADS",
    "num_streams": "NUM_STREAMS",
    "cache_dir": "CACHE_DIR",
}
_PRECISIONS = {"FP32": "f32", "FP16": "f16", "ACCURACY": "f32"}

_registering = Lock()
Provider = tuple[str, Mapping[str, str]]


def prepare(settings: Any, wanted: Sequence[Provider]) -> list[Any] | None:
    """Return the `providers` argument of a session; None if plug-in providers are needed, which are entered in
    `settings`.

    Raises LoadFailed that names the missing provider and what to install.
    """
    available = ort.get_available_providers()
    if not wanted:
        return [CPU]
    settings.add_session_config_entry(_RECORD, "1")
    if any(name in (CUDA, TENSORRT) and name in available for name, _ in wanted):
        _preload()
    name, options = wanted[0]
    if name == OPENVINO and len(wanted) == 1 and _plug_in():
        settings.add_provider_for_devices(_plug_in(), {"load_config": json.dumps({"CPU": _properties(options)})})
        return None
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
    if name in available or (name == OPENVINO and _plug_in()):
        return ""
    usable = ", ".join(each for each in available if each != "AzureExecutionProvider")
    text = f"execution provider {name[:64]!r} is not available, only {usable}"
    return f"{text}; install it: pip install 'oriel-serving[{_EXTRAS[name]}]'" if name in _EXTRAS else text


@cache
def _preload() -> None:
    """Load the CUDA libraries of pip's packages, which lie where the system's loader does not search."""
    if hasattr(ort, "preload_dlls"):
        ort.preload_dlls()


def _plug_in() -> list[Any]:
    """Return OpenVINO's CPU device if its plug-in is installed beside a plain ONNX Runtime. It is registered once per
    process.
    """
    with _registering:
        return _registered()


@cache
def _registered() -> list[Any]:
    if OPENVINO in ort.get_available_providers():
        return []  # the provider is built in
    try:
        module = import_module(_MODULE)
        ort.register_execution_provider_library(_MODULE, module.get_library_path())
    except (ImportError, AttributeError):
        return []
    found = [each for each in ort.get_ep_devices() if each.ep_name == OPENVINO]
    return [each for each in found if each.ep_metadata.get("ov_device") == "CPU"][:1]


def _properties(options: Mapping[str, str]) -> dict[str, str]:
    """Return the plug-in's properties with full precision unless the configuration says otherwise: by default it may
    round to BF16.
    """
    chosen = {"INFERENCE_PRECISION_HINT": _PRECISIONS.get(options.get("precision", "FP32"), "f32")}
    return chosen | {_PROPERTIES[key]: value for key, value in options.items() if key in _PROPERTIES}
