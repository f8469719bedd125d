"""ONNX Runtime's optimised graph as an artefact: a model file in which the optimisations of a load are done already.

It may hold layouts for the instruction sets of the CPU that wrote it, so these are part of its fingerprint.
"""

from pathlib import Path

import onnxruntime as ort

from oriel_inference.backends.compilers import Compiler, CompilerIdentity, cpu_instructions
from oriel_inference.backends.onnx_runtime import OnnxRuntimeSession, open_session, session_settings
from oriel_inference.model import EngineOptions

ENTRY = "optimised.onnx"
WEIGHTS = "weights.bin"
# A single ONNX file holds less than 2 GiB, so weights of at least this size go into a file of their own.
EXTERNAL_BYTES = 4096
_WEIGHTS_KEY = "session.optimized_model_external_initializers_file_name"
_WEIGHTS_BYTES_KEY = "session.optimized_model_external_initializers_min_size_in_bytes"


class OnnxGraph(Compiler):
    """Compiles for the CPU."""

    name = "onnxruntime-graph"

    def identity(self, options: EngineOptions) -> CompilerIdentity:
        entries = [f"{key}={value}" for key, value in sorted(options.session_entries.items())]
        return CompilerIdentity(
            compiler_version=ort.__version__,
            device=cpu_instructions(),
            options=" ".join((f"graph_level={options.graph_level}", *entries)),
        )

    def build(self, source: Path, options: EngineOptions, folder: Path) -> str:
        settings = session_settings(options)
        settings.optimized_model_filepath = str(folder / ENTRY)
        settings.add_session_config_entry(_WEIGHTS_KEY, WEIGHTS)
        settings.add_session_config_entry(_WEIGHTS_BYTES_KEY, str(EXTERNAL_BYTES))
        open_session(source, settings, options)
        return ENTRY

    def open(self, path: Path, options: EngineOptions) -> OnnxRuntimeSession:
        settings = session_settings(options)
        settings.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        return OnnxRuntimeSession(open_session(path, settings, options), options)
