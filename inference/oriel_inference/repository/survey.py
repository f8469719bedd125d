"""Looking at the repositories, each by itself: what lies where, and which changes have settled."""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from oriel_inference.errors import LoadFailed
from oriel_inference.stores import Fingerprint, ModelStore

__all__ = ["Look", "Looks", "Repositories", "Repository"]

_log = logging.getLogger(__name__)

LOOKS_AT_ONCE = 4
LATE_S = 2.0

# What a model's files look like in one repository; None: they are not there.
Look = Fingerprint | None


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


class Repository:
    """One model repository as it was last seen. Single writer: the loop.

    found: model -> what its files looked like, None before the first look that succeeded. failure: why the last one did
    not, "" if it did. looks: what was acted on.
    """

    def __init__(self, store: ModelStore) -> None:
        self.store = store
        self.found: Mapping[str, Fingerprint] | None = None
        self.failure = ""
        self.looks = Looks()
        # Of its own: a repository that hangs must not take the threads that look at another.
        self._threads = ThreadPoolExecutor(LOOKS_AT_ONCE, thread_name_prefix="oriel-look")
        self._began = self._taken = 0

    @property
    def up(self) -> bool:
        """Whether what it holds now is known."""
        return not self.failure and self.store.up

    def has(self, model: str) -> bool:
        """Whether the last look succeeded and found it."""
        return not self.failure and model in (self.found or ())

    def close(self) -> None:
        """No look begins any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def look(self) -> bool:
        """Whether it can be read; else what was found before stays."""
        self._began += 1
        number = self._began
        found, failure = None, ""
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._threads, _fingerprints, self.store)
        except LoadFailed as error:
            failure = error.reason
        except Exception:
            # A surprise in one repository must not keep the others from being looked at.
            _log.exception("looking at the model repository %s failed", self.store.shown)
            failure = f"{self.store.shown} could not be looked at, the server's log says why"
        if number < self._taken:
            return not failure  # one that began later has ended
        self._taken = number
        if failure and not self.failure:
            _log.error(
                "the model repository cannot be read, what is loaded goes on serving: %s: %s", self.store.shown, failure
            )
        elif self.failure and not failure:
            _log.info("the model repository %s can be read again", self.store.shown)
        self.failure = failure
        self.found = self.found if found is None else found
        return not failure


def _fingerprints(store: ModelStore) -> dict[str, Fingerprint]:
    return {name: store.fingerprint(name) for name in store.models()}


class Repositories:
    """All of them. One that cannot be read keeps what was last seen of it, and none of the others waits for it."""

    def __init__(self, stores: Sequence[ModelStore]) -> None:
        self._all = [Repository(store) for store in stores]

    def __iter__(self) -> Iterator[Repository]:
        return iter(self._all)

    def close(self) -> None:
        """No look begins any more."""
        for each in self._all:
            each.close()

    async def look(self) -> None:
        """At all of them, however long that takes."""
        await asyncio.gather(*(each.look() for each in self._all))

    async def find(self, model: str) -> tuple[ModelStore, ...]:
        """Where it lies now. One that is late is not waited for when another has the model.

        Raises LoadFailed if only such have it, or may have it, that cannot be read.
        """
        looks = {asyncio.ensure_future(each.look()): each for each in self._all}
        _, late = await asyncio.wait(looks, timeout=LATE_S)
        while late and not any(looks[each].has(model) for each in looks.keys() - late):
            _, late = await asyncio.wait(late, return_when=asyncio.FIRST_COMPLETED)
        where = [each for each in self._all if model in (each.found or {})]
        unread = [each.failure for each in self._all if each.failure]
        if unread and all(each.failure for each in where):
            raise LoadFailed(unread[0])
        return tuple(each.store for each in where)

    def where(self, model: str) -> tuple[ModelStore, ...]:
        """Where it lay when each was last seen."""
        return tuple(each.store for each in self._all if model in (each.found or {}))

    def names(self) -> set[str]:
        """Of the models that were last seen."""
        return {name for each in self._all for name in each.found or ()}

    def unseen(self) -> list[Repository]:
        """Those that could not be read since the start."""
        return [each for each in self._all if each.found is None]
