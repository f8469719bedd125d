"""First runs of a version: the requests of `model_warmup`, before it is ready, and a row of zeros."""

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from oriel_inference.backends import Session
from oriel_inference.batching.device import Device
from oriel_inference.batching.ragged import ragged_inputs
from oriel_inference.errors import ConfigInvalid, InferenceError
from oriel_inference.fitting import matches
from oriel_inference.model import ModelSpec, TensorInfo, TensorSpec
from oriel_inference.sequences.controls import first_step
from oriel_wire.errors import BadMessage
from oriel_wire.v2.datatypes import CONFIG_DATATYPES, DATATYPES, deserialize_bytes, from_config_name
from oriel_wire.v2.messages import Array
from oriel_wire.v2.proto import model_config_pb2 as pb

_log = logging.getLogger(__name__)

MAX_SAMPLES = 1000
WARM_UP_RUNS = 3
WARM_UP_S = 1.0
MAX_SAMPLE_BYTES = 1 << 30


def run_warmup(
    config: pb.ModelConfig,
    spec: ModelSpec,
    sessions: Sequence[Session],
    file: str,
    *,
    read: Callable[[str], bytes],
    on: Sequence[Device],
) -> None:
    """Run every sample on every instance, `count` times (once if that is 0).

    read: a file of `warmup/` -> its bytes. on: the device of each session.

    Raises LoadFailed: a version whose warm-up fails does not serve.
    """
    if sum(max(1, sample.count) for sample in config.model_warmup) > MAX_SAMPLES:
        raise ConfigInvalid(file, "model_warmup", f"asks for more than {MAX_SAMPLES} runs")
    names = [output.name for output in spec.outputs]
    found = warmup_inputs(config, spec, file, read=read)
    for (index, sample), inputs in zip(_samples(config, spec, file), found, strict=True):
        field = f"model_warmup[{index}]"
        for session, device in zip(sessions, on, strict=True):
            for _ in range(max(1, sample.count)):
                entered = device.start()
                try:
                    session.run(inputs | first_step(spec, sample.batch_size), names)
                except InferenceError as error:
                    raise ConfigInvalid(file, field, f"the warm-up failed: {error.message}") from error
                finally:
                    device.end(entered, "warmup")


def warmup_inputs(
    config: pb.ModelConfig, spec: ModelSpec, file: str, *, read: Callable[[str], bytes]
) -> Iterator[dict[str, Array]]:
    """Yield the inputs of each sample in the shapes that the runtime sees. Raises LoadFailed."""
    for index, sample in _samples(config, spec, file):
        yield _inputs(sample, spec, file, f"model_warmup[{index}]", read)


def _samples(config: pb.ModelConfig, spec: ModelSpec, file: str) -> Iterator[tuple[int, pb.ModelWarmup]]:
    """Yield the samples with their indexes, without those that Triton skips, too: they have no `batch_size`."""
    for index, sample in enumerate(config.model_warmup):
        if sample.batch_size or not spec.batched:
            yield index, sample
        else:
            _log.warning("%s: model_warmup[%d] is skipped: it has no batch_size", file, index)


def _inputs(
    sample: pb.ModelWarmup, spec: ModelSpec, file: str, field: str, read: Callable[[str], bytes]
) -> dict[str, Array]:
    batch = sample.batch_size
    if spec.batched and not 1 <= batch <= spec.max_batch_size:
        raise ConfigInvalid(
            file, f"{field}.batch_size", f"{batch} does not lie between 1 and max_batch_size {spec.max_batch_size}"
        )
    if not spec.batched and batch not in (0, 1):
        raise ConfigInvalid(file, f"{field}.batch_size", "the model has no batch dimension")
    known = {tensor.name: tensor for tensor in spec.inputs}
    unknown = sorted(set(sample.inputs) - set(known))
    if unknown:
        raise ConfigInvalid(file, f"{field}.inputs", f"the model has no input {unknown[0][:128]!r}")
    missing = [name for name, tensor in known.items() if name not in sample.inputs and not tensor.optional]
    if missing:
        raise ConfigInvalid(file, f"{field}.inputs", f"input {missing[0][:128]!r} is missing")
    found: dict[str, Array] = {}
    for name, given in sorted(sample.inputs.items()):
        room = MAX_SAMPLE_BYTES - sum(array.nbytes for array in found.values())
        where = f"{field}.inputs[{name[:128]!r}]"
        found[name] = _tensor(given, known[name], batch if spec.batched else 0, file, where, read, room)
    return found if spec.ragged is None else found | ragged_inputs([found], spec, spec.ragged)


def _tensor(
    given: pb.ModelWarmup.Input,
    tensor: TensorSpec,
    batch: int,
    file: str,
    field: str,
    read: Callable[[str], bytes],
    room: int,
) -> Array:
    """Return one input: a row that is repeated. room: bytes that the sample has left."""
    try:
        datatype = from_config_name(pb.DataType.Name(given.data_type))
    except (BadMessage, ValueError) as error:
        raise ConfigInvalid(file, f"{field}.data_type", f"is missing or not a datatype: {CONFIG_DATATYPES}") from error
    if datatype != tensor.datatype:
        raise ConfigInvalid(file, f"{field}.data_type", f"the model takes {tensor.datatype}")
    dims = tuple(given.dims)
    if min(dims, default=1) < 1 or not matches(dims, tensor.dims):
        raise ConfigInvalid(file, f"{field}.dims", f"{list(dims)} does not fit {list(tensor.dims)}")
    elements = math.prod(dims)
    itemsize = 16 if datatype == "BYTES" else DATATYPES[datatype].dtype.itemsize
    if elements * itemsize * max(1, batch) > room:
        raise ConfigInvalid(file, f"{field}.dims", f"the sample is larger than {MAX_SAMPLE_BYTES >> 20} MiB")
    match given.WhichOneof("input_data_type"):
        case "input_data_file":
            row = array_of_bytes(read(given.input_data_file), datatype, elements, file, f"{field}.input_data_file")
        case "random_data" if datatype != "BYTES":
            row = _random(datatype, elements)
        case None:
            raise ConfigInvalid(file, field, "needs zero_data, random_data or input_data_file")
        case _:
            row = zero_elements(datatype, elements)
    array = np.tile(row, batch) if batch > 1 else row
    engine = tensor.engine_dims
    return array.reshape(
        ((batch, *dims) if batch else dims) if engine is None else (batch, *engine) if batch else engine
    )


def zero_elements(datatype: str, shape: int | Sequence[int]) -> Array:
    """Return zeros, or empty texts."""
    if datatype == "BYTES":
        return np.full(shape, b"", dtype=object)
    return np.zeros(shape, DATATYPES[datatype].dtype)


def _random(datatype: str, elements: int) -> Array:
    dtype = np.dtype(DATATYPES[datatype].dtype)
    values = np.random.default_rng(0)
    if dtype.kind == "f":
        return values.random(elements).astype(dtype)
    if dtype.kind == "b":
        return values.integers(0, 2, elements).astype(dtype)
    limits = np.iinfo(dtype)
    return values.integers(limits.min, limits.max, elements, dtype=dtype, endpoint=True)


def array_of_bytes(data: bytes, datatype: str, elements: int, file: str, where: str) -> Array:
    """Return the first row of a file, which may be longer. where: the field that names it."""
    if datatype == "BYTES":
        end = 0
        for _ in range(elements):
            end += 4 + int.from_bytes(data[end : end + 4], "little")
        try:
            return deserialize_bytes(data, elements, "the data file", end=min(end, len(data)))
        except BadMessage as error:
            raise ConfigInvalid(file, where, error.message) from error
    dtype = np.dtype(DATATYPES[datatype].dtype)
    if len(data) < elements * dtype.itemsize:
        raise ConfigInvalid(file, where, f"holds {len(data)} bytes, dims ask for {elements * dtype.itemsize}")
    return np.frombuffer(data, dtype, elements)


def row_of_zeros(inputs: Sequence[TensorInfo], given: Mapping[str, Array] | None = None) -> dict[str, Array]:
    """Return zeros for every required input, but for those that are given."""
    given = given or {}
    return {info.name: zeros(info) for info in inputs if not info.optional and info.name not in given} | dict(given)


def zeros(info: TensorInfo) -> Array:
    """Return a tensor of zeros (empty texts) for an input, with size 1 where a dimension varies."""
    return zero_elements(info.datatype, [1 if dim < 0 else dim for dim in info.shape])


def time_warm_run(session: Session, spec: ModelSpec, device: Device) -> float | None:
    """Run one row of zeros a few times, so that the first request does not pay for lazy set-up. Return the seconds of
    the last run, or None if the model refuses zeros.
    """
    inputs = row_of_zeros(session.inputs, first_step(spec, 1))
    names = [output.name for output in spec.outputs]
    began = time.monotonic()
    duration: float | None = None
    try:
        for _ in range(WARM_UP_RUNS):
            started, entered = time.monotonic(), device.start()
            try:
                session.run(inputs, names)
            finally:
                device.end(entered, "warmup")
            ended = time.monotonic()
            duration = ended - started
            if ended - began > WARM_UP_S:
                break
    except InferenceError as error:
        # Zeros need not be valid values for a model.
        _log.debug("model %s: the warm-up failed: %s", spec.name, error)
        return None
    return duration
