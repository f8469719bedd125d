"""Measures how the outputs of an artefact, or of another version of a model, differ from those of its reference. No
I/O.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oriel_policies.artefacts.comparison import OutputError, Tolerance, tolerance_of

Array = NDArray[Any]


def measure_all(
    outputs: Iterable[tuple[str, str]],
    runs: Sequence[tuple[Sequence[Array], Sequence[Array]]],
    precision: str = "",
    own: Tolerance | None = None,
) -> list[OutputError]:
    """Compare all outputs over all samples.

    outputs: name and data type of each. runs: outputs of the artefact and of the reference, for each sample.
    precision, own: see `tolerance_of`.
    """
    return [
        measure(name, datatype, [(ours[i], theirs[i]) for ours, theirs in runs], tolerance_of(datatype, precision, own))
        for i, (name, datatype) in enumerate(outputs)
    ]


def measure(name: str, datatype: str, pairs: Iterable[tuple[Array, Array]], tolerance: Tolerance) -> OutputError:
    """Compare one output over all samples. pairs: (artefact's, reference's)."""
    elements = outside = odd = rows = same = 0
    absolute = relative = 0.0
    for artefact, reference in pairs:
        if artefact.shape != reference.shape or artefact.dtype != reference.dtype:
            shapes = f"{artefact.dtype} {list(artefact.shape)} instead of {reference.dtype} {list(reference.shape)}"
            return OutputError(name=name, datatype=datatype, elements=elements, shapes=shapes)
        elements += int(reference.size)
        if datatype == "BF16":
            artefact, reference = _widened(artefact), _widened(reference)
        if reference.dtype.kind != "f":
            outside += int(np.count_nonzero(artefact != reference))
            continue
        ours, theirs = artefact.astype(np.float64), reference.astype(np.float64)
        finite = np.isfinite(ours) & np.isfinite(theirs)
        equal = (ours == theirs) | (np.isnan(ours) & np.isnan(theirs))
        odd += int(np.count_nonzero(~finite & ~equal))
        # The difference of two large numbers may be infinite, and is then outside.
        with np.errstate(over="ignore", invalid="ignore"):
            error = np.abs(ours - theirs, where=finite, out=np.zeros_like(ours))
        size = np.abs(theirs, where=finite, out=np.zeros_like(theirs))
        outside += int(
            np.count_nonzero(np.where(finite, error > tolerance.absolute + tolerance.relative * size, ~equal))
        )
        if error.size:
            absolute = max(absolute, float(error.max()))
            with np.errstate(over="ignore"):
                shares = np.divide(error, size, out=np.zeros_like(error), where=size > 0)
            relative = max(relative, float(shares.max()))
        if theirs.ndim >= 2 and theirs.shape[-1] > 1 and theirs.size:
            rows += theirs.size // theirs.shape[-1]
            same += int(np.count_nonzero(ours.argmax(-1) == theirs.argmax(-1)))
    return OutputError(
        name=name,
        datatype=datatype,
        elements=elements,
        outside=outside,
        not_finite=odd,
        absolute=absolute,
        relative=relative,
        top1=same / rows if rows else None,
    )


def _widened(bits: Array) -> Array:
    """Return the numbers of BF16, which travel as their bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
