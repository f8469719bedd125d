"""Numbers from outside in the dtype that somebody wants. Pure.

Decimals are rounded to the nearest value of a float dtype, which is what a JSON number in FP32 means. All else would
be another number than the one that was sent, and is refused: fractions as integers, integers past the dtype's range,
numbers that become infinite, None as NaN.
"""

from typing import Any

import numpy as np

__all__ = ["narrowed", "numbers_as"]

Array = np.ndarray[Any, Any]
NUMBERS = "biuf"


def narrowed(array: Array, target: "np.dtype[Any]") -> Array:
    """An array that may come in another dtype of the same kind, integers also as floats.

    Raises ValueError that says what of the values does not fit.
    """
    given, wanted = array.dtype.kind, target.kind
    if target == array.dtype or not array.size:
        return array.astype(target, copy=False)
    if wanted in "iu" and given in "iu":
        bounds = np.iinfo(target)
        if int(array.min()) < bounds.min or int(array.max()) > bounds.max:
            raise ValueError(f"a given one is not within {bounds.min} and {bounds.max}")
        return array.astype(target)
    if wanted != given and not (wanted in "fc" and given in "iuf"):
        raise ValueError(f"the given ones are {'booleans' if given == 'b' else array.dtype.name}")
    return as_float(array, target)


def numbers_as(value: Any, target: "np.dtype[Any]") -> Array:
    """Lists and numbers of a handler, which may write 1 for 1.0 or True, and the other way round. Raises ValueError."""
    natural = np.asarray(value)
    if natural.dtype.kind not in NUMBERS:
        raise ValueError("they are not all numbers, or too large")
    if target == natural.dtype or not natural.size:
        return natural.astype(target, copy=False)
    if target.kind in "fc":
        return as_float(natural, target)
    with np.errstate(invalid="ignore"):
        # 1 and 2**64 - 1 together are floats of their own accord.
        made = np.asarray(value, dtype=target) if natural.dtype.kind == "f" else natural.astype(target)
    if not np.array_equal(natural, made):
        raise ValueError("they would be rounded or cut off")
    return made


def as_float(array: Array, target: "np.dtype[Any]") -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        made = array.astype(target)
    if not np.can_cast(array.dtype, target) and (np.isinf(made) & np.isfinite(array)).any():
        raise ValueError(f"a given one is larger than the {np.finfo(target).max:.6g} it can be")
    return made
