"""Reads what is known of a model before it is loaded: its configuration, when it is to be loaded, its size. Blocks."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from oriel_inference.backends import Backend
from oriel_inference.errors import LoadFailed
from oriel_inference.repository.config import CONFIG_FILE, parameter, read_config, select_versions
from oriel_inference.repository.engines import named_engine
from oriel_inference.repository.ensembles import part_names
from oriel_inference.repository.instances import placements
from oriel_inference.repository.spec import LOAD_KEY
from oriel_inference.stores import ModelStore
from oriel_wire.v2.proto import model_config_pb2 as pb

HOST = "host"


def gpu_name(number: int) -> str:
    """Return the name of a GPU as a device with memory."""
    return f"gpu{number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """The facts about a model that are known before it is loaded.

    config: the configuration as it was written, without what the model file would complete; None if it cannot be read.
    load: "demand", "pinned", or "" if the configuration leaves that to the control mode.
    parts: the models of an ensemble's steps.
    sizes: device -> bytes of the files that are loaded there, once per instance on a GPU.
    """

    config: pb.ModelConfig | None = None
    load: str = ""
    parts: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)


def read_outline(
    store: ModelStore,
    model: str,
    override: pb.ModelConfig | None = None,
    *,
    config_name: str = "",
    find_backend: Callable[[str], Backend] | None = None,
) -> Outline:
    """Read an outline. Models that `load_model` would refuse are left out, because the load reports it.

    config_name: see `LoadDefaults`.
    find_backend: needed for the sizes on GPUs; without it, everything counts for the host.
    """
    file = f"{model}/{CONFIG_FILE}"
    try:
        config = read_config(store, model, config_name) if override is None else override
    except LoadFailed:
        return Outline()
    if override is None and not config.name:
        config.name = model
    load = parameter(config, LOAD_KEY)
    parts = tuple(part_names(config))
    sizes: dict[str, int] = {}
    if not parts:
        try:
            versions, _ = select_versions(config, store.versions(model), file)
            file_bytes = sum(store.size_bytes(model, version) for version in versions)
            for device in _devices(config, file, find_backend):
                sizes[device] = sizes.get(device, 0) + file_bytes
        except LoadFailed:
            pass
    return Outline(config=config, load=load, parts=parts, sizes=sizes)


def _devices(config: pb.ModelConfig, file: str, find_backend: Callable[[str], Backend] | None) -> list[str]:
    """Return the GPU of each instance that has one; otherwise the host. The instances of a plan share what its file
    takes, so that each GPU is named once. Raises LoadFailed.
    """
    engine = named_engine(config) or "onnxruntime"
    gpus = find_backend(engine).gpus() if find_backend is not None else ()
    if not gpus:
        return [HOST]
    placed = pb.ModelConfig()
    placed.CopyFrom(config)
    placed.backend = engine
    found = [device_of(place.options.providers) for place in placements(placed, file, threads=1, gpus=gpus)]
    devices = [device for device in found if device != HOST] or [HOST]
    return list(dict.fromkeys(devices)) if engine == "tensorrt" else devices


def device_of(providers: Sequence[tuple[str, Mapping[str, str]]]) -> str:
    """Return the name of the device of an instance with these execution providers: its GPU, or the host."""
    for _, options in providers[:1]:
        if "device_id" in options:
            return gpu_name(int(options["device_id"]))
    return HOST
