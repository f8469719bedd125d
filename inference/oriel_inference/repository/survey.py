"""Looking at the repositories: what lies where, and which changes have settled."""

from collections.abc import Mapping, Sequence

from oriel_inference.stores import Fingerprint, ModelStore

__all__ = ["Look", "Looks", "survey"]

# A model's stores and what its files look like in them; None: in no store.
Look = tuple[tuple[Fingerprint, ...], tuple[ModelStore, ...]] | None


def survey(stores: Sequence[ModelStore], only: str = "") -> dict[str, Look]:
    """Every model of every store, or the one named. Blocks. Raises LoadFailed."""
    found: dict[str, list[ModelStore]] = {}
    for store in stores:
        for name in store.models():
            if only in ("", name):
                found.setdefault(name, []).append(store)
    return {name: (tuple(each.fingerprint(name) for each in where), tuple(where)) for name, where in found.items()}


class Looks:
    """What was acted on, and what was seen once since: a change counts when two looks in a row found the same."""

    def __init__(self) -> None:
        self._applied: dict[str, Look] = {}
        self._seen: dict[str, Look] = {}
        self._under_way: set[str] = set()

    def due(self, looks: Mapping[str, Look]) -> list[tuple[str, Look]]:
        """Take note of `looks`: what is to be acted on now. Each has to be ended by `applied`."""
        ready: list[tuple[str, Look]] = []
        for name in sorted((looks.keys() | self._applied.keys()) - self._under_way):
            look = looks.get(name)
            if name in self._applied and look == self._applied[name]:
                self._seen.pop(name, None)
            elif name not in self._seen or self._seen[name] != look:
                self._seen[name] = look
            else:
                del self._seen[name]
                self._under_way.add(name)
                ready.append((name, look))
        return ready

    @property
    def unsettled(self) -> bool:
        """Whether a change was seen only once so far."""
        return bool(self._seen)

    def applied(self, name: str, look: Look) -> None:
        """It was acted on."""
        self._under_way.discard(name)
        if look is None:
            self._applied.pop(name, None)
        else:
            self._applied[name] = look
