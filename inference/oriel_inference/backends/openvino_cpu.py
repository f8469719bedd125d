"""Executes compiled models of OpenVINO on the CPU, and compiles ONNX models to artefacts with it.

The model of an artefact stays with ONNX Runtime, which serves until the artefact does. OpenVINO's own models are opened
by `openvino_models`. Both take the package `openvino`, beside any distribution of ONNX Runtime, and import it when a
model is built or opened.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from oriel_inference.backends import OutsideProfile, Session, without_folders
from oriel_inference.backends.compilers import Compiler, CompilerIdentity, cpu_instructions, number, one_of
from oriel_inference.errors import BackendFailed, CompilerMissing, InvalidRequest, LoadFailed
from oriel_inference.model import EngineOptions, TensorInfo
from oriel_wire.v2.messages import Array

ENTRY = "model.blob"
MAX_COUNT = 256  # bound on streams, and on threads
MAX_TEXT_BYTES = 64 << 20  # bound on the texts of one input, each counted as long as the longest
MISSING = "the package openvino is not installed: pip install 'oriel-serving[openvino-compiler]'"
DEVICE = "CPU"
ANOTHER_WAY = "export the model to ONNX, which has more operators (docs/convert-to-onnx.md)"
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
    "string": "BYTES",
}
# OpenVINO computes these data types in INT32.
_NARROWED = ("INT64", "UINT64", "UINT32")
_SMALLEST, _LARGEST = -(1 << 31), (1 << 31) - 1
_PRECISIONS = {"FP32": "f32", "FP16": "f16", "BF16": "bf16"}
# operator -> its input that holds indices into the first one
_INDICES = {"GatherND": 1, "GatherElements": 1, "ScatterElementsUpdate": 1, "ROIAlign": 2, "ROIAlignRotated": 2}
_INDICES |= {f"Embedding{kind}": 1 for kind in ("BagOffsets", "BagOffsetsSum", "BagPacked", "BagPackedSum")}
_INDICES |= {"EmbeddingSegmentsSum": 1}
_FROM_THE_END = ("GatherND", "GatherElements", "ScatterElementsUpdate")  # take negative indices
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
            compiler_version=str(runtime().get_version()),
            device=cpu_instructions(),
            precision=options.compiler_settings.get("precision", ""),
        )

    def build(self, source: Path, options: EngineOptions, folder: Path) -> str:
        with loading(f"compile {source.name}"):
            compiled = core().compile_model(read(source), DEVICE, properties(options))
            _check_precision(compiled, options)
            OpenVinoSession(compiled)  # refuses tensors that the v2 protocol cannot carry
            exported = BytesIO()
            compiled.export_model(exported)
        (folder / ENTRY).write_bytes(exported.getbuffer())
        return ENTRY

    def open(self, path: Path, options: EngineOptions) -> "OpenVinoSession":
        with loading(f"open {path.name}"):
            compiled = core().import_model(path.read_bytes(), DEVICE, properties(options))
            _check_precision(compiled, options)
            return OpenVinoSession(compiled)


class OpenVinoSession(Session):
    """One compiled model. Each run takes one of its inference requests, which are made as runs need them.

    named: the names of tensors in the configuration: a tensor that has several names is called by one of these.
    texts: True if the model may have texts, which artefacts do not. Raises LoadFailed for other types.
    """

    provider = "OpenVINO"

    def __init__(self, compiled: Any, named: Collection[str] = (), *, texts: bool = False) -> None:
        self._compiled = compiled
        self._idle: list[Any] = []  # inference requests that nobody runs
        self.inputs = tuple(_info(port, named) for port in compiled.inputs)
        taken = {info.name for info in self.inputs}
        self.outputs = tuple(_info(port, named, taken) for port in compiled.outputs)
        self._ports = {info.name: index for index, info in enumerate(self.inputs)}
        self._positions = {info.name: index for index, info in enumerate(self.outputs)}
        self._texts = {info.name for info in (*self.inputs, *self.outputs) if info.datatype == "BYTES"}
        if self._texts and not texts:
            raise LoadFailed(f"tensor {min(self._texts)[:128]!r} holds texts: remove the accelerator openvino")
        self._narrowed = [info.name for info in self.inputs if info.datatype in _NARROWED]

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        if len(inputs) < len(self._ports):  # the inference request would take the tensor of its caller before
            missing = next(name for name in self._ports if name not in inputs)
            raise InvalidRequest(f"input {missing[:64]!r} is missing: the model's file has no default for it")
        for name, array in inputs.items():
            if not array.size:  # operators over nothing leave what the caller before had in their outputs
                raise OutsideProfile(f"input {name[:64]!r} is empty, which OpenVINO does not compute")
        for name in self._narrowed:
            if inputs[name].max() > _LARGEST or inputs[name].min() < _SMALLEST:
                raise OutsideProfile(f"input {name[:64]!r} has numbers beyond 32 bits, which OpenVINO would cut off")
        if self._texts:
            inputs = {name: _packed(array, name) if name in self._texts else array for name, array in inputs.items()}
        try:
            request = self._idle.pop()  # atomic, as `append` is: several threads may run at once
        except IndexError:
            request = None
        try:
            request = request or self._compiled.create_infer_request()
            given = {self._ports[name]: array for name, array in inputs.items()}
            results = request.infer(given, share_inputs=True).to_tuple()
            if self._texts:
                results = [_unpacked(request.get_output_tensor(index), each) for index, each in enumerate(results)]
        except Exception as error:
            # A request that failed is not used again.
            raise BackendFailed("the model could not be executed", plain(error)) from error
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
    streams = given.get("streams", str(options.concurrent_runs))
    runs = int(streams) if streams.isdigit() else options.concurrent_runs  # AUTO and NUMA leave the number to OpenVINO
    chosen: dict[str, str | bool] = {
        _PRECISION_KEY: _PRECISIONS[given.get("precision", "FP32")],
        "INFERENCE_NUM_THREADS": given.get("threads", str(options.intra_op_threads * runs)),
        "ENABLE_CPU_PINNING": False,
    }
    if "hint" in given:
        chosen["PERFORMANCE_HINT"] = given["hint"]
    if "streams" in given or "hint" not in given:
        chosen["NUM_STREAMS"] = streams
    return chosen


def _packed(array: Array, name: str) -> Any:
    """Return texts as OpenVINO takes them. Each takes the room of the longest, so that is bounded."""
    width = max(map(len, array.flat), default=0)
    if width * array.size > MAX_TEXT_BYTES:
        reason = f"{array.size} texts of up to {width} bytes, more than {MAX_TEXT_BYTES} bytes"
        raise InvalidRequest(f"input {name[:64]!r} holds {reason}: send fewer at once")
    tensor = runtime().Tensor(runtime().Type.string, list(array.shape))
    tensor.bytes_data = array.astype(np.bytes_)
    return tensor


def _unpacked(tensor: Any, array: Array) -> Array:
    return tensor.bytes_data.astype(object) if array.dtype.kind == "U" else array


def _check_precision(compiled: Any, options: EngineOptions) -> None:
    """Raise LoadFailed if OpenVINO computes in another precision than the one that was asked for: it says nothing."""
    wanted = options.compiler_settings.get("precision", "FP32")
    used = compiled.get_property(_PRECISION_KEY).get_type_name()
    if used != _PRECISIONS[wanted]:
        known = next((name for name, each in _PRECISIONS.items() if each == used), used)
        raise LoadFailed(f"OpenVINO does not compute in {wanted} on this CPU, but in {known}")


def name_of(port: Any, named: Collection[str], taken: Collection[str] = ()) -> str:
    """Return the name of a tensor: the one in `named`, or else its first name that is not in `taken`."""
    names = sorted(port.get_names()) or [port.get_node().get_friendly_name()]
    own = [name for name in names if name not in taken] or names
    return str(next((name for name in own if name in named), own[0]))


def _info(port: Any, named: Collection[str], taken: Collection[str] = ()) -> TensorInfo:
    name, kind = name_of(port, named, taken), port.get_element_type().get_type_name()
    if kind not in _DATATYPES:
        raise LoadFailed(f"tensor {name[:128]!r} has type {kind}, which OpenVINO does not execute here: convert it")
    if port.get_partial_shape().rank.is_dynamic:
        raise LoadFailed(f"tensor {name[:128]!r} has no fixed number of dimensions: export the model with one")
    shape = tuple(dim.get_length() if dim.is_static else -1 for dim in port.get_partial_shape())
    return TensorInfo(name=name, datatype=_DATATYPES[kind], shape=shape)


def runtime() -> Any:
    """Return the package. Raises CompilerMissing."""
    try:
        package = import_module("openvino")
    except ImportError as error:
        raise CompilerMissing(MISSING) from error
    if getattr(package, "__file__", None) is None:  # any folder of that name can be imported
        raise CompilerMissing(MISSING)
    return package


@contextmanager
def loading(what: str) -> Iterator[None]:
    try:
        yield
    except LoadFailed:
        raise
    except Exception as error:
        # OpenVINO's exceptions have no common base class below Exception.
        raise LoadFailed(f"OpenVINO cannot {what}: {plain(error)}") from error


@cache
def core() -> Any:
    """Return OpenVINO's core; one per process, used by any thread."""
    made = runtime().Core()
    made.set_property({"ENABLE_MMAP": False})  # a file that becomes shorter while it is mapped ends the process
    return made


def read(source: Path) -> Any:
    """Read a model, and keep its indices inside their tensors: the operators below check none, and would read and write
    anywhere, or leave what the caller before had there.
    """
    model = core().read_model(str(source))
    _bound_indices(model)
    return model


def _bound_indices(model: Any) -> None:
    op = import_module("openvino.opset13")
    for node in model.get_ops():
        kind = node.get_type_name()
        for body in range(2 if kind == "If" else 1 if kind in ("Loop", "TensorIterator") else 0):
            _bound_indices(node.get_function(*([body] if kind == "If" else [])))
        if kind == "TopK":
            number = node.input_value(1)
            sizes = op.shape_of(node.input_value(0), number.get_element_type().get_type_name())
            most = op.gather(sizes, op.constant(node.get_axis()), 0)
            node.input(1).replace_source_output(op.minimum(number, most).output(0))
        if kind.startswith("EmbeddingBagOffsets") and node.input_value(2).get_node().get_type_name() != "Constant":
            reason = f"OpenVINO's {kind} leaves a bag without entries as the caller before had it"
            raise LoadFailed(f"{reason}: {ANOTHER_WAY}")
        if port := _INDICES.get(kind):
            indices = node.input_value(port)
            whole = indices.get_element_type().get_type_name()
            sizes = op.shape_of(node.input_value(0), whole)
            if kind == "GatherND":
                first = op.constant([int(node.get_attributes()["batch_dims"])])
                sizes = op.slice(sizes, first, op.add(op.gather(op.shape_of(indices), [-1], 0), first), [1])
            elif kind == "ScatterElementsUpdate":
                sizes = op.gather(sizes, node.input_value(3), 0)
            else:
                sizes = op.gather(sizes, op.constant(int(node.get_attributes().get("axis", 0))), 0)
            last = op.subtract(sizes, op.convert(op.constant(1), whole))
            least = op.negative(sizes) if kind in _FROM_THE_END else op.subtract(sizes, sizes)
            bounded = op.minimum(op.maximum(indices, least), last)
            node.input(port).replace_source_output(bounded.output(0))


def plain(error: Exception) -> str:
    """Return OpenVINO's error text as one line, without the lines about its own source files and without folders."""
    lines = [line for line in str(error).splitlines() if not line.startswith(_ABOUT_ITSELF)]
    return (without_folders(" ".join(lines)) or without_folders(str(error)))[:300]
