"""The reference of a model version, `reference.json`: how its tensors were distributed when it did well.

It holds shares, edges of bins and sums over at least MIN_ROWS rows, and no value of a row: the range is rounded
outwards, and classes of fewer than MIN_BIN_ROWS rows are in `rest`.
"""

import math
import re
from itertools import pairwise
from typing import Final

import msgspec

from oriel_policies.quality.drift import BINS, MIN_ROWS

REFERENCE_FILE: Final = "reference.json"
FORMAT: Final = 1
MAX_TENSORS: Final = 64
MAX_CLASSES: Final = 1000
_INDEX: Final = re.compile(r"0|[1-9][0-9]{0,4}")


class TensorReference(msgspec.Struct, frozen=True, omit_defaults=True):
    """The distribution of one tensor.

    rows: rows that it was made from.
    edges, shares: the inner edges of the bins, and the share of the values in each of them, one more than edges.
    low, high: the range of the values. mean, deviation: the mean and standard deviation of the values.
    classes: index of the largest element -> share of the rows, for outputs with classes; `rest` is the share of all
    other classes.
    """

    rows: int
    edges: tuple[float, ...] = ()
    shares: tuple[float, ...] = ()
    low: float = 0.0
    high: float = 0.0
    mean: float = 0.0
    deviation: float = 0.0
    classes: dict[str, float] = {}
    rest: float = 0.0


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """The distributions of the tensors of one version. made: the time when it was made, as text."""

    format: int = FORMAT
    model: str
    version: str
    made: str = ""
    tensors: dict[str, TensorReference]

    def encode(self) -> str:
        """Return the text of the file."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2).decode() + "\n"


def parse_reference(text: str) -> Reference:
    """Read a reference. Raises ValueError that says what is wrong."""
    try:
        found = msgspec.json.decode(text, type=Reference)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    if found.format != FORMAT:
        raise ValueError(f"format {found.format} is not {FORMAT}")
    if len(found.tensors) > MAX_TENSORS:
        raise ValueError(f"it has more than {MAX_TENSORS} tensors")
    for name, tensor in found.tensors.items():
        if wrong := _wrong(tensor):
            raise ValueError(f"tensor {name[:64]!r}: {wrong}")
    return found


def _wrong(tensor: TensorReference) -> str:
    if tensor.rows < MIN_ROWS:
        return f"it was made from fewer than {MIN_ROWS} rows"
    if tensor.classes:
        if len(tensor.classes) > MAX_CLASSES:
            return f"it has more than {MAX_CLASSES} classes"
        if not all(_INDEX.fullmatch(index) for index in tensor.classes):
            return "a class is not a number from 0 to 99999"
        shares = (*tensor.classes.values(), tensor.rest)
    else:
        if len(tensor.shares) != len(tensor.edges) + 1 or len(tensor.shares) > BINS:
            return f"it needs exactly one more share than edges, and at most {BINS} shares"
        if any(one >= other for one, other in pairwise(tensor.edges)):
            return "its edges do not ascend"
        shares = tensor.shares
    numbers = (*shares, *tensor.edges, tensor.low, tensor.high, tensor.mean, tensor.deviation)
    if not all(map(math.isfinite, numbers)) or min(shares) < 0.0 or sum(shares) <= 0.0:
        return "its numbers are not finite, or its shares not positive"
    return ""
