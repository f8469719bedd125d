"""The module that models import: `import triton_python_backend_utils as pb_utils`.

It has the names that Triton documents for Python models. A name that is missing here raises an AttributeError that says
so.
"""

import logging
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from oriel_inference.backends.python.frames import tensor_parts
from oriel_inference.backends.python.messages import Manage
from oriel_inference.backends.python.pb_config import ModelConfig
from oriel_inference.backends.python.pb_errors import (
    NotThere,
    TritonError,
    TritonModelException,
    checked_text,
    printed,
)
from oriel_inference.backends.python.pb_metrics import MetricFamily
from oriel_inference.backends.python.pb_request import (
    InferenceRequest,
    InferenceResponse,
    InferenceResponseSender,
    InferenceTrace,
    PreferredMemory,
)
from oriel_inference.backends.python.pb_tensor import (
    TRITON_STRING_TO_NUMPY,
    Tensor,
    deserialize_bytes_tensor,
    numpy_to_triton_type,
    serialize_byte_tensor,
    triton_string_to_numpy,
    triton_to_numpy_type,
)
from oriel_inference.backends.python.runtime import current
from oriel_wire.errors import BadMessage
from oriel_wire.process.messages import Buffer

__all__ = [
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "TRITON_STRING_TO_NUMPY",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "InferenceTrace",
    "Logger",
    "MetricFamily",
    "ModelConfig",
    "PreferredMemory",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "deserialize_bytes_tensor",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_model_dir",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "is_model_ready",
    "load_model",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "unload_model",
    "using_decoupled_model_transaction_policy",
]

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2
TRITONSERVER_MEMORY_CPU = 0
TRITONSERVER_MEMORY_GPU = 2

_model_dir = ""


def connect(model_dir: str) -> None:
    """Set the model's folder before the model is imported; not one of the documented names."""
    global _model_dir
    _model_dir = model_dir


def __getattr__(name: str) -> Any:
    raise NotThere(f"pb_utils.{name} is not supported by this server, see docs/python-models.md")


class Logger:
    """Writes lines to the server's log; used as a class, as documented."""

    INFO, WARNING, ERROR, VERBOSE = logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG

    @staticmethod
    def log(message: object, level: int = logging.INFO) -> None:
        known = isinstance(level, int) and level in (Logger.INFO, Logger.WARNING, Logger.ERROR, Logger.VERBOSE)
        current().say(int(level) if known else Logger.INFO, printed(message))

    @staticmethod
    def log_info(message: object) -> None:
        Logger.log(message, logging.INFO)

    @staticmethod
    def log_warn(message: object) -> None:
        Logger.log(message, logging.WARNING)

    @staticmethod
    def log_error(message: object) -> None:
        Logger.log(message, logging.ERROR)

    @staticmethod
    def log_verbose(message: object) -> None:
        Logger.log(message, logging.DEBUG)


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """Return the request's input of that name; None if it has none."""
    name = checked_text(name, "the name of an input")
    return next((each for each in inference_request.inputs() if each.name() == name), None)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """Return the response's output of that name; None if it has none."""
    name = checked_text(name, "the name of an output")
    return next((each for each in inference_response.output_tensors() if each.name() == name), None)


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    """Return the input's part of a parsed model configuration; None if it has none."""
    return next((each for each in model_config.get("input", ()) if each["name"] == name), None)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> Any:
    """Return the output's part of a parsed model configuration; None if it has none."""
    return next((each for each in model_config.get("output", ()) if each["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    """Return whether a parsed model configuration is decoupled."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def load_model(model_name: str, config: str = "", files: Mapping[str, bytes] | None = None) -> None:
    """Load or reload a model, as a client's request to load it does. config: JSON that replaces the configuration file.
    files: `file:<version>/<path>` -> bytes.
    """
    if not isinstance(files, Mapping | None):
        raise TritonModelException("load_model: files must be a dictionary of paths and bytes")
    body: list[Buffer] = []
    try:
        parts = [(name, "UINT8", np.frombuffer(data, np.uint8)) for name, data in (files or {}).items()]
        heads = tensor_parts(parts, body)
    except (BadMessage, TypeError, ValueError) as error:
        raise TritonModelException(f"load_model: the files cannot be sent: {error}") from error
    name, text = checked_text(model_name, "model_name"), checked_text(config or "", "config")
    current().result(lambda number: Manage(number, "load", name, config=text, files=heads), body)


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Take a model out of service. unload_dependents: the models of an ensemble's steps, too."""
    name, dependents = checked_text(model_name, "model_name"), bool(unload_dependents)
    current().result(lambda number: Manage(number, "unload", name, dependents=dependents))


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Return whether a model, or a version of it, serves."""
    name, version = checked_text(model_name, "model_name"), checked_text(model_version, "model_version")
    if version and not (version.isascii() and version.isdigit()):
        raise TritonModelException(f"is_model_ready: {version[:64]!r} is not the number of a version")
    return bool(current().result(lambda number: Manage(number, "ready", name, version)).parameters["ready"])


def get_model_dir() -> str:
    """Return the folder of the version, which holds `model.py`."""
    return os.path.abspath(_model_dir)
