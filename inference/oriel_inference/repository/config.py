"""Reading and judging a model configuration.

Every field of the format parses. What this server cannot honour and what would change answers is refused by name;
what only tunes an engine it does not have is ignored with a warning.
"""

from collections.abc import Callable, Iterable, Sequence

from oriel_inference.errors import ConfigInvalid
from oriel_inference.repository.metrics_config import check_metrics
from oriel_wire.errors import BadMessage
from oriel_wire.v2.datatypes import from_config_name
from oriel_wire.v2.metadata import parse_config_text
from oriel_wire.v2.proto import model_config_pb2 as pb

__all__ = ["CONFIG_FILE", "parse", "select_versions", "validate"]

CONFIG_FILE = "config.pbtxt"
MAX_TENSORS = 1024
MAX_INSTANCES = 256
MAX_PRIORITY_LEVELS = 256
_PLATFORMS = {"onnxruntime_onnx": "onnxruntime"}

_Refuse = Callable[[str, str], ConfigInvalid]


def parse(text: str, file: str) -> pb.ModelConfig:
    """The text format -> message. file: for the error, relative to the repository. Raises ConfigInvalid."""
    try:
        return parse_config_text(text)
    except BadMessage as error:
        raise ConfigInvalid(file, "", error.message.removeprefix("model configuration: ")) from error


def validate(config: pb.ModelConfig, model: str, file: str) -> list[str]:
    """Judge what can be judged without the model file; fills `name` and `backend` in.

    Returns warnings about settings without effect here. Raises ConfigInvalid naming file, field and reason.
    """

    def refuse(field: str, reason: str) -> ConfigInvalid:
        return ConfigInvalid(file, field, reason)

    if config.name and config.name != model:
        raise refuse("name", f"{config.name[:128]!r} differs from the folder's name {model!r}")
    config.name = model
    _backend(config, refuse)
    if config.max_batch_size < 0:
        raise refuse("max_batch_size", "must not be negative")
    _tensors("input", config.input, refuse)
    _tensors("output", config.output, refuse)
    _unsupported(config, refuse)
    _instances(config, refuse)
    if config.HasField("dynamic_batching"):
        _dynamic_batching(config.dynamic_batching, config.max_batch_size, refuse)
    if any(version < 1 for version in config.version_policy.specific.versions):
        raise refuse("version_policy.specific.versions", "versions are positive numbers")
    check_metrics(config, refuse)
    return _without_effect(config)


def select_versions(config: pb.ModelConfig, available: Sequence[int], file: str) -> list[int]:
    """The versions the policy serves, ascending. Raises ConfigInvalid if that is none or one is missing."""
    if not available:
        raise ConfigInvalid(file.split("/")[0], "", "has no version folder (1, 2, ...)")
    policy = config.version_policy
    match policy.WhichOneof("policy_choice"):
        case "all":
            return list(available)
        case "specific":
            wanted = sorted(set(policy.specific.versions))
            missing = [version for version in wanted if version not in available]
            if missing or not wanted:
                raise ConfigInvalid(
                    file, "version_policy.specific", f"version {missing[0]} has no folder" if missing else "is empty"
                )
            return wanted
        case _:
            count = policy.latest.num_versions if policy.HasField("latest") else 1
            return list(available[-max(1, count) :])


def _backend(config: pb.ModelConfig, refuse: _Refuse) -> None:
    if config.platform and config.platform not in _PLATFORMS:
        raise refuse("platform", f"{config.platform[:64]!r} is not supported, use one of {', '.join(_PLATFORMS)}")
    backend = config.backend or _PLATFORMS.get(config.platform, "")
    if config.backend and config.platform and _PLATFORMS[config.platform] != config.backend:
        raise refuse("backend", f"{config.backend[:64]!r} contradicts platform {config.platform!r}")
    if not backend and (config.default_model_filename or "model.onnx").endswith(".onnx"):
        backend = "onnxruntime"
    if not backend:
        raise refuse("backend", "is missing")
    config.backend = backend


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
            raise refuse(f"{field}.data_type", "is missing or not a datatype") from error
        if not tensor.dims:
            raise refuse(f"{field}.dims", "is missing (a scalar has dims [ 1 ] and reshape { shape: [ ] })")
        if any(dim < 1 and dim != -1 for dim in tensor.dims):
            raise refuse(f"{field}.dims", "each must be positive, or -1 for a variable dimension")
        if tensor.HasField("reshape"):
            _reshape(field, tensor.dims, tensor.reshape.shape, refuse)
        for flag in ("is_shape_tensor", "allow_ragged_batch", "is_non_linear_format_io"):
            if getattr(tensor, flag, False):
                raise refuse(f"{field}.{flag}", "is not supported by the backend")


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


def _unsupported(config: pb.ModelConfig, refuse: _Refuse) -> None:
    present = {
        "sequence_batching": config.HasField("sequence_batching"),
        "ensemble_scheduling": config.HasField("ensemble_scheduling"),
        "batch_input": bool(config.batch_input),
        "batch_output": bool(config.batch_output),
        "model_operations": bool(config.model_operations.op_library_filename),
        "model_repository_agents": bool(config.model_repository_agents.agents),
        "response_cache.enable": config.response_cache.enable,
        "optimization.execution_accelerators.gpu_execution_accelerator": bool(
            config.optimization.execution_accelerators.gpu_execution_accelerator
        ),
    }
    for field, found in present.items():
        if found:
            raise refuse(field, "is not supported by this server")


def _instances(config: pb.ModelConfig, refuse: _Refuse) -> None:
    total = 0
    for index, group in enumerate(config.instance_group):
        field = f"instance_group[{index}]"
        if group.kind == pb.ModelInstanceGroup.KIND_GPU or group.gpus:
            raise refuse(f"{field}.kind", "asks for a GPU, but this server's backend runs on the CPU")
        if group.count < 0:
            raise refuse(f"{field}.count", "must not be negative")
        if group.secondary_devices or group.passive or group.profile or group.HasField("rate_limiter"):
            raise refuse(field, "secondary_devices, passive, profile and rate_limiter are not supported")
        total += group.count or 1
    if total > MAX_INSTANCES:
        raise refuse("instance_group", f"asks for {total} instances, at most {MAX_INSTANCES} are allowed")


def _dynamic_batching(batching: pb.ModelDynamicBatching, max_batch_size: int, refuse: _Refuse) -> None:
    if max_batch_size < 1:
        raise refuse("dynamic_batching", "needs max_batch_size of at least 1")
    for index, size in enumerate(batching.preferred_batch_size):
        if not 1 <= size <= max_batch_size:
            raise refuse(
                f"dynamic_batching.preferred_batch_size[{index}]",
                f"{size} does not lie between 1 and max_batch_size {max_batch_size}",
            )
    levels, default = batching.priority_levels, batching.default_priority_level
    if levels > MAX_PRIORITY_LEVELS:
        raise refuse("dynamic_batching.priority_levels", f"must be at most {MAX_PRIORITY_LEVELS}")
    if levels and not 1 <= default <= levels:
        raise refuse("dynamic_batching.default_priority_level", f"must lie between 1 and priority_levels {levels}")
    if batching.priority_queue_policy:
        raise refuse("dynamic_batching.priority_queue_policy", "is not supported, use default_queue_policy")
    if batching.default_queue_policy.timeout_action == pb.ModelQueuePolicy.DELAY:
        raise refuse("dynamic_batching.default_queue_policy.timeout_action", "DELAY is not supported, use REJECT")


def _without_effect(config: pb.ModelConfig) -> list[str]:
    optimization = config.optimization
    ignored = {
        "runtime": bool(config.runtime),
        "cc_model_filenames": bool(config.cc_model_filenames),
        "dynamic_batching (the model is decoupled)": (
            config.model_transaction_policy.decoupled and config.HasField("dynamic_batching")
        ),
        "dynamic_batching.preserve_ordering": config.dynamic_batching.preserve_ordering,
        "optimization.cuda": optimization.HasField("cuda"),
        "optimization.priority": optimization.priority != 0,
        "optimization.eager_batching": optimization.eager_batching,
        "instance_group.host_policy": any(group.host_policy for group in config.instance_group),
    }
    return [f"{field} has no effect here" for field, found in ignored.items() if found]
