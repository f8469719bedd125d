"""What a handler sees of models: `await models.infer("digits", {"image": array})`, numpy in and out."""

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]
else:  # numpy is loaded by those who use it
    Array = Any

__all__ = ["Array", "ArrayLike", "ModelSpec", "Models", "Outputs", "TensorSpec"]

ArrayLike: TypeAlias = Array | Sequence[Any] | float | int | str | bytes


class Outputs(dict[str, Array]):
    """A model's outputs by name, and which version answered. Arrays may be read-only views of the answer."""

    def __init__(self, arrays: Mapping[str, Array], *, model: str, model_version: str) -> None:
        super().__init__(arrays)
        self.model = model
        self.model_version = model_version

    def __reduce__(self) -> tuple[Any, ...]:
        return restore, (dict(self), self.model, self.model_version)

    def __missing__(self, name: str) -> Array:
        raise KeyError(f"model '{self.model}' gave no output '{name}': it gave {', '.join(self)}")


def restore(arrays: dict[str, Array], model: str, model_version: str) -> Outputs:
    return Outputs(arrays, model=model, model_version=model_version)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """shape: as the server says it, -1 for any, batch axis included."""

    name: str
    datatype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """What a model takes and gives, by name."""

    name: str
    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]


class Models(Protocol):
    """The models a request may call. Remaining time, tier, tenant, trace and request id go along by themselves."""

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
        outputs: names wanted, None for all. version: "" for the server's choice.
        Raises ModelInputWrong (names the tensor), ModelUnavailable, ModelBusy, ModelFailed, ModelUnreachable or
        DeadlineExceeded. Cancelled: the inference server sees that the caller left.
        """
        ...

    def stream(
        self,
        model: str,
        inputs: Mapping[str, ArrayLike],
        *,
        outputs: Sequence[str] | None = None,
        version: str = "",
    ) -> AsyncIterator[Outputs]:
        """`async for outputs in models.stream(...)`: every answer of a model that gives several to one call, over gRPC.

        The request's deadline bounds the first answer; then at most 30 s pass between two, 10 minutes in all. Raises
        as `infer`. Left early or cancelled: the inference server sees it.
        """
        ...

    async def ready(self, model: str, *, version: str = "") -> bool:
        """Whether an inference server has the model ready. Raises ModelUnreachable or DeadlineExceeded."""
        ...

    async def metadata(self, model: str, *, version: str = "") -> ModelSpec:
        """The model's inputs and outputs, as an inference server said at most a second ago. Raises as `infer`."""
        ...
