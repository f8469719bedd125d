"""Optimisation profiles of a compiled engine: which of them runs a batch, and what is wrong with shapes that none of
them takes. Pure.

A profile states for each input the smallest, the best and the largest shape. It runs a batch if the shape of every
input lies between its smallest and its largest one, in every dimension.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

MAX_SHOWN = 4
MAX_PROFILES = 16
MAX_DIMENSIONS = 16
MAX_SIZE = 2**31 - 1

Shape = tuple[int, ...]


class Span(NamedTuple):
    """The shapes that one profile takes of one input; `best` is the one that it was optimised for."""

    smallest: Shape
    best: Shape
    largest: Shape

    def takes(self, shape: Shape) -> bool:
        """Return whether a shape lies within the bounds of every dimension."""
        return len(shape) == len(self.smallest) and all(
            low <= size <= high for low, size, high in zip(self.smallest, shape, self.largest, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Profile:
    """One profile. spans: input -> the shapes that it takes."""

    spans: Mapping[str, Span]

    def takes(self, shapes: Mapping[str, Shape]) -> bool:
        """Return whether the profile runs a batch with these shapes of its inputs."""
        return all(name in shapes and span.takes(shapes[name]) for name, span in self.spans.items())

    @property
    def largest_elements(self) -> int:
        """Return how many elements all inputs have together at their largest."""
        return sum(prod(span.largest) for span in self.spans.values())

    @property
    def best_elements(self) -> int:
        """Return how many elements all inputs have together at the shapes that the profile was optimised for."""
        return sum(prod(span.best) for span in self.spans.values())


def parse_shapes(text: str) -> list[dict[str, Shape]]:
    """Read the shapes of inputs, `ids:1x1,mask:1x1`; those of further profiles follow after a semicolon.

    Returns input -> shape for each profile, none for an empty text. Raises ValueError that says what the text must be.
    """
    if not text:
        return []
    profiles = text.split(";")
    if len(profiles) > MAX_PROFILES:
        raise ValueError(f"must hold at most {MAX_PROFILES} profiles")
    return [dict(_one_shape(each.strip()) for each in profile.split(",")) for profile in profiles]


def _one_shape(text: str) -> tuple[str, Shape]:
    name, colon, sizes = text.rpartition(":")
    parts = sizes.split("x")
    if not (colon and name and len(parts) <= MAX_DIMENSIONS and all(_is_size(each) for each in parts)):
        raise ValueError("must be shapes of inputs as in ids:1x1,mask:1x1, with a semicolon between profiles")
    return name, tuple(int(each) for each in parts)


def _is_size(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 10 and int(text) <= MAX_SIZE


def smallest_fitting(profiles: Sequence[Profile], shapes: Mapping[str, Shape]) -> int | None:
    """Return the index of the profile that runs a batch; None if no profile takes it.

    If there are several, it is the one with the fewest elements at its largest; among equals the one whose best shapes
    are nearest to the batch in elements, and then the first.
    """
    fitting = [(index, each) for index, each in enumerate(profiles) if each.takes(shapes)]
    if len(fitting) < 2:
        return fitting[0][0] if fitting else None
    elements = sum(prod(shape) for shape in shapes.values())
    return min(fitting, key=lambda one: (one[1].largest_elements, abs(one[1].best_elements - elements), one[0]))[0]


def why_outside(profiles: Sequence[Profile], shapes: Mapping[str, Shape]) -> str:
    """Return a sentence about shapes that no profile takes: the input, its shape, and what is allowed.

    The input is the first that no profile takes; if every input has a profile of its own, the first that the profile
    with the fewest such inputs does not take.
    """
    alone = next((name for name in shapes if not any(_takes(each, name, shapes) for each in profiles)), None)
    if alone is not None:
        spans = list(dict.fromkeys(each.spans[alone] for each in profiles if alone in each.spans))
        allowed = " or ".join(_shown(span) for span in spans[:MAX_SHOWN])
        more = f" and {len(spans) - MAX_SHOWN} more" if len(spans) > MAX_SHOWN else ""
        one = "its profile takes" if len(profiles) == 1 else f"its {len(profiles)} profiles take"
        return f"input {alone[:64]!r} has shape {list(shapes[alone])}, {one} {allowed}{more}"
    wrong = [[name for name in shapes if not _takes(each, name, shapes)] for each in profiles]
    index = min(range(len(profiles)), key=lambda one: (len(wrong[one]), one))
    name = wrong[index][0]
    span = profiles[index].spans[name]
    return (
        f"input {name[:64]!r} has shape {list(shapes[name])}, and no profile takes it beside the other inputs: "
        f"profile {index} takes {_shown(span)}"
    )


def most_rows(profiles: Sequence[Profile]) -> int:
    """Return the largest first dimension that all inputs can have together; 0 if an input has no dimension."""
    return max((_rows(each) for each in profiles), default=0)


def _rows(profile: Profile) -> int:
    return min((span.largest[0] if span.largest else 0 for span in profile.spans.values()), default=0)


def _takes(profile: Profile, name: str, shapes: Mapping[str, Shape]) -> bool:
    return name in profile.spans and profile.spans[name].takes(shapes[name])


def _shown(span: Span) -> str:
    if span.smallest == span.largest:
        return str(list(span.smallest))
    return f"{list(span.smallest)} to {list(span.largest)}"
