"""Finds the known name that a misspelt one probably means. Cheap enough for unauthenticated requests. Pure."""

from collections.abc import Iterable

MAX_KNOWN = 128
MAX_LENGTH = 64


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`, did you mean 'x'?`, or "" where no name of `known` is near."""
    near = near_name(name, known)
    return f", did you mean {near!r}?" if near else ""


def near_name(name: str, known: Iterable[str]) -> str:
    """The first of `known` that differs from `name` only in case, separators or one typing error; "" if none does.

    A typing error is one character that was added, left out or replaced, or two neighbours that were swapped. At most
    MAX_KNOWN names of at most MAX_LENGTH characters are compared, in a microsecond each.
    """
    if not name or len(name) > MAX_LENGTH:
        return ""
    wanted = _plain(name)
    for each, _ in zip(known, range(MAX_KNOWN), strict=False):
        if abs(len(each) - len(name)) <= 1 and each != name and _is_near(wanted, _plain(each)):
            return each
    return ""


def near_path(path: str) -> str:
    """The path with `/v1` before it once, without empty parts and without a slash at its end; "" if that is `path`."""
    parts = [part for part in path.split("/") if part]
    if parts[:1] != ["v2"]:
        while parts[:1] == ["v1"]:
            del parts[0]
        parts.insert(0, "v1")
    near = "/" + "/".join(parts)
    return "" if near == path else near


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")


def _is_near(one: str, other: str) -> bool:
    at, end, other_end = 0, len(one), len(other)
    while at < end and at < other_end and one[at] == other[at]:
        at += 1
    while end > at and other_end > at and one[end - 1] == other[other_end - 1]:
        end -= 1
        other_end -= 1
    left, other_left = end - at, other_end - at
    if left <= 1 and other_left <= 1:
        return len(one) > 2  # with two letters, one difference is too much
    return left == other_left == 2 and one[at] == other[at + 1] and one[at + 1] == other[at]
