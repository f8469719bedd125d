"""Decides whether an artefact's outputs agree with those of its reference.

An element agrees if |artefact - reference| <= absolute + relative x |reference|, as in numpy's `allclose`; NaN agrees
with NaN, and an infinity with the same one. Whole numbers, truth values and texts have to be equal. Every element has
to agree.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_NUMBER = r"[0-9]{0,9}(?:\.[0-9]{1,12})?(?:[eE]-?[0-9]{1,2})?"
_TOLERANCE = re.compile(rf"\s*(absolute|relative)\s*=\s*({_NUMBER})\s*")


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The error that an element may have."""

    absolute: float = 0.0
    relative: float = 0.0


EXACT = Tolerance()
# Optimised graphs sum in another order: the error is that of rounding, amplified by the depth of the model.
TOLERANCES: Mapping[str, Tolerance] = {
    "FP64": Tolerance(1e-9, 1e-7),
    "FP32": Tolerance(1e-5, 1e-3),
    "FP16": Tolerance(1e-2, 1e-2),
    "BF16": Tolerance(5e-2, 5e-2),
}
# Precisions of computation, besides the data types of outputs: a quantised model rounds to one of 256 steps.
_COMPUTED: Mapping[str, Tolerance] = {"INT8": Tolerance(1e-1, 1e-1), **TOLERANCES}
_COARSE_FIRST = ("INT8", "BF16", "FP16", "FP32", "FP64")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputError:
    """How one output of an artefact differs from the reference's, over all samples.

    outside: elements beyond the tolerance, NaN and infinities that only one of the two has among them.
    not_finite: the number of such elements among them.
    absolute, relative: the largest errors of elements that are finite in both.
    top1: share of rows whose largest element is the same one; None where that means nothing.
    shapes: "" if all shapes are equal.
    """

    name: str
    datatype: str
    elements: int
    outside: int = 0
    not_finite: int = 0
    absolute: float = 0.0
    relative: float = 0.0
    top1: float | None = None
    shapes: str = ""


def tolerance_of(datatype: str, precision: str = "", own: Tolerance | None = None) -> Tolerance:
    """Return the tolerance of an output of `datatype`.

    precision: datatype in which the artefact computes; if it is coarser than the output's, it decides.
    own: the model owner's tolerance for all floating-point outputs.
    """
    if datatype not in TOLERANCES:
        return EXACT
    if own is not None:
        return own
    return _COMPUTED[next(each for each in _COARSE_FIRST if each in (datatype, precision))]


def parse_tolerance(text: str) -> Tolerance:
    """Read `absolute=1e-5,relative=1e-3`; what is left out is 0. Raises ValueError."""
    found: dict[str, float] = {}
    for part in text.split(","):
        match = _TOLERANCE.fullmatch(part)
        if match is None or not match[2] or match[1] in found:
            raise ValueError("must be of the form absolute=1e-5,relative=1e-3")
        try:
            found[match[1]] = float(match[2])
        except ValueError as error:
            raise ValueError("must be of the form absolute=1e-5,relative=1e-3") from error
    return Tolerance(**found)


def disagreement(errors: Iterable[OutputError]) -> str:
    """Return why the outputs do not agree, "" if they do."""
    for each in errors:
        if each.shapes:
            return f"output {each.name[:64]!r} has another shape: {each.shapes}"
        if each.outside:
            odd = f", {each.not_finite} of them NaN or infinite in only one of the two" if each.not_finite else ""
            return (
                f"output {each.name[:64]!r} differs in {each.outside} of {each.elements} elements{odd}: largest error "
                f"{each.absolute:.3g} absolute, {each.relative:.3g} relative"
            )
    return ""


def agreement(errors: Iterable[OutputError]) -> str:
    """Return the largest errors of outputs that agree, as text."""
    found = list(errors)
    absolute = max((each.absolute for each in found), default=0.0)
    relative = max((each.relative for each in found), default=0.0)
    return f"largest error {absolute:.3g} absolute, {relative:.3g} relative"
