"""The backend `openvino`: opens OpenVINO IR, SavedModel, GraphDef, TFLite, Paddle and ONNX files on the CPU."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from oriel_inference.backends import Backend
from oriel_inference.backends.openvino_cpu import (
    ANOTHER_WAY,
    DEVICE,
    OpenVinoSession,
    core,
    loading,
    name_of,
    properties,
    read,
)
from oriel_inference.backends.saved_model import SAVED_MODEL, check_signature
from oriel_inference.errors import CompilerMissing, InvalidRequest, LoadFailed
from oriel_inference.model import EngineOptions
from oriel_wire.v2.messages import Array

MISSING = (
    "OpenVINO models need the package openvino, which is not installed: pip install 'oriel-serving[openvino-models]'"
)
# The sentences of OpenVINO's readers about operators that they cannot translate.
_OPERATORS = re.compile(
    r"No conversion rule found for operations: (.+)|Conversion is failed for: (.+)"
    r"|Cannot create (\w+) layer .* from unsupported opset"
)


class OpenVinoModels(Backend):
    """Opens files that OpenVINO reads. One object per load: the sessions of a file share what was compiled.

    Making one raises LoadFailed if the package is missing.
    """

    name = "openvino"

    def __init__(self) -> None:
        try:
            core()
        except CompilerMissing as error:
            raise LoadFailed(MISSING) from error
        self._compiled: dict[Path, Any] = {}

    def open(self, path: Path, options: EngineOptions) -> OpenVinoSession:
        settings = options.compiler_settings
        named = msgspec.json.decode(settings.get("names", "[]"), type=list[str])
        with loading(f"load {path.name}"):
            if path not in self._compiled:
                if path.name == SAVED_MODEL:
                    check_signature(path, settings.get("signature", ""))
                model = _read(path.parent if path.name == SAVED_MODEL else path)
                _reshape(model, settings, named)
                self._compiled[path] = core().compile_model(model, DEVICE, properties(options))
            compiled = self._compiled[path]
            if settings.get("batch") == "fixed":
                return FixedBatchSession(compiled, named, pads=settings.get("padding") == "1")
            return OpenVinoSession(compiled, named, texts=True)


class FixedBatchSession(OpenVinoSession):
    """A model whose first dimension stays fixed, while clients see a variable one.

    pads: True if smaller batches are filled up with zeros; otherwise they are refused.
    """

    def __init__(self, compiled: Any, named: Collection[str], *, pads: bool) -> None:
        super().__init__(compiled, named)
        firsts = {info.shape[0] if info.shape else -1 for info in (*self.inputs, *self.outputs)}
        if len(firsts) != 1 or -1 in firsts:
            raise LoadFailed("SKIP_OV_DYNAMIC_BATCHSIZE needs one fixed first dimension of all inputs and outputs")
        (self._fixed,) = firsts
        self._pads = pads
        self.rows = self._fixed
        self.inputs = tuple(replace(info, shape=(-1, *info.shape[1:])) for info in self.inputs)
        self.outputs = tuple(replace(info, shape=(-1, *info.shape[1:])) for info in self.outputs)

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        rows = min(array.shape[0] for array in inputs.values())
        if rows == self._fixed:
            return super().run(inputs, outputs)
        if not self._pads:
            reason = f"the model takes batches of {self._fixed} rows only, and this one has {rows}"
            raise InvalidRequest(f"{reason}: the parameter ENABLE_BATCH_PADDING fills them up")
        missing = self._fixed - rows
        full = {name: np.pad(array, [(0, missing), *[(0, 0)] * (array.ndim - 1)]) for name, array in inputs.items()}
        return [array[:rows] for array in super().run(full, outputs)]


def _read(source: Path) -> Any:
    """Read a model file, or the folder of a SavedModel. Raises LoadFailed that names operators which OpenVINO does not
    have.
    """
    try:
        model = read(source)
    except Exception as error:
        # OpenVINO's exceptions have no common base class below Exception.
        if operators := _unknown_operators(str(error)):
            what = f"operators {operators}" if "," in operators else f"operator {operators}"
            raise LoadFailed(f"OpenVINO does not have the {what}: {ANOTHER_WAY}") from error
        raise
    if source.suffix == ".graphdef":
        for port in (*model.inputs, *model.outputs):  # Triton's names are those of the nodes
            port.get_tensor().add_names({name.removesuffix(":0") for name in port.get_names()})
    return model


def _unknown_operators(text: str) -> str:
    """Return the names of the operators that a reader's error text complains about; "" if it is about none."""
    found = [name for line in _OPERATORS.findall(text) for name in next(filter(None, line)).split(", ")]
    return ", ".join(dict.fromkeys(found))[:200]


def _reshape(model: Any, settings: Mapping[str, str], named: Collection[str]) -> None:
    """Give the inputs the shapes that the configuration asks for: dims of its own (RESHAPE_IO_LAYERS), and a variable
    first dimension for a model that is batched.
    """
    wanted = msgspec.json.decode(settings.get("shapes", "{}"), type=dict[str, list[int]])
    shapes: dict[int, list[int]] = {}
    for index, port in enumerate(model.inputs):
        shape = port.get_partial_shape()
        own = [dim.get_length() if dim.is_static else -1 for dim in shape] if shape.rank.is_static else [-1]
        given = wanted.get(name_of(port, named), own)
        if settings.get("batch") == "free" and given:
            given = [-1, *given[1:]]
        if given != own:
            shapes[index] = given
    if shapes:
        model.reshape(shapes)
