"""Reads the parameters of forests: those of Triton's backend `fil`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isfinite

from oriel_inference.backends.compilers import number, one_of
from oriel_inference.errors import ConfigInvalid
from oriel_inference.repository.config import read_parameters
from oriel_inference.repository.engines import MODEL_TYPES
from oriel_inference.repository.instances import MAX_THREADS, Place
from oriel_wire.v2.proto import model_config_pb2 as pb

BACKEND = "fil"
ROWS = 1024  # of a batch, if a configuration says nothing at all
# last part of a file's name -> model_type
_KINDS = {name.rpartition(".")[2]: kind for kind, name in MODEL_TYPES.items()}


def _threshold(text: str) -> str:
    try:
        known = isfinite(float(text))
    except ValueError:
        known = False
    if not known:
        raise ValueError("must be a number")
    return text


_SWITCH = one_of("true", "false")
_PARAMETERS: dict[str, Callable[[str], str]] = {
    "model_type": one_of(*MODEL_TYPES),
    "output_class": _SWITCH,
    "predict_proba": _SWITCH,
    "xgboost_allow_unknown_field": _SWITCH,
    "threshold": _threshold,
    "cpu_nthread": number(1, MAX_THREADS),
}


def with_forest(config: pb.ModelConfig, file: str, found: Sequence[Place]) -> list[Place]:
    """Return the places of a forest with its parameters; completes a configuration that says nothing about batches.

    A run has one thread unless `cpu_nthread` gives it more: Treelite's threads cost more than they save, and the
    instances run at once. Raises ConfigInvalid that names the parameter.
    """
    if not (config.max_batch_size or config.input or config.output):
        config.max_batch_size = ROWS
        if config.WhichOneof("scheduling_choice") is None:
            config.dynamic_batching.SetInParent()
    given = read_parameters(config, file, _PARAMETERS)
    threads = int(given.pop("cpu_nthread", "1"))
    columns = [str(each.dims[0]) for each in config.output if len(each.dims) == 1]
    kind = given.get("model_type") or _KINDS.get(config.default_model_filename.rpartition(".")[2])
    if kind is None:
        known = ", ".join(MODEL_TYPES)
        raise ConfigInvalid(file, "parameters['model_type']", f"is missing: it is one of {known}")
    entries = {**given, "model_type": kind, **({"columns": columns[0]} if columns else {})}
    return [
        replace(place, options=replace(place.options, providers=(), session_entries=entries, intra_op_threads=threads))
        for place in found
    ]
