"""Judges the canaries of the routes, and remembers which were rolled back, until their route changes.

The rule is `oriel_policies.quality.canary`. A side that was rolled back gets no more calls: the routes in force have
the other side alone. That is kept in a file for each, so that a restart changes nothing. Each gateway process judges
its own calls; those with the same documents and the same state folder keep what they find in one folder.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, is_dataclass, replace
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from threading import Lock
from time import time
from typing import Any, Final

import msgspec

from oriel_gateway.observe.record import Judged
from oriel_gateway.routing.targets import Target
from oriel_policies.documents import Route
from oriel_policies.quality.canary import CanaryWatch, Verdict

_log = logging.getLogger(__name__)

MAX_KEPT: Final = 1000  # files that are read
FORM: Final = 1  # of these files; a version that writes other ones takes the next number


class RolledBack(msgspec.Struct, frozen=True, kw_only=True):
    """A side of a split that gets no calls any more. reason: see `Verdict`; at: epoch seconds."""

    route: str
    side: str
    reason: str
    text: str
    at: float
    form: int = FORM


def folder_name(policies: object) -> str:
    """Return the name of the folder for the gateways with these documents: a folder, or a location in a store."""
    where = str(policies.absolute() if isinstance(policies, Path) else policies)
    return f"canaries-{blake2b(where.encode(), digest_size=8).hexdigest()}"


class Canaries:
    """The canaries of a gateway. Single writer: the loop.

    rolled_back: the canaries that were rolled back, by the digest of the route. changed: called, a turn of the loop
    later, when a side was rolled back. share: called with the digest and the record of a canary that was rolled back
    here, for the other workers of this gateway; with b"" for the record when the route has changed.
    """

    def __init__(self) -> None:
        self.rolled_back: dict[str, RolledBack] = {}
        self.changed: Callable[[], None] = lambda: None
        self.share: Callable[[str, bytes], None] = lambda digest, record: None
        self._watches: dict[Route, CanaryWatch] = {}
        self._digests: dict[Route, str] = {}
        self._folder: Path | None = None
        self._writing = Lock()

    def open(self, folder: Path) -> None:
        """Read what was rolled back before; blocking. A file that cannot be read is logged."""
        self._folder = folder
        for path in islice(folder.glob("*.json"), MAX_KEPT):
            try:
                found = msgspec.json.decode(path.read_bytes(), type=RolledBack)
                if found.form > FORM:
                    raise msgspec.ValidationError(f"it is of form {found.form}, of a later version of Oriel")
                self.rolled_back[path.stem] = found
            except (OSError, msgspec.DecodeError, UnicodeError) as error:
                _log.warning("%s cannot be read, a canary that was rolled back gets calls again: %s", path, error)

    def adopt(self, routes: Iterable[Route], *, whole: bool = True) -> list[Route]:
        """Take the routes of new documents; return those in force: of a split whose canary was rolled back, without it.

        A route that has not changed keeps its counts, and its canary stays rolled back; one that has changed begins
        anew. whole: False if routes may be missing from these documents by mistake.
        """
        known = {self._digests[route]: watch for route, watch in self._watches.items()}
        self._watches, self._digests, in_force = {}, {}, []
        for route in routes:
            rule = route.rollback
            if rule is not None:
                digest = _digest(route)
                self._digests[route] = digest
                if digest in self.rolled_back:
                    in_force.append(_without(route, rule.canary))
                    continue
                self._watches[route] = known.get(digest) or CanaryWatch(rule)
            in_force.append(route)
        gone: set[str] = self.rolled_back.keys() - self._digests.values() if whole else set()
        for digest in gone:
            del self.rolled_back[digest]
            self.share(digest, b"")
            self._save(digest)
        return in_force

    def shown(self) -> Sequence[RolledBack]:
        """Return what is rolled back now, of the routes in force, the latest first."""
        found = [self.rolled_back[each] for each in self._digests.values() if each in self.rolled_back]
        return sorted(found, key=lambda each: -each.at)

    def finished(self, target: Target, judged: Judged | None) -> None:
        """Count a call of a split that is over. target: the target of the call. judged: see `Record`."""
        plan = target.plan
        watch = self._watches.get(plan)
        result = "met" if judged is None else judged.result
        if watch is None or not target.executes or result == "excused":
            return
        verdict = watch.finished(canary=target.side == watch.rule.canary, result=result)
        if verdict is not None:
            self._roll_back(plan, verdict)

    def compared(self, plan: Route, rows: float) -> None:
        """Count an answer of a canary that was compared with one of the other side. rows: the number of rows with the
        same class.
        """
        watch = self._watches.get(plan)
        if watch is not None and (verdict := watch.compared(rows)) is not None:
            self._roll_back(plan, verdict)

    def _roll_back(self, plan: Route, verdict: Verdict) -> None:
        side = self._watches.pop(plan).rule.canary
        found = RolledBack(route=plan.name, side=side, reason=verdict.reason, text=verdict.text, at=time())
        digest = self._digests[plan]
        self.rolled_back[digest] = found
        _log.error(
            "route %s: canary %s is rolled back (%s): %s. It gets no calls until the route changes in the documents",
            plan.name,
            side,
            verdict.reason,
            verdict.text,
        )
        asyncio.get_running_loop().call_soon(lambda: self.changed())
        self.share(digest, msgspec.json.encode(found))
        self._save(digest)

    def take_over(self, digest: str, record: bytes) -> None:
        """Take over a canary that another worker of this gateway has rolled back."""
        if digest not in self.rolled_back:
            self.rolled_back[digest] = msgspec.json.decode(record, type=RolledBack)
            self.changed()

    def _save(self, digest: str) -> None:
        if self._folder is not None:
            loop = asyncio.get_running_loop()
            work: asyncio.Future[Any] = loop.run_in_executor(None, self._write, self._folder, digest)
            work.add_done_callback(_written)

    def _write(self, folder: Path, digest: str) -> None:
        """Write or remove the file of a canary by what is known of it now, in a thread."""
        with self._writing:
            path, found = folder / f"{digest}.json", self.rolled_back.get(digest)
            if found is None:
                path.unlink(missing_ok=True)
                return
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            beside = folder / f".{digest}.{os.getpid()}"
            beside.write_bytes(msgspec.json.encode(found))
            os.replace(beside, path)


def _without(route: Route, canary: str) -> Route:
    """Return the route with the other side of its split alone."""
    (other,) = [each for each in route.split if each.name != canary]
    return replace(route, pool=other.pool, split=(replace(other, until=1.0),), rollback=None)


def _digest(route: Route) -> str:
    """Return the name of a route's file. It stays the same if a later version of Oriel gives routes more fields."""
    return blake2b(_text(route).encode(), digest_size=16).hexdigest()


def _text(value: Any) -> str:
    """Return a text of a value; of a dataclass without the fields that have their default."""
    if isinstance(value, tuple):
        return f"({','.join(map(_text, value))})"
    if not is_dataclass(value):
        return repr(value)
    given = [
        (each.name, getattr(value, each.name)) for each in fields(value) if getattr(value, each.name) != each.default
    ]
    return f"({','.join(f'{name}={_text(found)}' for name, found in given)})"


def _written(work: "asyncio.Future[Any]") -> None:
    if not work.cancelled() and (error := work.exception()) is not None:
        _log.warning("a canary that was rolled back is not remembered over a restart: %s", error)
