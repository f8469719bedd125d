"""Finds the argument or the result of a program that a tensor of the configuration stands for, as Triton does.

A name is taken for the program's own name of an argument or result if all are; otherwise for `NAME__INDEX` if all have
that form; otherwise the order in the configuration counts.
"""

from collections.abc import Sequence


class Unfit(Exception):
    """A program has other inputs or outputs than its configuration."""


def own_names(names: Sequence[str], own: Sequence[str]) -> bool:
    """Return whether these are all names that the program itself has."""
    return bool(names) and set(names) <= set(own)


def positions(names: Sequence[str], own: Sequence[str], kind: str) -> list[int]:
    """Return the position of each tensor.

    names: the names of the tensors, in the order of the configuration.
    own: the program's own names in their order, as far as it has any.
    kind: "input" or "output", for errors.
    Raises Unfit if a position is taken twice, or an input's is left out.
    """
    if own_names(names, own):
        found = [own.index(name) for name in names]
    elif all(_index(name) for name in names):
        found = [int(_index(name)) for name in names]
    else:
        found = list(range(len(names)))
    for name, position in zip(names, found, strict=True):
        if found.count(position) > 1:
            raise Unfit(f"{kind} {name[:64]!r} has the index of another {kind}: number them __0, __1, ...")
    if kind == "input" and sorted(found) != list(range(len(found))):
        missing = next(index for index in range(len(found)) if index not in found)
        raise Unfit(f"no input has the position {missing}: the names count from __0 upwards")
    return found


def _index(name: str) -> str:
    """Return the index of a name of the form `NAME__INDEX`; "" if it has another form."""
    index = name.partition("__")[2]
    return index if index.isascii() and index.isdigit() and len(index) < 5 else ""
