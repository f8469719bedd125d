"""The ONNX file beside a plan: it runs the batches whose shapes no profile of the plan takes."""

import logging
import threading
from collections.abc import Mapping, Sequence

import numpy as np

from oriel_inference.backends import OutsideProfile, Session
from oriel_inference.errors import LoadFailed
from oriel_inference.model import TensorInfo
from oriel_wire.v2.datatypes import DATATYPES
from oriel_wire.v2.messages import Array

_log = logging.getLogger(__name__)


class SharedReference:
    """A session of the ONNX file with the data types of the plan; all instances of the plan share it.

    users: number of instances that share it; it is closed when the last of them has closed it.
    Raises LoadFailed if the two files are not one model.
    """

    def __init__(self, reference: Session, plan: Session, users: int) -> None:
        self._reference = reference
        self._users = users
        self._lock = threading.Lock()
        self._reported = False
        self._input_dtypes = _conversions(plan.inputs, reference.inputs, "input")
        self._output_dtypes = _conversions(plan.outputs, reference.outputs, "output")

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str], why: OutsideProfile) -> list[Array]:
        """Execute one batch that the plan refuses; see `Session`."""
        if not self._reported:
            self._reported = True
            _log.warning("the plan refused a batch; from now on the ONNX file beside it runs such batches: %s", why)
        converted = {name: np.asarray(array, self._input_dtypes[name]) for name, array in inputs.items()}
        results = self._reference.run(converted, outputs)
        found = zip(outputs, results, strict=True)
        return [np.asarray(array, self._output_dtypes[name]) for name, array in found]

    def close(self) -> None:
        """Close the session if nobody else uses it."""
        with self._lock:
            self._users -= 1
            last = not self._users
        if last:
            self._reference.close()


class ReferencedSession(Session):
    """One instance of a plan that has a reference."""

    def __init__(self, plan: Session, reference: SharedReference) -> None:
        self._plan = plan
        self._reference = reference
        self.provider, self.inputs, self.outputs, self.rows = plan.provider, plan.inputs, plan.outputs, plan.rows

    def run(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> list[Array]:
        """Execute one batch; see `Session`."""
        try:
            return self._plan.run(inputs, outputs)
        except OutsideProfile as outside:
            return self._reference.run(inputs, outputs, outside)

    def close(self) -> None:
        """Close the plan's session, and the reference with the last one."""
        self._plan.close()
        self._reference.close()


def _conversions(
    plan: Sequence[TensorInfo], reference: Sequence[TensorInfo], kind: str
) -> dict[str, "np.dtype[np.generic]"]:
    """Return the data type that the receiver of each tensor needs. Exporters write whole numbers as INT64 where a plan
    has INT32, and the outputs of a plan may be FP16 where the ONNX file has FP32.
    """
    theirs = {info.name: info for info in reference}
    if missing := [info.name for info in plan if info.name not in theirs]:
        raise LoadFailed(f"it has no {kind} {missing[0][:128]!r}, which the plan has")
    needed = [info.name for info in reference if kind == "input" and not info.optional]
    if more := set(needed) - {info.name for info in plan}:
        raise LoadFailed(f"it also needs input {sorted(more)[0][:128]!r}, which the plan does not have")
    found = {}
    for info in plan:
        given, wanted = info.datatype, theirs[info.name].datatype
        if len(info.shape) != len(theirs[info.name].shape):
            raise LoadFailed(f"its {kind} {info.name[:128]!r} has another number of dimensions than the plan's")
        if given != wanted and "BF16" in (given, wanted):
            raise LoadFailed(f"its {kind} {info.name[:128]!r} is {wanted}, which does not stand for the plan's {given}")
        ours, other = DATATYPES[given].dtype, DATATYPES[wanted].dtype
        # Values of a request must not change; those of an answer may be rounded as the plan rounds them.
        if not (np.can_cast(ours, other, "safe") if kind == "input" else np.can_cast(other, ours, "same_kind")):
            raise LoadFailed(f"its {kind} {info.name[:128]!r} is {wanted}, which does not stand for the plan's {given}")
        found[info.name] = other if kind == "input" else ours
    return found
