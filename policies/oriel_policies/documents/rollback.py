"""Checks and compiles `rollback` of a route: the rule by which its canary is rolled back."""

from oriel_policies.documents.promises import Split
from oriel_policies.documents.schema import RouteTable
from oriel_policies.errors import BadDocument
from oriel_policies.quality.canary import Rollback


def rollback(file: str, path: str, route: RouteTable, split: tuple[Split, ...]) -> Rollback | None:
    """Return the rule of a route, None if it has none. Raises BadDocument."""
    found = route.rollback
    if found is None:
        return None
    names = [side.name for side in split]
    if len(split) != 2 or names[0] == names[1]:
        raise BadDocument(
            file, path, "a canary is compared with one other side: the split needs exactly two different sides"
        )
    if found.canary not in names:
        raise BadDocument(file, f"{path}.canary", f"{found.canary!r} is neither of the sides, {' and '.join(names)}")
    if route.shadow is not None and found.compare_percent:
        text = "copies of the canary's calls are compared: leave out shadow, or set compare_percent = 0"
        raise BadDocument(file, path, text)
    return Rollback(
        canary=found.canary,
        min_calls=found.min_calls,
        margin=found.margin,
        agreement=found.agreement,
        compare_share=found.compare_percent / 100.0,
    )
