"""Reads the parameters of OpenVINO models: their names are those of Triton's back ends for OpenVINO and TensorFlow."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec

from oriel_inference.backends.compilers import never, number, one_of
from oriel_inference.repository.accelerators import LIBRARY
from oriel_inference.repository.config import read_parameters
from oriel_inference.repository.instances import Place, instances_by_demand
from oriel_wire.v2.proto import model_config_pb2 as pb

BACKEND = "openvino"
MAX_COUNT = 256  # bound on streams, and on threads


def _upper(read: Callable[[str], str]) -> Callable[[str], str]:
    return lambda text: read(text.upper())


def _streams(text: str) -> str:
    return text if text in ("AUTO", "NUMA") else number(1, MAX_COUNT)(text)


def _device(text: str) -> str:
    if text not in ("CPU", "AUTO"):
        raise ValueError("must be CPU: OpenVINO models run on the CPU here")
    return text


_YES_NO = _upper(one_of("YES", "NO"))
_PARAMETERS: dict[str, Callable[[str], str]] = {
    "PERFORMANCE_HINT": _upper(one_of("LATENCY", "THROUGHPUT")),
    "NUM_STREAMS": _upper(_streams),
    "INFERENCE_NUM_THREADS": number(0, MAX_COUNT),
    "HINT_BF16": _YES_NO,
    "SKIP_OV_DYNAMIC_BATCHSIZE": _YES_NO,
    "ENABLE_BATCH_PADDING": _YES_NO,
    "RESHAPE_IO_LAYERS": _YES_NO,
    "TARGET_DEVICE": _upper(_device),
    "CPU_EXTENSION_PATH": never(LIBRARY),
    "TF_GRAPH_TAG": one_of("serve"),
    "TF_SIGNATURE_DEF": str,
}


def with_openvino(config: pb.ModelConfig, file: str, found: Sequence[Place], cores: int) -> list[Place]:
    """Return the places of an OpenVINO model with its parameters, and with the number of runs that share what is
    compiled. Raises ConfigInvalid that names the parameter.
    """
    settings = _settings(config, file)
    streams = settings.get("streams", "1")
    # INFERENCE_NUM_THREADS counts the threads of all streams.
    threads = -(-int(settings.get("threads", "0")) // (int(streams) if streams.isdigit() else 1))
    placed = [
        replace(
            place,
            options=replace(
                place.options,
                providers=(),
                intra_op_threads=threads or place.options.intra_op_threads,
                compiler_settings=settings,
            ),
        )
        for place in found
    ]
    runs = instances_by_demand(config, placed, cores) or len(placed)
    return [replace(place, options=replace(place.options, concurrent_runs=runs)) for place in placed]


def _settings(config: pb.ModelConfig, file: str) -> dict[str, str]:
    """Return the settings of a model as the backend `openvino` takes them.

    hint, streams, threads, precision: as those of the compiler `openvino`.
    batch: "free" for a first dimension that is made variable, "fixed" for one that stays. padding: "1" if batches are
    filled up to a fixed one.
    names, shapes: JSON, the names of the configured tensors, and the shapes that inputs get.
    signature: the signature of a SavedModel.

    Raises ConfigInvalid that names the parameter.
    """
    given = read_parameters(config, file, _PARAMETERS)
    yes = {key for key, value in given.items() if value == "YES"}
    batched = config.max_batch_size > 0
    fixed = "SKIP_OV_DYNAMIC_BATCHSIZE" in yes
    first = [] if not batched else [config.max_batch_size if fixed else -1]
    dims = {
        each.name: [*first, *(each.reshape.shape if each.HasField("reshape") else each.dims)] for each in config.input
    }
    names = [*(each.name for each in config.input), *(each.name for each in config.output)]
    settings = {
        "hint": given.get("PERFORMANCE_HINT", ""),
        "streams": given.get("NUM_STREAMS", ""),
        "threads": given.get("INFERENCE_NUM_THREADS", "0").lstrip("0"),
        "precision": "BF16" if "HINT_BF16" in yes else "",
        "batch": ("fixed" if fixed else "free") if batched else "",
        "padding": "1" if "ENABLE_BATCH_PADDING" in yes else "",
        "shapes": msgspec.json.encode(dims).decode() if "RESHAPE_IO_LAYERS" in yes else "",
        "signature": given.get("TF_SIGNATURE_DEF", ""),
        "names": msgspec.json.encode(names).decode(),
    }
    return {key: value for key, value in settings.items() if value}


def runs_on(config: pb.ModelConfig) -> str:
    """Return what to report of a model in the format of another engine; "" for any other model."""
    foreign = config.backend == BACKEND and not config.default_model_filename.endswith((".xml", ".onnx"))
    return f"{config.default_model_filename[:64]} is executed by OpenVINO" if foreign else ""
