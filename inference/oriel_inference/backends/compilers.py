"""Compilers behind one interface: each turns a model file into an artefact that opens or runs faster.

`oriel_inference.artefacts` decides when one is built and whether it may serve; a compiler only builds and opens. Its
`build` is called in a child process with bounds on time and memory.
"""

import platform
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TypeVar

from oriel_inference.backends import Session
from oriel_inference.errors import ConfigInvalid, LoadFailed
from oriel_inference.model import EngineOptions

T = TypeVar("T")
_COMPILERS = {
    "onnxruntime-graph": "oriel_inference.backends.onnx_graph:OnnxGraph",
    "openvino": "oriel_inference.backends.openvino_cpu:OpenVino",
    "tensorrt": "oriel_inference.backends.tensorrt.compiler:TensorRtCompiler",
    "variant-fp16": "oriel_inference.backends.variants:Variant:fp16",
    "variant-bf16": "oriel_inference.backends.variants:Variant:bf16",
    "variant-int8": "oriel_inference.backends.variants:Variant:int8",
}
VARIANT = "variant-"  # begins the names of those that serve another file of the model's owner
# Instruction sets that kernels are chosen by; the other flags of a CPU say nothing about code.
_INSTRUCTIONS = re.compile(
    r"(?:s?sse\d?\w*|pni|avx\w*|fma\w*|f16c|bmi\d|vnni\w*|amx_\w+|popcnt|vaes|vpclmulqdq|asimd\w*|sve\w*|sme(?:2\w*)?|i8mm|bf16)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompilerIdentity:
    """The versions that an artefact depends on besides the model; the fields are those of `ArtefactKey`."""

    compiler_version: str
    device: str
    driver: str = ""
    profiles: str = ""
    precision: str = ""
    options: str = ""
    compatibility: str = ""


class Compiler(ABC):
    """Base class of the compilers that build artefacts from models.

    reference: name of the backend whose sessions serve until its artefact does.
    on_gpu: it builds for a GPU, and its artefacts run there.
    settings: name -> function that reads a value that a model's owner gives, or raises ValueError that says what the
    value must be. `EngineOptions.compiler_settings` has the values that were read.
    """

    name: str
    reference = "onnxruntime"
    on_gpu = False
    settings: Mapping[str, Callable[[str], str]] = {}

    @abstractmethod
    def identity(self, options: EngineOptions) -> CompilerIdentity:
        """Return all that an artefact built with `options` on this machine depends on. Raises CompilerMissing."""

    @abstractmethod
    def build(self, source: Path, options: EngineOptions, folder: Path) -> str:
        """Write the artefact of a model file into an empty folder; blocks. Returns the name of the file to open, which
        may refer to others beside it. Raises LoadFailed.
        """

    @abstractmethod
    def open(self, path: Path, options: EngineOptions) -> Session:
        """Open the file that `build` named. options: those of the reference's session. Raises LoadFailed."""


def one_of(*values: str) -> Callable[[str], str]:
    """Return a function that reads a setting with these values."""

    def read(text: str) -> str:
        if text not in values:
            raise ValueError(f"must be one of {', '.join(values)}")
        return text

    return read


def number(least: int, most: int) -> Callable[[str], str]:
    """Return a function that reads a setting with a whole number."""

    def read(text: str) -> str:
        if not (text.isascii() and text.isdigit() and len(text) <= 15 and least <= int(text) <= most):
            raise ValueError(f"must be a number from {least} to {most}")
        return text

    return read


def never(reason: str) -> Callable[[str], str]:
    """Return a function that refuses every value of a setting."""

    def read(text: str) -> str:
        raise ValueError(reason)

    return read


def read_value(read: Callable[[str], T], text: str, file: str, field: str) -> T:
    """Return the value of a setting. read: raises ValueError that says what the value must be. Raises ConfigInvalid."""
    try:
        return read(text)
    except ValueError as error:
        raise ConfigInvalid(file, field, str(error)) from error


def compiler_names() -> list[str]:
    """Return the names of all compilers, installed or not."""
    return list(_COMPILERS)


def find_compiler(name: str) -> Compiler:
    """Return a compiler by its name. Raises LoadFailed if it is unknown or not installed."""
    target = _COMPILERS.get(name)
    if target is None:
        raise LoadFailed(f"{name[:64]!r} is not one of {', '.join(_COMPILERS)}")
    module, attribute, *arguments = target.split(":")
    try:
        factory: Callable[..., Compiler] = getattr(import_module(module), attribute)
    except ImportError as error:
        raise LoadFailed(f"{name!r} is not installed: pip install 'oriel-serving[cpu]'") from error
    return factory(*arguments)


@cache
def cpu_instructions() -> str:
    """Return the architecture of this CPU and its instruction sets."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    names = sorted({each for each in (found[1].split() if found else ()) if _INSTRUCTIONS.fullmatch(each)})
    return " ".join((platform.machine() or "unknown", *names))
