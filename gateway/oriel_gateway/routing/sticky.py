"""Equal keys meet the same endpoint, as long as it can be asked; meanwhile all its keys meet their next one."""

from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from oriel_policies.upstreams.assignment import Rendezvous

E = TypeVar("E")


class StickyChoice(Generic[E]):
    """The choice of an endpoint of one pool by a key, so that calls with the same key go to the same one.

    name: returns the name of an endpoint, the same in every process and after every start.
    """

    def __init__(self, name: Callable[[E], str]) -> None:
        self._name = name
        self._ring = Rendezvous(())
        self._source: Sequence[E] = ()

    def pick(self, usable: Sequence[E], key: str, tried: Sequence[E] = ()) -> E | None:
        """Return the endpoint of `key` among `usable` without `tried`; None when none is left.

        usable: has to be another object whenever its members are others; they are hashed anew then.
        """
        if usable is not self._source or len(usable) != len(self._ring.names):
            self._source = usable
            self._ring = Rendezvous([self._name(endpoint) for endpoint in usable])
        barred = [index for index, endpoint in enumerate(usable) if endpoint in tried] if tried else ()
        found = self._ring.first(key, barred)
        return None if found is None else usable[found]
