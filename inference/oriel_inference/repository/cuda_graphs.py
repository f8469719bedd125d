"""CUDA graphs of ONNX models: who asks for them, and for which shapes they are captured. Pure, but for
`capture_graphs`.

They are asked for by Triton's `optimization.cuda.graphs`, or by ONNX Runtime's own option `enable_cuda_graph` of the
accelerator `cuda`. A graph holds for one shape of all inputs, so all shapes must follow from the configuration.
"""

from collections.abc import Sequence

from oriel_inference.backends import Session
from oriel_inference.errors import ConfigInvalid
from oriel_inference.model import GRAPH_OPTION
from oriel_inference.repository.accelerators import CUDA
from oriel_inference.repository.instances import SHRINK, Place
from oriel_wire.v2.proto import model_config_pb2 as pb

MAX_GRAPHS = 16  # graphs per instance; each holds memory of the GPU
# Without preferred batch sizes, as in Triton's TensorRT backend.
USUAL_ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
_SPECS = "optimization.cuda.graph_spec"

Shapes = dict[str, tuple[int, ...]]


def check_graph_specs(config: pb.ModelConfig, file: str) -> None:
    """Check `optimization.cuda.graph_spec` against the tensors of a complete configuration. Raises ConfigInvalid."""

    def refuse(field: str, reason: str) -> ConfigInvalid:
        return ConfigInvalid(file, field, reason)

    known = {tensor.name for tensor in config.input}
    for index, spec in enumerate(config.optimization.cuda.graph_spec):
        field = f"{_SPECS}[{index}]"
        low = spec.graph_lower_bound
        if spec.batch_size < 0 or spec.batch_size > config.max_batch_size:
            raise refuse(f"{field}.batch_size", f"must lie between 0 and max_batch_size {config.max_batch_size}")
        if low.batch_size < 0 or low.batch_size > spec.batch_size:
            raise refuse(f"{field}.graph_lower_bound.batch_size", "must lie between 0 and the batch_size above it")
        for name, shape in (*spec.input.items(), *low.input.items()):
            if name not in known:
                raise refuse(f"{field}.input", f"the model has no input {name[:128]!r}")
            if any(dim < 1 for dim in shape.dim):
                raise refuse(f"{field}.input[{name[:128]!r}].dim", "each must be positive")


def check_graphs(config: pb.ModelConfig, file: str, found: Sequence[Place]) -> bool:
    """Return whether an instance runs with CUDA graphs. found: all instances. Raises ConfigInvalid if one cannot."""
    asking = [place.options for place in found if place.options.cuda_graphs]
    for options in asking:
        if options.providers[0][0] != CUDA:
            reason = "is for models that CUDA runs alone: leave out the accelerator tensorrt, or the graphs"
            raise ConfigInvalid(file, _field(config), reason)
        if SHRINK in options.run_entries:
            reason = f"would take memory away from the graphs that {_field(config)} asks for"
            raise ConfigInvalid(file, f"parameters[{SHRINK!r}]", reason)
    return bool(asking)


def capture_graphs(config: pb.ModelConfig, file: str, found: Sequence[Place], sessions: Sequence[Session]) -> None:
    """Capture the graphs of the instances that run with them; blocks.

    config: complete. found: the place of each session. Raises ConfigInvalid and LoadFailed.
    """
    asking = [session for place, session in zip(found, sessions, strict=True) if place.options.cuda_graphs]
    if not asking:
        return
    shapes = graph_shapes(config, file)
    for session in asking:
        session.capture(shapes)


def graph_shapes(config: pb.ModelConfig, file: str) -> list[Shapes]:
    """Return the shapes of all inputs for which graphs are captured, each once. config: complete.

    They are those of `graph_spec`; without it, those of the batch sizes that are usual. Raises ConfigInvalid if a shape
    does not follow from the configuration, or if there are too many.
    """
    specs = config.optimization.cuda.graph_spec
    if specs:
        found = [_specified(config, file, index, spec) for index, spec in enumerate(specs)]
    else:
        found = [_shapes(config, file, _field(config), rows, {}) for rows in _usual_rows(config)]
    different = [each for index, each in enumerate(found) if each not in found[:index]]
    if len(different) > MAX_GRAPHS:
        reason = f"asks for {len(different)} graphs, and an instance has at most {MAX_GRAPHS}"
        raise ConfigInvalid(file, _SPECS if specs else _field(config), reason)
    return different


def _usual_rows(config: pb.ModelConfig) -> list[int]:
    """Return batch sizes; only 0 for a model without a batch dimension."""
    most = config.max_batch_size
    preferred = config.dynamic_batching.preferred_batch_size
    rows = {1, *preferred, most} if preferred else {*USUAL_ROWS, most}
    return sorted(each for each in rows if 0 < each <= most) or [0]


def _specified(
    config: pb.ModelConfig, file: str, index: int, spec: pb.ModelOptimizationPolicy.Cuda.GraphSpec
) -> Shapes:
    field = f"{_SPECS}[{index}]"
    if spec.HasField("graph_lower_bound"):
        reason = "is not supported: a smaller batch would run with rows that nobody has written"
        raise ConfigInvalid(file, f"{field}.graph_lower_bound", reason)
    if config.max_batch_size and not spec.batch_size:
        raise ConfigInvalid(file, f"{field}.batch_size", "is missing")
    given = {name: tuple(shape.dim) for name, shape in spec.input.items()}
    return _shapes(config, file, field, spec.batch_size, given)


def _shapes(config: pb.ModelConfig, file: str, field: str, rows: int, given: Shapes) -> Shapes:
    """Return the shape of each required input for this number of rows.

    given: dims of inputs, without the batch dimension; the others have those of the configuration.
    """
    shapes: Shapes = {}
    for tensor in (each for each in config.input if not each.optional):
        dims = tuple(tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims)
        fixed = given.get(tensor.name, dims)
        if len(fixed) != len(dims) or any(own not in (-1, dim) for own, dim in zip(dims, fixed, strict=True)):
            reason = f"{list(fixed)} does not fit the dims {list(dims)} of the input"
            raise ConfigInvalid(file, f"{field}.input[{tensor.name[:128]!r}]", reason)
        if -1 in fixed:
            reason = (
                f"needs fixed shapes, and input {tensor.name[:64]!r} has the dims {list(dims)}: name its shapes in "
                f"{_SPECS}, or leave the graphs out"
            )
            raise ConfigInvalid(file, field, reason)
        shapes[tensor.name] = (rows, *fixed) if config.max_batch_size else fixed
    return shapes


def _field(config: pb.ModelConfig) -> str:
    """Return the field that asks for graphs."""
    listed = config.optimization.execution_accelerators.gpu_execution_accelerator
    for index, each in enumerate(listed):
        if GRAPH_OPTION in each.parameters:
            field = "optimization.execution_accelerators.gpu_execution_accelerator"
            return f"{field}[{index}].parameters[{GRAPH_OPTION!r}]"
    return "optimization.cuda.graphs"
