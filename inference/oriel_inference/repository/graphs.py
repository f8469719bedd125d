"""CUDA graphs as TensorRT engines use them: judged by a configuration that is complete, and not executed yet."""

from collections.abc import Sequence

from oriel_inference.errors import ConfigInvalid
from oriel_inference.repository.not_executed import NOT_YET
from oriel_wire.v2.proto import model_config_pb2 as pb

__all__ = ["check_graph_specs", "refuse_graphs"]


def check_graph_specs(config: pb.ModelConfig, file: str) -> None:
    """Judge `optimization.cuda.graph_spec` by the tensors of a configuration that is complete. Raises ConfigInvalid."""

    def refuse(field: str, reason: str) -> ConfigInvalid:
        return ConfigInvalid(file, field, reason)

    known = {tensor.name for tensor in config.input}
    for index, spec in enumerate(config.optimization.cuda.graph_spec):
        field = f"optimization.cuda.graph_spec[{index}]"
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


def refuse_graphs(config: pb.ModelConfig, file: str, providers: Sequence[str]) -> None:
    """Refuse what asks for CUDA graphs where it runs on a GPU; on the CPU there are none to be had.

    providers: of all instances. Raises ConfigInvalid.
    """
    if not any(name.startswith(("CUDA", "Tensorrt")) for name in providers):
        return
    cuda = config.optimization.cuda
    field = "graphs" if cuda.graphs else "graph_spec" if cuda.graph_spec else ""
    if field:
        reason = f"{NOT_YET}; the option trt_cuda_graph_enable of the tensorrt accelerator is"
        raise ConfigInvalid(file, f"optimization.cuda.{field}", reason)
