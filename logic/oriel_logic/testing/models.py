"""Fake models: functions or fixed outputs, checked like real ones if a test gives their metadata. Also `fakes.py`
files.
"""

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from oriel_logic.client.models import NONE, Array, ArrayLike, ModelSpec, Outputs, TensorSpec
from oriel_logic.client.tensors import check_inputs, check_outputs, over_time
from oriel_logic.errors import DeadlineExceeded, LogicError, ModelUnavailable
from oriel_logic.observe.stages import Ledger
from oriel_wire.context import CallContext
from oriel_wire.observe.trace import new_trace
from oriel_wire.v2.datatypes import DATATYPES

Fake = Mapping[str, ArrayLike] | Callable[..., Any] | LogicError | Sequence[Mapping[str, ArrayLike]]
Tensors = Mapping[str, tuple[str, Sequence[int]]]
FOREVER = float("inf")
MAX_CALLS = 10_000


def spec(name: str, *, inputs: Tensors, outputs: Tensors) -> ModelSpec:
    """Make a model's metadata: `spec("digits", inputs={"image": ("FP32", [-1, 64])}, outputs={...})`, -1 for any size.

    Raises ValueError for an unknown datatype.
    """

    def tensors(found: Tensors) -> dict[str, TensorSpec]:
        for tensor, (datatype, _) in found.items():
            if datatype not in DATATYPES:
                raise ValueError(f"'{tensor}' of '{name}' is {datatype}, which is none of {', '.join(DATATYPES)}")
        return {name: TensorSpec(name, datatype, tuple(shape)) for name, (datatype, shape) in found.items()}

    return ModelSpec(name=name, inputs=tensors(inputs), outputs=tensors(outputs))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCall:
    """One call of a fake model, with what a real one would have received. inputs: as arrays."""

    model: str
    version: str
    inputs: Mapping[str, Array]
    outputs: tuple[str, ...] | None
    tier: str
    tenant: str
    request_id: str
    trace_id: int
    remaining_s: float


class BoundFakes:
    """`Models` for one request."""

    def __init__(self, fakes: "FakeModels", call: CallContext, ledger: Ledger) -> None:
        self._fakes = fakes
        self._call = call
        self._ledger = ledger

    def rebind(self, call: CallContext) -> None:
        """Set another deadline, in monotonic seconds."""
        self._call = call

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, ArrayLike],
        *,
        outputs: Sequence[str] | None = None,
        version: str = "",
    ) -> Outputs:
        with self._ledger.stage("infer", kind="client") as stage:
            stage.attributes["oriel.model"] = model
            answer = await self._answer(model, inputs, outputs, version, "infer")
            if not isinstance(answer, Mapping):
                raise TypeError(f"the fake model '{model}' must give a dict of output name -> array, not {answer!r}")
            return self._outputs(model, version, answer, outputs)

    async def scan(
        self,
        model: str,
        inputs: Mapping[str, ArrayLike],
        *,
        state: Mapping[str, Array] | None = None,
        outputs: Sequence[str] | None = None,
        version: str = "",
    ) -> Outputs:
        with self._ledger.stage("scan", kind="client") as stage:
            stage.attributes["oriel.model"] = model
            answer = await self._answer(model, inputs, outputs, version, "scan", state=state or {})
            if not isinstance(answer, Mapping):
                raise TypeError(f"the fake model '{model}' must give a dict of output name -> array, not {answer!r}")
            arrays = {name: np.asarray(value) for name, value in answer.items()}  # with a time axis of any length
            chosen = arrays if outputs is None else {name: arrays[name] for name in outputs}
            return Outputs(chosen, model=model, model_version=version or "1")

    async def stream(
        self,
        model: str,
        inputs: Mapping[str, ArrayLike],
        *,
        outputs: Sequence[str] | None = None,
        version: str = "",
        tap: Callable[[bytes], bool] | None = None,  # fakes give all their answers at once: none is for it
    ) -> AsyncGenerator[Outputs, None]:
        with self._ledger.stage("stream", kind="client") as stage:
            stage.attributes["oriel.model"] = model
            answer = await self._answer(model, inputs, outputs, version, "stream")
            if isinstance(answer, AsyncIterator):
                async for each in answer:
                    yield self._outputs(model, version, each, outputs)
            else:
                for each in [answer] if isinstance(answer, Mapping) else answer:
                    yield self._outputs(model, version, each, outputs)

    async def ready(self, model: str, *, version: str = "") -> bool:
        return model in self._fakes.models and not isinstance(self._fakes.models[model], LogicError)

    async def metadata(self, model: str, *, version: str = "") -> ModelSpec:
        if model not in self._fakes.specs:
            raise ModelUnavailable(f"model '{model}' has no metadata here: pass specs=[spec({model!r}, ...)]")
        return self._fakes.specs[model]

    async def parameters(self, model: str, *, version: str = "") -> Mapping[str, str]:
        return self._fakes.configured.get(model, {})

    async def _answer(
        self,
        model: str,
        inputs: Mapping[str, ArrayLike],
        wanted: Sequence[str] | None,
        version: str,
        stage: str,
        state: Mapping[str, Array] | None = None,
    ) -> Any:
        fakes, call = self._fakes, self._call
        known = fakes.specs.get(model)
        if model not in fakes.models:
            raise ModelUnavailable(f"model '{model}' is not served: the fakes are {', '.join(fakes.models) or 'none'}")
        if known is None:
            arrays = {name: np.asarray(value) for name, value in inputs.items()}
        else:
            expected = known if state is None else over_time(known, inputs)
            arrays = {each.name: each.array for each in check_inputs(expected, inputs)}
        arrays |= state or {}
        now = fakes.clock() if fakes.clock is not None else None
        if len(fakes.calls) >= MAX_CALLS:  # `oriel logic dev` may run for days
            del fakes.calls[: MAX_CALLS // 2]
        fakes.calls.append(
            ModelCall(
                model=model,
                version=version,
                inputs=arrays,
                outputs=None if wanted is None else tuple(wanted),
                tier=call.tier,
                tenant=call.tenant,
                request_id=call.request_id,
                trace_id=call.trace.trace_id,
                remaining_s=FOREVER if now is None else call.remaining_s(now),
            )
        )
        if model in fakes.takes_s:
            fakes.clock.advance(fakes.takes_s[model])
        if fakes.clock is not None and call.remaining_s(fakes.clock()) <= 0:
            raise DeadlineExceeded(stage)
        fake = fakes.models[model]
        if isinstance(fake, LogicError):
            raise fake
        answer = fake(**arrays) if callable(fake) else fake
        return await answer if inspect.isawaitable(answer) else answer

    def _outputs(
        self, model: str, version: str, answer: Mapping[str, ArrayLike], wanted: Sequence[str] | None
    ) -> Outputs:
        known = self._fakes.specs.get(model)
        if known is None:
            arrays = {name: np.asarray(value) for name, value in answer.items()}
        else:
            arrays = check_outputs(known, answer)
        chosen = arrays if wanted is None else {name: arrays[name] for name in wanted}
        parameters = answer.parameters if isinstance(answer, Outputs) else NONE
        return Outputs(chosen, model=model, model_version=version or "1", parameters=parameters)


class FakeModels(BoundFakes):
    """`models` for a test; it may be passed to a handler directly.

    models: name -> its answer: outputs by name, a function of its inputs by name (`def` or `async def`), an error to
        raise, or, for `stream`, a list of outputs or a generator function.
    specs: the metadata of models, checked as an inference server's would be.
    parameters: model -> the parameters of its configuration, for `oriel_logic.openai`.
    takes_s: seconds by which a call of a model moves `clock` forward.
    calls: every call, in order; of more than 10,000 the newest.
    """

    def __init__(
        self,
        models: Mapping[str, Fake] | None = None,
        *,
        specs: Sequence[ModelSpec] = (),
        takes_s: Mapping[str, float] | None = None,
        parameters: Mapping[str, Mapping[str, str]] | None = None,
        clock: Any = None,
    ) -> None:
        if takes_s and clock is None:
            raise TypeError("takes_s moves a clock: pass clock=FakeClock() here and to the client")
        self.models = dict(models or {})
        self.specs = {each.name: each for each in specs}
        self.takes_s = dict(takes_s or {})
        self.configured = dict(parameters or {})
        self.clock = clock
        self.calls: list[ModelCall] = []
        nobody = CallContext(
            request_id="", deadline=FOREVER, tier="", band=0, tenant="", models=(), trace=new_trace(False)
        )
        super().__init__(self, nobody, Ledger(nobody.trace))

    def bind(self, call: CallContext, ledger: Ledger) -> "BoundFakes":
        """Bind the models to one request, as the server binds real ones."""
        return BoundFakes(self, call, ledger)


FAKES = "fakes.py"
ATTRIBUTE = "models"


def load_fakes(path: Path) -> FakeModels:
    """Run a `fakes.py` and return its `models`. Raises what its code raises, and TypeError if it has none.

    It is not imported, so that files of this name of several services are independent.
    """
    module = ModuleType("oriel_fakes")
    module.__file__ = str(path)
    exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    found: Any = getattr(module, ATTRIBUTE, None)
    if not isinstance(found, FakeModels):
        raise TypeError('there is no `models` in it: write `models = FakeModels({"name": function})`')
    return found


def fakes_beside(served: object) -> FakeModels | None:
    """Return the fakes in the folder of a handler's path, or in the folder itself; None if there are none."""
    if not isinstance(served, str | Path):
        return None
    path = Path(served).resolve()
    fakes = (path if path.is_dir() else path.parent) / FAKES
    return load_fakes(fakes) if fakes.is_file() else None
