"""What a handler sees of models: `await models.infer("digits", {"image": array})`, numpy in and out."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]
else:  # a worker in an environment of its own may be without numpy
    Array = Any

__all__ = ["Array", "ArrayLike", "Models", "Outputs"]

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
