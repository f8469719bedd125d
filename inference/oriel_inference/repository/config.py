"""Reads and checks a model configuration.

Every field of the format is parsed and its value is checked, whether or not it is executed here. A field that would
change answers and is not executed is refused by name. A field that only tunes an engine that this server does not have
is shown to clients and gets a warning in the log. docs/model-repository.md lists every field, and a test compares it.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from oriel_inference.backends.compilers import read_value
from oriel_inference.errors import ConfigInvalid
from oriel_inference.repository.accelerators import check_accelerators
from oriel_inference.repository.engines import name_engine
from oriel_inference.repository.ensembles import check_ensemble, is_ensemble
from oriel_inference.repository.metrics_config import check_metrics, other_families
from oriel_inference.repository.queueing import check_queueing
from oriel_inference.repository.ragged import check_ragged, is_ragged
from oriel_inference.repository.sequences import check_sequences
from oriel_inference.stores import ModelStore
from oriel_wire.errors import BadMessage
from oriel_wire.v2.datatypes import CONFIG_DATATYPES, from_config_name
from oriel_wire.v2.metadata import parse_config_text
from oriel_wire.v2.proto import model_config_pb2 as pb

CONFIG_FILE = "config.pbtxt"
STRATEGY = "TRITON_BATCH_STRATEGY_PATH"
MAX_TENSORS = 1024
MAX_INSTANCES = 256
MAX_SHOWN = 8
MAX_FALLBACKS = 16
_NO_POLICY = re.compile(r"|cpu|model|gpu_\d+")  # the names that Triton shows for instances without a policy
_CAPABILITY = re.compile(r"[0-9]{1,2}\.[0-9]\Z")
_LINE = re.compile(r"^(\d+):(\d+) : (?:'.*?': )?(?:Message type )?")
_GRAPH_LEVELS = (-1, 0, 1, 2)
_SHAPE_TENSOR = "is not supported: plans with shape tensors are not executed"

# backend -> parameters of Triton's that choose nothing here, because they tune a GPU or an older version of the engine
_UNUSED_PARAMETERS = {
    "openvino": """
        COMPILATION_NUM_THREADS CPU_THREADS_NUM ENFORCE_BF16 CPU_BIND_THREAD CPU_THROUGHPUT_STREAMS
        SKIP_DYNAMIC_BATCHSIZE TF_NUM_INTRA_THREADS TF_NUM_INTER_THREADS TF_USE_PER_SESSION_THREADS
        MAX_SESSION_SHARE_COUNT
    """.split(),
    "fil": """
        algo storage_type blocks_per_sm threads_per_tree transfer_threshold use_experimental_optimizations
    """.split(),
}

_Refuse = Callable[[str, str], ConfigInvalid]


def parse(text: str, file: str) -> pb.ModelConfig:
    """Parse the text format. file: its path relative to the repository, for errors. Raises ConfigInvalid."""
    try:
        return parse_config_text(text)
    except BadMessage as error:
        reason = error.message.removeprefix("model configuration: ")
        raise ConfigInvalid(file, "", _LINE.sub(r"line \1, column \2: ", reason)) from error


def read_config(store: ModelStore, model: str, name: str) -> pb.ModelConfig:
    """Return `configs/<name>.pbtxt`, or else the usual configuration, which is empty if both are missing.

    name: "" for the usual one only. Raises LoadFailed.
    """
    text = store.text(model, f"configs/{name}.pbtxt") if name else None
    if text is None:
        text = store.text(model, CONFIG_FILE)
    config = pb.ModelConfig() if text is None else parse(text, f"{model}/{CONFIG_FILE}")
    if store.renamed:
        config.name = ""
    return config


def parameter(config: pb.ModelConfig, key: str) -> str:
    """Return the value of an entry of `parameters` without the spaces around it; "" if there is none."""
    return config.parameters[key].string_value.strip() if key in config.parameters else ""


def read_parameters(config: pb.ModelConfig, file: str, table: Mapping[str, Callable[[str], str]]) -> dict[str, str]:
    """Return the values of the parameters of `table` that a configuration gives.

    table: parameter -> function that reads its text, or raises ValueError that says what it must be.
    Raises ConfigInvalid that names the parameter.
    """
    found: dict[str, str] = {}
    for key, read in table.items():
        if text := parameter(config, key):
            found[key] = read_value(read, text, file, f"parameters[{key!r}]")
    return found


def validate(config: pb.ModelConfig, model: str, file: str, files: Sequence[str] = ("model.onnx",)) -> list[str]:
    """Check everything that can be checked without the model file; set `name`, `backend` and `platform`.

    files: names in the newest version's folder, from which the backend may follow.
    Returns warnings about settings without effect. Raises ConfigInvalid that names file, field and reason.
    """

    def refuse(field: str, reason: str) -> ConfigInvalid:
        return ConfigInvalid(file, field, reason)

    if config.name and config.name != model:
        raise refuse("name", f"{config.name[:128]!r} differs from the folder's name {model!r}")
    config.name = model
    if not is_ensemble(config):
        name_engine(config, file, files)
    if config.max_batch_size < 0:
        raise refuse("max_batch_size", "must not be negative")
    warnings = _without_repeated(config)
    _tensors("input", config.input, refuse)
    _tensors("output", config.output, refuse)
    _instances(config, refuse)
    if config.optimization.graph.level not in _GRAPH_LEVELS:
        raise refuse("optimization.graph.level", "must be -1 (basic), 0 (all), 1 (extended) or 2 (none)")
    _names(config, refuse)
    check_accelerators(config, file)
    _not_executed(config, refuse)
    if config.HasField("dynamic_batching"):
        check_queueing(config.dynamic_batching, config.max_batch_size, refuse)
    if config.HasField("sequence_batching"):
        check_sequences(config, refuse)
    if any(version < 0 for version in config.version_policy.specific.versions):
        raise refuse("version_policy.specific.versions", "a version must not be negative")
    if is_ensemble(config):
        check_ensemble(config, file)
    return warnings + _without_passive(config) + _without_effect(config)


def _without_repeated(config: pb.ModelConfig) -> list[str]:
    """Remove outputs that are given again, word for word; return a warning if there were any."""
    unique = dict.fromkeys(each.SerializeToString(deterministic=True) for each in config.output)
    if len(unique) == len(config.output):
        return []
    config.ClearField("output")
    config.output.extend([pb.ModelOutput.FromString(each) for each in unique])
    return ["an output is given twice"]


def select_versions(config: pb.ModelConfig, available: Sequence[int], file: str) -> tuple[list[int], list[int]]:
    """Return the versions that the policy serves, ascending, and those it names that have no folder.

    Raises ConfigInvalid if it serves none.
    """
    if not available:
        do = "make a folder 1 there with its model files, an empty one for an ensemble (docs/model-repository.md)"
        reason = f"has no version folder (1, 2, ...): {do}, or let `oriel models import` make it"
        raise ConfigInvalid(file.split("/")[0], "", reason)
    policy = config.version_policy
    match policy.WhichOneof("policy_choice"):
        case "all":
            return list(available), []
        case "specific":
            wanted = sorted(set(policy.specific.versions))
            if not wanted:
                raise ConfigInvalid(file, "version_policy.specific", "is empty")
            present = [version for version in wanted if version in available]
            missing = [version for version in wanted if version not in available]
            if not present:
                raise ConfigInvalid(file, "version_policy.specific", no_folder(missing))
            return present, missing
        case _:
            count = policy.latest.num_versions if policy.HasField("latest") else 1
            return list(available[-max(1, count) :]), []


def fallback_versions(config: pb.ModelConfig, available: Sequence[int], selected: Sequence[int]) -> list[int]:
    """Return the versions that may serve in place of `selected` ones that cannot be loaded, newest first.

    At most MAX_FALLBACKS, and only with the policy `latest`: the other two policies name every version that may serve.
    """
    if config.version_policy.WhichOneof("policy_choice") not in (None, "latest"):
        return []
    return [version for version in reversed(available) if version < selected[0]][:MAX_FALLBACKS]


def no_folder(versions: Sequence[int]) -> str:
    """Return the error text about versions that are selected and have no folder."""
    names = ", ".join(str(version) for version in versions[:MAX_SHOWN])
    more = f" and {len(versions) - MAX_SHOWN} more" if len(versions) > MAX_SHOWN else ""
    return f"versions {names}{more} have no folder" if len(versions) > 1 else f"version {names} has no folder"


def _tensors(kind: str, tensors: Iterable[pb.ModelInput | pb.ModelOutput], refuse: _Refuse) -> None:
    names: set[str] = set()
    for index, tensor in enumerate(tensors):
        field = f"{kind}[{index}]"
        if index >= MAX_TENSORS:
            raise refuse(kind, f"more than {MAX_TENSORS} are given")
        if not tensor.name:
            raise refuse(f"{field}.name", "is missing")
        if tensor.name in names:
            raise refuse(f"{field}.name", f"{tensor.name[:128]!r} is given twice")
        names.add(tensor.name)
        try:
            from_config_name(pb.DataType.Name(tensor.data_type))
        except (BadMessage, ValueError) as error:
            raise refuse(f"{field}.data_type", f"is missing or not a datatype: {CONFIG_DATATYPES}") from error
        if not tensor.dims:
            raise refuse(f"{field}.dims", "is missing (a scalar has dims [ 1 ] and reshape { shape: [ ] })")
        if any(dim < 1 and dim != -1 for dim in tensor.dims):
            raise refuse(f"{field}.dims", "each must be positive, or -1 for a variable dimension")
        if tensor.HasField("reshape"):
            _reshape(field, tensor.dims, tensor.reshape.shape, refuse)
        if isinstance(tensor, pb.ModelInput) and tensor.format and len(tensor.dims) != 3:
            name = pb.ModelInput.Format.Name(tensor.format)
            raise refuse(f"{field}.format", f"{name} needs three dims, not {len(tensor.dims)}")
        if tensor.is_shape_tensor:
            raise refuse(f"{field}.is_shape_tensor", _SHAPE_TENSOR)
        if tensor.is_non_linear_format_io:
            raise refuse(f"{field}.is_non_linear_format_io", "is not supported: tensors are row-major here")


def _reshape(field: str, dims: Sequence[int], shape: Sequence[int], refuse: _Refuse) -> None:
    if any(dim < 1 and dim != -1 for dim in shape):
        raise refuse(f"{field}.reshape.shape", "each must be positive, or -1 for a variable dimension")
    variable = sum(dim == -1 for dim in dims)
    if variable > 1 or variable != sum(dim == -1 for dim in shape):
        raise refuse(f"{field}.reshape.shape", "needs the same number of variable dimensions as dims, at most one")
    if _fixed(dims) != _fixed(shape):
        raise refuse(f"{field}.reshape.shape", "holds another number of elements than dims")


def _fixed(dims: Iterable[int]) -> int:
    product = 1
    for dim in dims:
        product *= dim if dim != -1 else 1
    return product


def instance_count(config: pb.ModelConfig) -> int:
    """Return the configured number of instances over all groups and the GPUs they list; 1 if none is configured."""
    return sum((group.count or 1) * max(1, len(group.gpus)) for group in config.instance_group) or 1


def _instances(config: pb.ModelConfig, refuse: _Refuse) -> None:
    for index, group in enumerate(config.instance_group):
        field = f"instance_group[{index}]"
        if group.count < 0:
            raise refuse(f"{field}.count", "must not be negative")
        if group.gpus and group.kind == pb.ModelInstanceGroup.KIND_CPU:
            raise refuse(f"{field}.gpus", "does not go with KIND_CPU")
        if any(number < 0 for number in group.gpus) or len(set(group.gpus)) != len(group.gpus):
            raise refuse(f"{field}.gpus", "must name GPUs by number, each once")
        if group.secondary_devices:
            raise refuse(f"{field}.secondary_devices", "is not supported: NVDLA is for TensorRT on Jetson boards")
        for profile in group.profile:
            if not (profile.isascii() and profile.isdigit()):
                raise refuse(f"{field}.profile", f"{profile[:64]!r} is not the number of an optimisation profile")
    if (total := instance_count(config)) > MAX_INSTANCES:
        raise refuse("instance_group", f"asks for {total} instances, at most {MAX_INSTANCES} are allowed")


def _not_executed(config: pb.ModelConfig, refuse: _Refuse) -> None:
    """Refuse the fields without which answers would differ, and which this server does not execute. Raises
    ConfigInvalid for the first one.
    """
    if config.response_cache.enable and config.model_transaction_policy.decoupled:
        raise refuse("response_cache", "does not go with model_transaction_policy.decoupled")
    if config.response_cache.enable and config.HasField("sequence_batching"):
        raise refuse("response_cache", "does not go with sequence_batching")
    if is_ragged(config):
        check_ragged(config, refuse)
    if config.model_operations.op_library_filename and config.backend != "onnxruntime":
        raise refuse("model_operations.op_library_filename", "is for ONNX models only")
    if config.instance_group and all(group.passive for group in config.instance_group):
        raise refuse("instance_group[0].passive", "is true for every group: no instance would take requests")


def _without_passive(config: pb.ModelConfig) -> list[str]:
    """Remove the groups whose instances would take no requests; return a warning if there were any."""
    active = [group for group in config.instance_group if not group.passive]
    if len(active) == len(config.instance_group):
        return []
    config.ClearField("instance_group")
    config.instance_group.extend(active)
    return ["an instance group is passive: its instances, which would take no requests, are not made"]


def _names(config: pb.ModelConfig, refuse: _Refuse) -> None:
    for capability, filename in config.cc_model_filenames.items():
        field = f"cc_model_filenames[{capability[:32]!r}]"
        if not _CAPABILITY.match(capability):
            raise refuse(field, "the key must be a compute capability such as '9.0'")
        if not filename:
            raise refuse(field, "names no file")
    check_metrics(config, refuse)


def _without_effect(config: pb.ModelConfig) -> list[str]:
    """Return one line per field that is accepted and shown but has no effect here."""
    optimization, cuda = config.optimization, config.optimization.cuda
    agents = [agent.name for agent in config.model_repository_agents.agents if agent.name != "checksum"]
    groups = config.instance_group
    on_cpu = bool(groups) and all(group.kind == pb.ModelInstanceGroup.KIND_CPU for group in groups)
    ignored = {
        "runtime": bool(config.runtime) and not (config.backend == "pytorch" and config.runtime == "model.py"),
        **{
            f"parameters[{key!r}]": config.backend == "pytorch" and key in config.parameters
            for key in ("ENABLE_NVFUSER", "TORCH_COMPILE_OPTIONAL_PARAMETERS", "CACHE_CLEANING_ENABLED")
        },
        **other_families(config),
        "dynamic_batching.preferred_batch_size (the model is decoupled)": (
            config.model_transaction_policy.decoupled and bool(config.dynamic_batching.preferred_batch_size)
        ),
        # CUDA graphs of an ONNX model are judged when its instances are known.
        "optimization.cuda": optimization.HasField("cuda") and not (cuda.graphs and config.backend == "onnxruntime"),
        "optimization.cuda.busy_wait_events": cuda.graphs and cuda.busy_wait_events,
        "optimization.cuda.output_copy_stream": cuda.graphs and cuda.output_copy_stream,
        "optimization.priority": optimization.priority != 0,
        "optimization.execution_accelerators.gpu_execution_accelerator (every instance is on the CPU)": (
            on_cpu and bool(optimization.execution_accelerators.gpu_execution_accelerator)
        ),
        "optimization.execution_accelerators": (
            config.backend in _UNUSED_PARAMETERS and optimization.HasField("execution_accelerators")
        ),
        "optimization.input_pinned_memory": optimization.HasField("input_pinned_memory"),
        "optimization.output_pinned_memory": optimization.HasField("output_pinned_memory"),
        "optimization.gather_kernel_buffer_threshold": bool(optimization.gather_kernel_buffer_threshold),
        "optimization.eager_batching": optimization.eager_batching,
        "instance_group.profile": any(group.profile for group in groups),
        "instance_group.host_policy": any(not _NO_POLICY.fullmatch(each.host_policy) for each in groups),
        f"model_repository_agents ({', '.join(agents)[:64]})": bool(agents),
        "response_cache (of an ensemble, or beside preserve_ordering)": (
            config.response_cache.enable and (is_ensemble(config) or config.dynamic_batching.preserve_ordering)
        ),
        f"parameters[{STRATEGY!r}]": STRATEGY in config.parameters,
        **{f"parameters[{key!r}]": key in config.parameters for key in _UNUSED_PARAMETERS.get(config.backend, ())},
    }
    return [f"{field} has no effect here" for field, found in ignored.items() if found]
