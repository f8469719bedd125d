"""Checks whether a request fits its model (names, datatypes, shapes, outputs), and finds what the batcher needs to
know. Pure.
"""

from collections.abc import Hashable, Sequence
from dataclasses import replace

import msgspec

from oriel_inference.errors import InvalidRequest
from oriel_inference.model import ControlKind, ModelSpec, SequenceRules, TensorSpec
from oriel_inference.sequences.controls import visible_and_states
from oriel_inference.sequences.scan import MAX_STEPS
from oriel_wire.v2.datatypes import quoted, shown
from oriel_wire.v2.http import resolve_raw
from oriel_wire.v2.messages import Array, InferRequest, ParameterValue

MAX_PARAMETERS = 64 << 10


class Fitted(msgspec.Struct, frozen=True, gc=False):
    """A request that fits its model.

    inputs: name -> array as sent.
    rows: size of the batch dimension, 1 without one.
    timeout_s: the request's own `timeout`.
    level: the request's own `priority` as a rank, the lowest first.
    """

    inputs: dict[str, Array]
    rows: int
    signature: Hashable
    timeout_s: float | None
    level: int


class RequestFitter:
    """Checks requests against one model."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._inputs = {tensor.name: tensor for tensor in spec.inputs}
        self._outputs = {tensor.name: tensor for tensor in spec.outputs}
        self._required = frozenset(tensor.name for tensor in spec.inputs if not tensor.optional)
        # Without variable dimensions and optional inputs every request can share a batch with every other.
        self._uniform = all((-1 not in tensor.dims or tensor.ragged) and not tensor.optional for tensor in spec.inputs)
        self._ranked = bool(spec.queue.priority_levels or spec.steps)

    def fit(self, request: InferRequest) -> Fitted:
        """Check a request. Raises InvalidRequest with a sentence for the sender, and BadMessage for a raw request whose
        bytes do not fill its shape.
        """
        if len(request.inputs) == 1 and not request.inputs[0].datatype:
            self._resolve_raw(request)
        spec = self._spec
        batched = spec.batched
        rows = 0
        inputs: dict[str, Array] = {}
        for tensor in request.inputs:
            known = self._inputs.get(tensor.name)
            if known is None:
                has = f"it has {_listed(self._inputs)}"
                raise InvalidRequest(f"unexpected inference input {quoted(tensor.name)} for model {spec.name!r}, {has}")
            if tensor.datatype != known.datatype:
                raise InvalidRequest(
                    f"inference input {quoted(tensor.name)} data-type is {quoted(tensor.datatype)}, "
                    f"but model {spec.name!r} expects {quoted(known.datatype)}"
                )
            shape = tensor.shape
            if batched:
                if not shape or not (shape[1:] == known.dims or matches(shape[1:], known.dims)):
                    raise self._wrong_shape(known, shape)
                if shape[0] != rows:
                    if inputs:
                        raise InvalidRequest(
                            f"input {quoted(tensor.name)} has batch size {shape[0]}, the inputs before it have {rows}"
                        )
                    rows = shape[0]
            elif shape != known.dims and not matches(shape, known.dims):
                raise self._wrong_shape(known, shape)
            inputs[tensor.name] = tensor.array
        if len(inputs) != len(self._inputs) and (missing := self._required.difference(inputs)):
            found = f"expected {len(self._required)} inputs but got {len(inputs)} inputs for model {spec.name!r}"
            raise InvalidRequest(f"{found}. It also needs input {_listed(missing)}")
        if not inputs:
            rows = 1
        if batched and not 1 <= rows <= spec.max_batch_size:
            bound = f"must be <= {spec.max_batch_size} for {spec.name!r}"
            raise InvalidRequest(f"inference request batch-size {bound} and >= 1, it is {rows}")
        requested: set[str] = set()
        for output in request.outputs or ():
            if output.name in requested:
                raise InvalidRequest(f"Duplicate output name {quoted(output.name)} is not allowed in a request")
            requested.add(output.name)
            if output.name not in self._outputs:
                has = f"it has {_listed(self._outputs)}"
                raise InvalidRequest(
                    f"unexpected inference output {quoted(output.name)} for model {spec.name!r}, {has}"
                )
        signature: Hashable = None
        if not self._uniform:
            signature = tuple(
                (name, () if known.ragged else inputs[name].shape[batched:])
                for name, known in self._inputs.items()
                if name in inputs
            )
        parameters = request.parameters
        timeout_s = _timeout_s(parameters) if parameters else None
        level = self._level(parameters) if self._ranked else 0
        return Fitted(inputs, rows if batched else 1, signature, timeout_s, level)

    def _resolve_raw(self, request: InferRequest) -> None:
        spec = self._spec
        if len(spec.inputs) != 1:
            reason = f"got {len(spec.inputs)} inputs in {spec.name!r} model configuration"
            raise InvalidRequest(f"Raw request must only have 1 input (found 1) to be deduced but {reason}")
        (tensor,) = spec.inputs
        shape = (1, *tensor.dims) if spec.batched else tensor.dims
        resolve_raw(request, name=tensor.name, datatype=tensor.datatype, shape=shape)

    def _level(self, parameters: dict[str, ParameterValue]) -> int:
        """Return the level: 1 is the most urgent; 0 and values above the model's levels mean its default.

        An ensemble passes the value on to the models of its steps, each of which has levels of its own.
        """
        value = parameters.get("priority", 0)
        if type(value) is not int or value < 0:
            raise InvalidRequest("parameter 'priority' must be a whole number, 0 for the model's default")
        queue = self._spec.queue
        if self._spec.steps:
            return value
        return value if 0 < value <= queue.priority_levels else queue.default_priority

    def _wrong_shape(self, known: TensorSpec, shape: tuple[int, ...]) -> InvalidRequest:
        expected, got = (shown(each).replace(" ", "") for each in (self._spec.wire_shape(known), shape))
        what = f"input {quoted(known.name)} for model {self._spec.name!r}"
        return InvalidRequest(f"unexpected shape for {what}. Expected {expected}, got {got}")


class ScanFitter:
    """Checks scans against one model. Each input and output has the time axis in front of the dims of its
    configuration, in the place of the batch dimension.

    spec: the tensors of a scan; the states are optional inputs, and outputs for those who ask for them.
    """

    def __init__(self, spec: ModelSpec, rules: SequenceRules) -> None:
        states = [replace(each.tensor, optional=True) for each in rules.states]
        self.spec = replace(
            spec,
            inputs=tuple([_over_time(each) for each in (*spec.inputs, *states)]),
            outputs=tuple([_over_time(each) for each in visible_and_states(spec, rules)]),
            max_batch_size=0,
        )
        self._states = frozenset([each.name for each in states])
        self._fitter = RequestFitter(self.spec)

    def fit(self, request: InferRequest) -> Fitted:
        """Check a request. Raises InvalidRequest, BadMessage."""
        fitted = self._fitter.fit(request)
        steps = 1
        for name, array in fitted.inputs.items():
            found = len(array)
            if found == 1:
                continue
            if name in self._states:
                raise InvalidRequest(f"state {quoted(name)} of a scan must have 1 row, not {found}")
            if steps not in (1, found):
                raise InvalidRequest(
                    f"input {quoted(name)} has {found} steps, the inputs before it have {steps}: all inputs of a scan "
                    "have the same number of steps, or 1 if they stay the same"
                )
            steps = found
        if not 1 <= steps <= MAX_STEPS:
            raise InvalidRequest(f"a scan of {steps} steps: it has 1 to {MAX_STEPS}, send several with the last state")
        if any(output.classification for output in request.outputs or ()):
            raise InvalidRequest(
                "the outputs of a scan (parameter scan) cannot be classified: ask for the output itself"
            )
        return fitted


def scan_fitter(spec: ModelSpec, *, takes_requests: bool) -> ScanFitter | None:
    """Return the check of a model's scans; None if it cannot be scanned."""
    rules = spec.sequences
    if rules is None or not rules.states or takes_requests:
        return None
    if any(control.kind is ControlKind.CORRID for control in rules.controls):
        return None  # a scan has no id, by which such a model may keep a state of its own
    return ScanFitter(spec, rules)


def not_scannable(name: str) -> InvalidRequest:
    """Return the error for a model that cannot be scanned."""
    return InvalidRequest(
        f"model {name!r} cannot be scanned: that takes sequence_batching with a state, no CONTROL_SEQUENCE_CORRID, and "
        "a backend that runs inside the server (not Python or PyTorch); send the steps as a sequence instead"
    )


def check_parameters(request: InferRequest) -> None:
    """Check that the request's other values can be sent to the process of a Python model. Raises InvalidRequest."""
    size = len(request.id)
    for name, value in request.parameters.items():
        if isinstance(value, int) and not -(2**63) <= value < 2**64:
            raise InvalidRequest(f"parameter {quoted(name)} does not fit into 64 bits")
        size += len(name) + (len(value) if isinstance(value, str) else 8)
    if size > MAX_PARAMETERS:
        raise InvalidRequest(f"id and parameters have more than {MAX_PARAMETERS} characters together")


def matches(shape: Sequence[int], dims: Sequence[int]) -> bool:
    """Return whether a shape has these dims, of which -1 takes any size."""
    return len(shape) == len(dims) and all(d in (-1, s) for s, d in zip(shape, dims, strict=True))


def _listed(names: object) -> str:
    assert isinstance(names, dict | frozenset | set)
    found = sorted(names)
    return ", ".join(quoted(name) for name in found[:8]) + (", ..." if len(found) > 8 else "")


def _timeout_s(parameters: dict[str, ParameterValue]) -> float | None:
    """Return the `timeout` parameter, which is in microseconds; 0 means none."""
    value = parameters.get("timeout", 0)
    if value == 0 and type(value) is int:
        return None
    if type(value) is not int or not 0 <= value < 2**63:
        raise InvalidRequest("parameter 'timeout' must be a positive number of microseconds, of 64 bits")
    return value / 1e6


def _over_time(tensor: TensorSpec) -> TensorSpec:
    return replace(tensor, dims=(-1, *tensor.dims), engine_dims=None)
