"""The interface of models for handlers: `await models.infer("digits", {"image": array})`, numpy in and out."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

from numpy.typing import NDArray

from oriel_wire.v2.messages import ParameterValue

Array: TypeAlias = NDArray[Any]
ArrayLike: TypeAlias = Array | Sequence[Any] | float | int | str | bytes
NONE: Mapping[str, ParameterValue] = MappingProxyType({})


class Outputs(dict[str, Array]):
    """A model's outputs by name, the version that answered, and the answer's parameters, of one that is streamed.
    Arrays may be read-only views of the answer.
    """

    def __init__(
        self,
        arrays: Mapping[str, Array],
        *,
        model: str,
        model_version: str,
        parameters: Mapping[str, ParameterValue] = NONE,
    ) -> None:
        super().__init__(arrays)
        self.model = model
        self.model_version = model_version
        self.parameters = parameters

    def __reduce__(self) -> tuple[Any, ...]:
        return restore, (dict(self), self.model, self.model_version)

    def __missing__(self, name: str) -> Array:
        raise KeyError(f"model '{self.model}' gave no output '{name}': it gave {', '.join(self)}")


def restore(arrays: dict[str, Array], model: str, model_version: str) -> Outputs:
    return Outputs(arrays, model=model, model_version=model_version)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a model. shape: the shape that the server reports, -1 for any size, batch axis included."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A model's inputs and outputs, by name."""

    name: str
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]


class Models(Protocol):
    """The models that a request may call. Deadline, tier, tenant, trace and request id are passed on automatically."""

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, ArrayLike],
        *,
        outputs: Sequence[str] | None = None,
        version: str = "",
    ) -> Outputs:
        """Run `model` once.

        inputs: name -> array with the model's dtype and shape, batch axis included; lists and numbers are converted.
        outputs: names of the wanted outputs, None for all.
        version: "" lets the server choose.
        Raises ModelInputWrong (it names the tensor), ModelUnavailable, ModelBusy, ModelFailed, ModelUnreachable or
        DeadlineExceeded.
        Cancelled: the inference server sees that the caller left.
        """
        ...

    async def scan(
        self,
        model: str,
        inputs: Mapping[str, ArrayLike],
        *,
        state: Mapping[str, Array] | None = None,
        outputs: Sequence[str] | None = None,
        version: str = "",
    ) -> Outputs:
        """Run a model with a state step by step over a leading time axis, in one call: a loop at the server.

        inputs: name -> [steps, ...dims of the model without its batch axis], or [1, ...] for an input that stays the
        same. All have the same number of steps, at most 65,536.
        state: the first state, input name -> [1, ...]; None for the initial one of the model's configuration.
        outputs: names of the wanted outputs, None for all that the model shows. The outputs of `state` in its
        configuration may be named too: they come as the last state, [1, ...], which another scan may go on from.
        Returns name -> [steps, ...].
        Raises as `infer`; ModelInputWrong also for a model without a declared state. The deadline is judged between
        steps.
        Cancelled: the inference server ends the scan.
        """
        ...

    def stream(
        self,
        model: str,
        inputs: Mapping[str, ArrayLike],
        *,
        outputs: Sequence[str] | None = None,
        version: str = "",
    ) -> AsyncGenerator[Outputs, None]:
        """Yield every answer of a model that gives several to one call, over gRPC.

        The request's deadline bounds the first answer, after that the time that the tier gives streams (10 minutes
        without a gateway) all of them.
        Raises as `infer`.
        Cancelled or left early: the inference server sees it.
        """
        ...

    async def ready(self, model: str, *, version: str = "") -> bool:
        """Return whether an inference server has the model ready. Raises ModelUnreachable or DeadlineExceeded."""
        ...

    async def metadata(self, model: str, *, version: str = "") -> ModelSpec:
        """Return the model's inputs and outputs, at most a second old. Raises as `infer`."""
        ...
