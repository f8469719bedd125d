"""Scans the model repositories, each separately: which models they hold, and which changes have settled."""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from oriel_inference.errors import LoadFailed
from oriel_inference.stores import Fingerprint, ModelStore

_log = logging.getLogger(__name__)

SCANS_AT_ONCE = 4
LATE_S = 2.0

# The fingerprint of a model's files in one repository; None if they are absent.
Found = Fingerprint | None


class Changes:
    """The fingerprints that were acted on, and those seen once since: a change counts when two scans in a row found the
    same.
    """

    def __init__(self) -> None:
        self._applied: dict[str, Found] = {}
        self._seen: dict[str, Found] = {}
        self._under_way: set[str] = set()

    def due(self, fingerprints: Mapping[str, Found]) -> list[tuple[str, Found]]:
        """Record a scan; return the changes to act on now. `applied` has to be called for each of them."""
        ready: list[tuple[str, Found]] = []
        for name in sorted((fingerprints.keys() | self._applied.keys()) - self._under_way):
            found = fingerprints.get(name)
            if name in self._applied and found == self._applied[name]:
                self._seen.pop(name, None)
            elif name not in self._seen or self._seen[name] != found:
                self._seen[name] = found
            else:
                del self._seen[name]
                self._under_way.add(name)
                ready.append((name, found))
        return ready

    @property
    def unsettled(self) -> bool:
        """Return whether a change has been seen only once so far."""
        return bool(self._seen)

    def applied(self, name: str, found: Found) -> None:
        """Record that a change was acted on."""
        self._under_way.discard(name)
        if found is None:
            self._applied.pop(name, None)
        else:
            self._applied[name] = found


class Repository:
    """One model repository as of its last scan. Single writer: the loop.

    others: all repositories, from whose models its own are told if names may occur twice.
    failure: why the last scan failed, "" if it succeeded.
    changes: the changes that were acted on.
    """

    def __init__(self, store: ModelStore, others: Sequence["Repository"] = ()) -> None:
        self.store = store
        self._others = others
        self._files: Mapping[str, Fingerprint] | None = None
        self.failure = ""
        self.changes = Changes()
        # Threads of its own: a repository that hangs must not take the threads that scan another one.
        self._threads = ThreadPoolExecutor(SCANS_AT_ONCE, thread_name_prefix="oriel-scan")
        self._began = self._taken = 0

    @property
    def found(self) -> Mapping[str, Fingerprint] | None:
        """Return model -> fingerprint of its files; None before the first successful scan."""
        if self._files is None or not self.store.namespace:
            return self._files
        twice = {name for each in self._others if each is not self for name in each._files or ()}
        return {
            f"{name}@{self.store.namespace}" if name in twice else name: found for name, found in self._files.items()
        }

    @property
    def up(self) -> bool:
        """Return whether the last scan succeeded."""
        return not self.failure and self.store.up

    def has(self, model: str) -> bool:
        """Return whether the last scan succeeded and found the model."""
        return not self.failure and model in (self.found or ())

    def close(self) -> None:
        """Start no further scan."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def scan(self) -> bool:
        """Scan the repository; return whether it can be read. If not, the result of the last scan is kept."""
        self._began += 1
        number = self._began
        found, failure = None, ""
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._threads, _fingerprints, self.store)
        except LoadFailed as error:
            failure = error.reason
        except Exception:
            # An unexpected error in one repository must not keep the others from being scanned.
            _log.exception("scanning the model repository %s failed", self.store.shown)
            failure = f"{self.store.shown} could not be scanned, the server's log says why"
        if number < self._taken:
            return not failure  # a scan that began later has ended
        self._taken = number
        if failure and not self.failure:
            _log.error(
                "the model repository cannot be read; loaded models continue to serve: %s: %s",
                self.store.shown,
                failure,
            )
        elif self.failure and not failure:
            _log.info("the model repository %s can be read again", self.store.shown)
        self.failure = failure
        self._files = self._files if found is None else found
        return not failure


def _fingerprints(store: ModelStore) -> dict[str, Fingerprint]:
    return {name: store.fingerprint(name) for name in store.models()}


class Repositories:
    """All repositories. One that cannot be read keeps the result of its last scan, and none of the others waits
    for it.
    """

    def __init__(self, stores: Sequence[ModelStore]) -> None:
        self._all: list[Repository] = []
        self._all += [Repository(store, self._all) for store in stores]

    def __iter__(self) -> Iterator[Repository]:
        return iter(self._all)

    def add(self, store: ModelStore) -> None:
        """Add a repository to those of the start."""
        self._all.append(Repository(store, self._all))

    def remove(self, store: ModelStore) -> Repository:
        """Remove a repository, and scan it no more."""
        (found,) = [each for each in self._all if each.store is store]
        self._all.remove(found)
        found.close()
        return found

    def up(self) -> dict[str, bool]:
        """Return whether each repository could be read at its last scan, by its shown name."""
        shown = sorted({each.store.shown for each in self._all})
        return {name: all(each.up for each in self._all if each.store.shown == name) for name in shown}

    def close(self) -> None:
        """Start no further scan."""
        for each in self._all:
            each.close()

    async def scan(self) -> None:
        """Scan all of them, however long that takes."""
        await asyncio.gather(*(each.scan() for each in self._all))

    async def find(self, model: str) -> tuple[ModelStore, ...]:
        """Return the stores that have the model now. A late repository is not waited for if another one has the model.

        Raises LoadFailed if only repositories that cannot be read have it, or may have it.
        """
        scans = {asyncio.ensure_future(each.scan()): each for each in self._all}
        _, late = await asyncio.wait(scans, timeout=LATE_S)
        while late and not any(scans[each].has(model) for each in scans.keys() - late):
            _, late = await asyncio.wait(late, return_when=asyncio.FIRST_COMPLETED)
        where = [each for each in self._all if model in (each.found or {})]
        unread = [each.failure for each in self._all if each.failure]
        if unread and all(each.failure for each in where):
            raise LoadFailed(unread[0])
        return tuple(each.store for each in where)

    def where(self, model: str) -> tuple[ModelStore, ...]:
        """Return the stores that had the model at their last scans."""
        return tuple(each.store for each in self._all if model in (each.found or {}))

    def resolve(self, model: str, store: ModelStore) -> str:
        """Return the name of a model that a model of `store` means."""
        own = f"{model}@{store.namespace}"
        return own if own in self.names() else model

    def names(self) -> set[str]:
        """Return the models of the last scans."""
        return {name for each in self._all for name in each.found or ()}

    def unseen(self) -> list[Repository]:
        """Return the repositories that could not be read since the start."""
        return [each for each in self._all if each.found is None]
