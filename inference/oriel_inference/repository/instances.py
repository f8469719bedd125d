"""Decides where the instances of a model run, and with which engine options: one `Place` per instance."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from oriel_inference.backends.tensorrt import GPU_KEY, PROVIDER
from oriel_inference.errors import ConfigInvalid
from oriel_inference.model import EVERYWHERE, GRAPH_OPTION, EngineOptions, Gpu, InstanceLimit
from oriel_inference.repository.accelerators import CUDA, PROVIDERS, accelerators
from oriel_inference.repository.config import MAX_INSTANCES, parameter
from oriel_inference.repository.engines import default_file, gpu_engine, needs
from oriel_wire.v2.proto import model_config_pb2 as pb

CPU = "CPUExecutionProvider"
PROVIDER_KEY = "oriel.execution_provider"
MAX_THREADS = 256
_THREADS = "intra_op_thread_count"
BRIEF_S = 0.001  # a run that is shorter is not divided among threads
_ARENA, _PATTERN = "enable_mem_arena", "enable_mem_pattern"
SHRINK = "memory.enable_memory_arena_shrinkage"
_DEVICE_ALLOCATOR = "session.use_device_allocator_for_initializers"
_Kind = pb.ModelInstanceGroup
_ON_GPU = "optimization.execution_accelerators.gpu_execution_accelerator"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The device and the file of one instance.

    filename: the model file in the version's folder.
    limit: resources of the rate limiter that it holds while it runs.
    """

    options: EngineOptions
    filename: str
    limit: InstanceLimit = InstanceLimit(needs={}, priority=1)


def placements(
    config: pb.ModelConfig, file: str, *, threads: int, gpus: Sequence[Gpu], inter_threads: int = 1
) -> list[Place]:
    """Return one place per instance, in the order of the groups.

    threads, inter_threads: the numbers of threads of an instance on the CPU if the configuration sets none.
    gpus: the GPUs that the backend is known to run on.
    Without groups there is one instance per GPU, or one on the CPU. Raises ConfigInvalid, also if a group asks for a
    missing GPU.
    """
    groups = list(config.instance_group) or [pb.ModelInstanceGroup()]
    found = []
    for index, group in enumerate(groups):
        for gpu in _devices(group, config, gpus, file, f"instance_group[{index}]"):
            place = replace(
                _place(config, file, threads, inter_threads, gpu), limit=_limit(group, gpu.number if gpu else 0)
            )
            found += [place] * (group.count or 1)
    return found


def on_one_thread(config: pb.ModelConfig, file: str, found: Sequence[Place], run_s: float | None) -> list[Place]:
    """Return the places with one thread for each instance, if the steps of a model with states are so short that more
    threads cost more than they save; otherwise an empty list, also if the configuration gives a number of threads.

    run_s: the seconds of a run with all threads, None if that is not known.
    """
    if config.backend != "onnxruntime" or not config.sequence_batching.state or count(config, _THREADS, file):
        return []
    options = found[0].options
    if run_s is None or run_s >= BRIEF_S or options.intra_op_threads == 1 or options.providers:
        return []
    return [replace(place, options=replace(place.options, intra_op_threads=1)) for place in found]


def _limit(group: pb.ModelInstanceGroup, gpu: int) -> InstanceLimit:
    needs = {
        (each.name, EVERYWHERE if getattr(each, "global") else gpu): each.count for each in group.rate_limiter.resources
    }
    return InstanceLimit(needs=needs, priority=group.rate_limiter.priority)


def limits_of_processes(config: pb.ModelConfig) -> list[InstanceLimit]:
    """Return the limit of each instance of a Python model, in the order of the groups."""
    groups = config.instance_group
    return [_limit(group, gpu) for group in groups for gpu in (group.gpus or [0]) for _ in range(group.count or 1)]


def on_cpu_instead(config: pb.ModelConfig) -> str:
    """Return what to report of a model that wants an accelerator on a GPU, on a machine without a usable GPU; "" if it
    wants none, or if an instance group demands a GPU and the model therefore cannot be loaded.
    """
    listed = config.optimization.execution_accelerators.gpu_execution_accelerator
    groups = list(config.instance_group) or [pb.ModelInstanceGroup()]
    demanded = any(group.kind == _Kind.KIND_GPU or group.gpus for group in groups)
    if not listed or demanded or not any(group.kind == _Kind.KIND_AUTO for group in groups):
        return ""
    return f"runs on the CPU: {_ON_GPU} wants {listed[0].name!r} on a GPU, and {needs(gpu_engine(config))}"


def instances_by_demand(config: pb.ModelConfig, found: Sequence[Place], cores: int) -> int:
    """Return how many instances of a model without `count` the cores hold; 0 if its number of instances is fixed.

    config: the text as the model's owner wrote it, before defaults are filled in.
    found: its places. Only a single one on the CPU can hold several instances: they are runs of one session, without
    copies of the model. A session on a device has no more of it when it is run twice at once. A run of a decoupled
    model lasts as long as its reader wants, and takes no cores. Instances of a sequence model hold slots.
    """
    fixed = any(group.count for group in config.instance_group) or config.HasField("sequence_batching")
    if fixed or len(found) != 1 or found[0].options.providers or config.model_transaction_policy.decoupled:
        return 0
    return min(MAX_INSTANCES, max(1, cores // found[0].options.intra_op_threads))


def field_of(config: pb.ModelConfig, provider: str) -> str:
    """Return the field that asks for `provider`."""
    if parameter(config, PROVIDER_KEY):
        return f"parameters[{PROVIDER_KEY!r}]"
    listed = config.optimization.execution_accelerators
    for kind, entries in (("gpu", listed.gpu_execution_accelerator), ("cpu", listed.cpu_execution_accelerator)):
        for index, entry in enumerate(entries):
            if PROVIDERS.get(entry.name) == provider:
                return f"optimization.execution_accelerators.{kind}_execution_accelerator[{index}].name"
    return "instance_group"


def _devices(
    group: pb.ModelInstanceGroup, config: pb.ModelConfig, gpus: Sequence[Gpu], file: str, field: str
) -> Sequence[Gpu | None]:
    """Return the GPUs that a group names; a single None means the CPU."""
    if group.kind in (_Kind.KIND_CPU, _Kind.KIND_MODEL):
        if config.backend == "tensorrt":
            kind = pb.ModelInstanceGroup.Kind.Name(group.kind)
            raise ConfigInvalid(file, f"{field}.kind", f"is {kind}, and TensorRT plans run on GPUs: set KIND_GPU")
        return [None]
    listed = config.optimization.execution_accelerators.gpu_execution_accelerator
    wanted = group.kind == _Kind.KIND_GPU or bool(group.gpus) or bool(listed) or config.backend == "tensorrt"
    if not gpus and not wanted:
        return [None]
    if not gpus:
        field, why = f"{field}.kind", "asks for a GPU"
        if listed:
            field, why = _ON_GPU, f"asks for {listed[0].name!r} on a GPU"
        raise ConfigInvalid(file, field, f"{why}, and {needs(gpu_engine(config))}")
    known = {gpu.number: gpu for gpu in gpus}
    for number in group.gpus:
        if number not in known:
            usable = ", ".join(str(each) for each in sorted(known))
            raise ConfigInvalid(file, f"{field}.gpus", f"GPU {number} cannot be used here, only {usable}")
    return [known[number] for number in group.gpus] or list(gpus)


def _place(config: pb.ModelConfig, file: str, threads: int, inter_threads: int, gpu: Gpu | None) -> Place:
    providers = [
        (name, {"device_id": str(gpu.number), **options} if gpu and name.startswith(("CUDA", "Tensorrt")) else options)
        for name, options in accelerators(config, file, gpu=gpu is not None)
    ]
    if gpu is not None and config.optimization.cuda.graphs:
        providers = [(name, {GRAPH_OPTION: "1", **given} if name == CUDA else given) for name, given in providers]
    named = parameter(config, PROVIDER_KEY)
    if config.backend == "tensorrt" and gpu is not None:
        providers = [(PROVIDER, {GPU_KEY: str(gpu.number)})]
    elif named:
        providers = [] if named == CPU else [(named, dict(providers).get(named, {}))]
    filename = config.default_model_filename or default_file(config.backend)
    if gpu is not None:
        filename = config.cc_model_filenames.get(gpu.capability, filename)
    # On a GPU the CPU only launches kernels.
    default_threads = 1 if providers and providers[0][0] in (CUDA, PROVIDER) else threads
    entries: Mapping[str, str] = {}
    if parameter(config, _DEVICE_ALLOCATOR):
        entries = {_DEVICE_ALLOCATOR: "1" if switch(config, _DEVICE_ALLOCATOR, file) else "0"}
    intra = count(config, _THREADS, file) or default_threads
    return Place(
        options=EngineOptions(
            providers=tuple((name, _threaded(name, options, intra)) for name, options in providers),
            intra_op_threads=intra,
            inter_op_threads=count(config, "inter_op_thread_count", file) or inter_threads,
            parallel_execution=switch(config, "execution_mode", file, default=False),
            graph_level=config.optimization.graph.level,
            memory_arena=switch(config, _ARENA, file),
            memory_pattern=switch(config, _PATTERN, file),
            session_entries=entries,
            run_entries={SHRINK: parameter(config, SHRINK)} if parameter(config, SHRINK) else {},
        ),
        filename=filename,
    )


def _threaded(name: str, options: Mapping[str, str], threads: int) -> Mapping[str, str]:
    """Add the number of threads for OpenVINO, which has threads of its own."""
    return {"num_of_threads": str(threads), **options} if name.startswith("OpenVINO") else options


def count(config: pb.ModelConfig, key: str, file: str) -> int:
    """Return the number that a parameter gives, 0 if it is missing. Raises ConfigInvalid."""
    text = parameter(config, key)
    if not text:
        return 0
    if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) > MAX_THREADS:
        raise ConfigInvalid(file, f"parameters[{key!r}]", f"must be a number from 0 to {MAX_THREADS}")
    return int(text)


def switch(config: pb.ModelConfig, key: str, file: str, *, default: bool = True) -> bool:
    """Return whether a parameter switches something on. Raises ConfigInvalid."""
    text = parameter(config, key)
    if text.lower() not in ("", "0", "1", "true", "false"):
        raise ConfigInvalid(file, f"parameters[{key!r}]", "must be 0 or 1")
    return default if not text else text.lower() in ("1", "true")
