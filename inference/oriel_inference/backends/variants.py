"""Variants of a model in other precisions: files that its owner put beside the model's own file.

Nothing is compiled: the artefact is a copy of the owner's file, and is checked and served like any other artefact.
Beside `model.onnx`, the variant int8 is `model.int8.onnx`. Weights in files of their own have names that begin so.
"""

import shutil
from pathlib import Path

import onnxruntime as ort

from oriel_inference.backends.compilers import VARIANT, Compiler, CompilerIdentity, cpu_instructions
from oriel_inference.backends.onnx_runtime import OnnxRuntimeSession, open_session, session_settings
from oriel_inference.errors import LoadFailed
from oriel_inference.model import EngineOptions


class Variant(Compiler):
    """One precision, as a compiler. precision: the part of the file's name."""

    def __init__(self, precision: str) -> None:
        self.name = VARIANT + precision
        self._precision = precision

    def identity(self, options: EngineOptions) -> CompilerIdentity:
        return CompilerIdentity(
            compiler_version=ort.__version__,
            device=cpu_instructions(),
            precision=self._precision.upper(),
            options=f"graph_level={options.graph_level}",
        )

    def build(self, source: Path, options: EngineOptions, folder: Path) -> str:
        name = f"{source.stem}.{self._precision}.onnx"
        if not (source.parent / name).is_file():
            raise LoadFailed(f"there is no {name} beside {source.name}")
        for path in source.parent.iterdir():
            if path.name.startswith(name) and path.is_file():
                shutil.copyfile(path, folder / path.name)
        return name

    def open(self, path: Path, options: EngineOptions) -> OnnxRuntimeSession:
        return OnnxRuntimeSession(open_session(path, session_settings(options), options), options)
