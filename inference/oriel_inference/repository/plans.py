"""Loads models with TensorRT plans: batching by their profiles, the ONNX file beside a plan, and memory that is planned
before it is taken.
"""

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from oriel_inference.backends import Backend, NeededBytes, Session
from oriel_inference.backends.tensorrt import GPU_KEY, HOST_CODE_KEY, PROVIDER
from oriel_inference.backends.tensorrt.reference import ReferencedSession, SharedReference
from oriel_inference.errors import ConfigInvalid, LoadFailed
from oriel_inference.model import EngineOptions, TensorInfo
from oriel_inference.repository.check import CheckPool
from oriel_inference.repository.instances import Place
from oriel_inference.repository.outline import HOST, gpu_name
from oriel_inference.stores import ModelStore
from oriel_wire.v2.proto import model_config_pb2 as pb

_log = logging.getLogger(__name__)

BACKEND = "tensorrt"
REFERENCE_FILE = "model.onnx"
REFERENCE_BACKEND = "onnxruntime"

Tensors = Sequence[TensorInfo]
# Called with a version, and device -> the bytes that all its instances need, before they are taken; again when more is
# known. Raises LoadFailed without room.
ReserveModel = Callable[[int, Mapping[str, int]], None]


def unbounded(version: int, sizes: Mapping[str, int]) -> None:
    """Reserve nothing: there is no budget of memory."""


def with_host_code(found: Sequence[Place]) -> list[Place]:
    """Return the same instances, in which plans may carry code for the host."""
    return [replace(place, options=replace(place.options, providers=_allowed(place.options))) for place in found]


def _allowed(options: EngineOptions) -> tuple[tuple[str, Mapping[str, str]], ...]:
    return tuple(
        (name, {**given, HOST_CODE_KEY: "1"} if name == PROVIDER else given) for name, given in options.providers
    )


def finds_tensorrt(find_backend: Callable[[str], Backend]) -> bool:
    """Return whether plans run on this machine."""
    try:
        find_backend(BACKEND)
    except LoadFailed:
        return False
    return True


def reference_file(store: ModelStore, model: str, version: int, config: pb.ModelConfig) -> str:
    """Return the name of the ONNX file beside a plan; "" if there is none, or the model is no plan."""
    if config.backend != BACKEND or REFERENCE_FILE not in store.files(model, version):
        return ""
    return REFERENCE_FILE


def opener(
    backend: Backend, found: Sequence[Place], paths: Mapping[str, Path], reserve: Callable[[Mapping[str, int]], None]
) -> Callable[[Place], Session]:
    """Return the function that opens the session of a place. reserve: called if the backend knows what one needs."""
    on_gpu = Counter(dict(place.options.providers).get(PROVIDER, {}).get(GPU_KEY, "") for place in found)
    needs: dict[str, int] = {}

    def plan(needed: NeededBytes) -> None:
        instances = on_gpu[str(needed.gpu)]
        sizes = {
            gpu_name(needed.gpu): needed.shared + needed.per_session * instances,
            HOST: needed.host_per_session * len(found),
        }
        for device, size_bytes in sizes.items():  # a further instance begins again with what is known at first
            needs[device] = max(size_bytes, needs.get(device, 0))
        reserve(needs)

    return lambda place: backend.open_within(paths[place.filename], place.options, plan)


def complete_batching(config: pb.ModelConfig, session: Session, file: str) -> None:
    """Set `max_batch_size` from the profiles of a plan, if a configuration leaves it out and means tensors that have a
    batch dimension, as Triton does. Sessions of other backends are left alone.

    That is meant if the configuration names no tensors, or if each of its inputs has one dimension fewer than the
    plan's. An output that is given with its batch dimension loses it. Raises ConfigInvalid for more rows than the
    profiles hold.
    """
    rows = session.rows
    if rows is None:
        return
    everything = (*session.inputs, *session.outputs)
    if not rows or not all(tensor.shape and tensor.shape[0] == -1 for tensor in everything):
        return
    if config.max_batch_size:
        if config.max_batch_size > rows:
            reason = f"{config.max_batch_size} is more than the {rows} rows that the profiles of the plan hold"
            raise ConfigInvalid(file, "max_batch_size", reason)
        return
    if config.input or config.output:
        ranks = {tensor.name: len(tensor.shape) for tensor in everything}
        inputs = [(len(_dims(entry)), ranks.get(entry.name, 0)) for entry in config.input]
        if not inputs or not all(own + 1 == theirs for own, theirs in inputs):
            return
        for entry in config.output:
            if len(_dims(entry)) == ranks.get(entry.name) and entry.dims[0] in (-1, rows):
                _drop_first(entry)
    config.max_batch_size = rows
    if rows > 1 and config.WhichOneof("scheduling_choice") is None:
        config.dynamic_batching.SetInParent()


def _dims(entry: pb.ModelInput | pb.ModelOutput) -> Sequence[int]:
    return entry.reshape.shape if entry.HasField("reshape") else entry.dims


def _drop_first(entry: pb.ModelOutput) -> None:
    if entry.HasField("reshape"):
        return
    del entry.dims[0]
    if not entry.dims:
        # A configuration has no scalars: they are shown as one element and reshaped.
        entry.dims.append(1)
        entry.reshape.SetInParent()


def with_reference(
    sessions: list[Session],
    path: Path,
    shown: str,
    *,
    threads: int,
    find_backend: Callable[[str], Backend],
    check: CheckPool | None,
) -> None:
    """Let the ONNX file beside a plan run what its profiles do not take; replaces the sessions in place.

    A file that cannot serve so is reported in the log, and the plan serves without it.
    """
    options = EngineOptions(intra_op_threads=threads)
    try:
        backend = find_backend(REFERENCE_BACKEND)
        if check is not None:
            check.check(path, shown, REFERENCE_BACKEND, options)
        opened = backend.open(path, options)
        try:
            reference = SharedReference(opened, sessions[0], len(sessions))
        except LoadFailed:
            opened.close()
            raise
    except LoadFailed as failure:
        _log.warning("%s cannot run the requests that the plan beside it refuses: %s; they fail", shown, failure.reason)
        return
    sessions[:] = [ReferencedSession(session, reference) for session in sessions]
