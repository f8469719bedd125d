"""OpenVINO's compiled model as an artefact, executed by OpenVINO on the CPU.

The model itself stays with ONNX Runtime, which serves until the artefact does. It takes the package `openvino`, beside
any distribution of ONNX Runtime, and is imported when an artefact is built or opened.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

from oriel_inference.backends import OutsideProfile, Session, without_folders
from oriel_inference.backends.compilers import Compiler, CompilerIdentity, cpu_instructions, number, one_of
from oriel_inference.errors import BackendFailed, CompilerMissing, LoadFailed
from oriel_inference.model import EngineOptions, TensorInfo
from oriel_wire.v2.messages import Array

ENTRY = "model.blob"
MAX_COUNT = 256  # bound on streams, and on threads
MISSING = "the package openvino is not installed: pip install 'oriel-serving[openvino-compiler]'"
_DEVICE = "CPU"
_DATATYPES = {
    "boolean": "BOOL",
    "u8": "UINT8",
    "u16": "UINT16",
    "u32": "UINT32",
    "u64": "UINT64",
    "i8": "INT8",
    "i16": "INT16",
    "i32": "INT32",
    "i64": "INT64",
    "f16": "FP16",
    "f32": "FP32",
    "f64": "FP64",
}
# OpenVINO computes these data types in INT32.
_NARROWED = ("INT64", "UINT64", "UINT32")
_SMALLEST, _LARGEST = -(1 << 31), (1 << 31) - 1
_PRECISIONS = {"FP32": "f32", "FP16": "f16", "BF16": "bf16"}
_PRECISION_KEY = "INFERENCE_PRECISION_HINT"
# Lines of an error text that name OpenVINO's own source files.
_ABOUT_ITSELF = ("Exception from ", "Check '")


class OpenVino(Compiler):
    """Compiles for the CPU."""

    name = "openvino"
    settings = {
        "precision": one_of(*_PRECISIONS),
        "streams": number(1, MAX_COUNT),
        "threads": number(1, MAX_COUNT),
        "hint": one_of("LATENCY", "THROUGHPUT"),
    }

    def identity(self, options: EngineOptions) -> CompilerIdentity:
        return CompilerIdentity(
            compiler_version=str(_runtime().get_version()),
            device=cpu_instructions(),
            precision=options.compiler_settings.get("precision", ""),
        )

    def build(self, source: Path, options: EngineOptions, folder: Path) -> str:
        with _loading(f"compile {source.name}"):
            compiled = _core().compile_model(str(source), _DEVICE, properties(options))
            _check_precision(compiled, options)
            OpenVinoSession(compiled)  # refuses tensors that the v2 protocol cannot carry
            exported = BytesIO()
            compiled.export_model(exported)
        (folder / ENTRY).write_bytes(exported.getbuffer())
        return ENTRY

    def open(self, path: Path, options: EngineOptions) -> "OpenVinoSession":
        with _loading(f"open {path.name}"):
            compiled = _core().import_model(path.read_bytes(), _DEVICE, properties(options))
            _check_precision(compiled, options)
            return OpenVinoSession(compiled)


class OpenVinoSession(Session):
    """One compiled model. Each run takes one of its inference requests, which are made as runs need them."""

    provider = "OpenVINO"

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self._idle: list[Any] = []  # inference requests that nobody runs
        self.inputs = tuple(_info(port) for port in compiled.inputs)
        self.outputs = tuple(_info(port) for port in compiled.outputs)
        self._positions = {info.name: index for index, info in enumerate(self.outputs)}
        self._narrowed = [info.name for info in self.inputs if info.datatype in _NARROWED]

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        for name in self._narrowed:
            if (array := inputs[name]).size and (array.max() > _LARGEST or array.min() < _SMALLEST):
                raise OutsideProfile(f"input {name[:64]!r} has numbers beyond 32 bits, which OpenVINO would cut off")
        try:
            request = self._idle.pop()  # atomic, as `append` is: several threads may run at once
        except IndexError:
            request = None
        try:
            request = request or self._compiled.create_infer_request()
            results = request.infer(dict(inputs), share_inputs=True).to_tuple()
        except Exception as error:
            # A request that failed is not used again.
            raise BackendFailed("the model could not be executed", _plain(error)) from error
        self._idle.append(request)
        return [results[self._positions[name]] for name in outputs]

    def close(self) -> None:
        self._idle.clear()
        self._compiled = None


def properties(options: EngineOptions) -> dict[str, str | bool]:
    """Return OpenVINO's properties of a compiled model.

    The precision is the full one unless the owner chose another: by itself OpenVINO may round to BF16. Streams are as
    many as the runs at once, each with the threads of one instance; a performance hint lets OpenVINO choose the streams
    within these threads. Threads are not bound to cores, because other models use the same cores.
    """
    given = options.compiler_settings
    streams = int(given.get("streams", options.concurrent_runs))
    chosen: dict[str, str | bool] = {
        _PRECISION_KEY: _PRECISIONS[given.get("precision", "FP32")],
        "INFERENCE_NUM_THREADS": given.get("threads", str(options.intra_op_threads * streams)),
        "ENABLE_CPU_PINNING": False,
    }
    if "hint" in given:
        chosen["PERFORMANCE_HINT"] = given["hint"]
    if "streams" in given or "hint" not in given:
        chosen["NUM_STREAMS"] = str(streams)
    return chosen


def _check_precision(compiled: Any, options: EngineOptions) -> None:
    """Raise LoadFailed if OpenVINO computes in another precision than the one that was asked for: it says nothing."""
    wanted = options.compiler_settings.get("precision", "FP32")
    used = compiled.get_property(_PRECISION_KEY).get_type_name()
    if used != _PRECISIONS[wanted]:
        known = next((name for name, each in _PRECISIONS.items() if each == used), used)
        raise LoadFailed(f"OpenVINO does not compute in {wanted} on this CPU, but in {known}")


def _info(port: Any) -> TensorInfo:
    name, kind = port.get_any_name(), port.get_element_type().get_type_name()
    if kind not in _DATATYPES:
        raise LoadFailed(f"tensor {name[:128]!r} has type {kind}, which is not compiled by OpenVINO here")
    shape = tuple(dim.get_length() if dim.is_static else -1 for dim in port.get_partial_shape())
    return TensorInfo(name=name, datatype=_DATATYPES[kind], shape=shape)


def _runtime() -> Any:
    """Return the package. Raises CompilerMissing."""
    try:
        package = import_module("openvino")
    except ImportError as error:
        raise CompilerMissing(MISSING) from error
    if getattr(package, "__file__", None) is None:  # any folder of that name can be imported
        raise CompilerMissing(MISSING)
    return package


@contextmanager
def _loading(what: str) -> Iterator[None]:
    try:
        yield
    except LoadFailed:
        raise
    except Exception as error:
        # OpenVINO's exceptions have no common base class below Exception.
        raise LoadFailed(f"OpenVINO cannot {what}: {_plain(error)}") from error


@cache
def _core() -> Any:
    """Return OpenVINO's core; one per process, used by any thread."""
    return _runtime().Core()


def _plain(error: Exception) -> str:
    """Return OpenVINO's error text as one line, without the lines about its own source files and without folders."""
    lines = [line for line in str(error).splitlines() if not line.startswith(_ABOUT_ITSELF)]
    return (without_folders(" ".join(lines)) or without_folders(str(error)))[:300]
