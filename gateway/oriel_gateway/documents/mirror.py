"""Mirrors the policies of an object store into a local folder, which is then watched like any folder of policies.

A set of documents is fetched whole into a folder beside the one in force, and a link is moved to it in one step: no
reader ever sees half of a set. Documents with a mistake are mirrored like all others: the compiler of the folder names
file and reason, and keeps the old ones in force. While the store does not answer, nothing changes.

The folder lies in the gateway's state and outlives the process: a gateway that starts during an outage begins with the
last set that it saw, just as a running gateway keeps it. Such a copy is used only if the store confirmed it within
`COPY_S`, and if no other user could have written it, because keys come from these documents.
"""

import asyncio
import fcntl
import json
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from random import uniform
from time import time

from oriel_gateway.documents.source import KINDS, MAX_DOCUMENTS
from oriel_gateway.documents.stored import Listed, Moved, StoredDocuments, StoreFailed
from oriel_wire.objects.client import Location

_log = logging.getLogger(__name__)
POLL_S = 10.0
MAX_POLL_S = 120.0  # between tries while the store does not answer
JITTER = 0.2  # random extra share, so that many gateways do not poll at the same moment
COPY_S = 24 * 3600.0
CONFIRM_EVERY_S = 60.0
_LISTED = ".listed"
_CONFIRMED = ".confirmed"


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorLimits:
    """Bounds of one poll of a store.

    poll_timeout_s: seconds allowed for a whole poll.
    settle_s: seconds for which a set has to stay the same, since an upload of several documents takes a while.
    max_rounds: listings after which a set that still changes is used.
    """

    poll_timeout_s: float = 300.0
    settle_s: float = 1.0
    max_rounds: int = 20
    max_documents: int = MAX_DOCUMENTS
    max_total_bytes: int = 512 * 1024 * 1024


DEFAULTS = MirrorLimits()


@dataclass(slots=True, kw_only=True)
class StoreState:
    """State for metrics and the admin port. Single writer: the mirror.

    confirmed_at: epoch seconds when the store last confirmed the mirror's documents; 0 before the first time.
    reason: why the store does not answer, "" while it does.
    """

    url: str
    confirmed_at: float = 0.0
    reason: str = ""


class Mirror:
    """Keeps `folder` equal to the documents in the store.

    state: the gateway's folder for files that outlive it, or None.
    borrowed: True if another process of this gateway keeps the copy in `state`, from which this one only starts.
    """

    def __init__(
        self,
        location: Location,
        documents: StoredDocuments,
        state: Path | None,
        *,
        borrowed: bool = False,
        limits: MirrorLimits = DEFAULTS,
        now: Callable[[], float] = time,
    ) -> None:
        self._documents = documents
        self._limits = limits
        self._now = now
        self._poll_requested = asyncio.Event()
        self._poll_s = POLL_S
        self.state = StoreState(url=str(location))
        self._home, self._lock = _home(location, state, borrowed)
        self._kept = self._lock is not None
        name = self.state.url.rpartition("/")[2]  # the folder's name, or the bucket's if there is no folder
        self.folder = self._home / ("policies" if name.startswith(".") else name)
        self._listed: dict[str, Listed] = {}

    def close(self) -> None:
        """Release the folder. It stays for the next start, or is removed if `state` is None."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if not self._kept:
            shutil.rmtree(self._home, ignore_errors=True)

    async def close_all(self) -> None:
        """Close the connections to the store, and then the mirror."""
        try:
            await self._documents.close()
        finally:
            self.close()

    def ask(self) -> None:
        """Poll the store now (SIGHUP)."""
        self._poll_requested.set()

    async def start(self) -> None:
        """Fill `folder`. Raises StoreFailed if neither the store nor a copy has documents."""
        copied = await asyncio.to_thread(self._copy)
        try:
            await self.poll()
        except StoreFailed as error:
            if copied is None:
                raise
            if self._now() - copied > COPY_S:
                hours = (self._now() - copied) / 3600
                raise StoreFailed(f"{error}; the copy kept here is {hours:.0f} hours old, too old to trust") from error
            self.state.confirmed_at = copied
            minutes = max(0.0, self._now() - copied) / 60
            _log.warning("%s: starting with the copy that was confirmed %.0f minutes ago", error, minutes)

    async def run(self) -> None:
        """Poll about every `POLL_S`, less often while the store does not answer, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._poll_s * uniform(1.0, 1.0 + JITTER)):
                    await self._poll_requested.wait()
            except TimeoutError:
                pass
            self._poll_requested.clear()
            before = self.state.reason
            try:
                await self.poll()
                if before:
                    _log.info("the policy store %s answers again", self.state.url)
            except StoreFailed as error:
                if str(error) != before:
                    _log.error("%s; the policies in force stay", error)
            except Exception:
                # The edge of a task that must live.
                _log.exception("polling the store for policies failed")

    async def poll(self) -> None:
        """List the store once and mirror what is new. Raises StoreFailed and then leaves the folder as it was."""
        try:
            try:
                async with asyncio.timeout(self._limits.poll_timeout_s):
                    await self._poll_once()
            except TimeoutError:
                timeout_s = self._limits.poll_timeout_s
                raise StoreFailed(f"{self.state.url} did not answer within {timeout_s:g} s") from None
            except OSError as error:
                raise StoreFailed(f"{self.state.url} cannot be mirrored to this machine: {error.strerror}") from error
        except StoreFailed as error:
            self._poll_s, self.state.reason = min(self._poll_s * 2.0, MAX_POLL_S), str(error)
            raise
        self._poll_s, self.state.reason = POLL_S, ""
        await self._confirm()

    async def _poll_once(self) -> None:
        listed = dict(await self._documents.listing())
        if listed == self._listed and self.folder.exists():
            return
        fetched: tuple[dict[str, Listed], Path] | None = None
        try:
            for _ in range(self._limits.max_rounds):
                try:
                    if fetched is None or fetched[0] != listed:
                        fetched = listed, await self._fetch(listed, fetched)
                except Moved:
                    pass
                await asyncio.sleep(self._limits.settle_s)
                listed = dict(await self._documents.listing())
                if fetched is not None and fetched[0] == listed:
                    break
            if fetched is None:
                raise StoreFailed(
                    f"{self.state.url} cannot be read consistently: its documents keep changing meanwhile"
                )
            # After this many rounds a set is used although it still changes, so that a revoked key does not stay valid.
            # Before the swap: a cancellation during it must not remove the folder that is linked by then.
            whole, fetched = fetched, None
            await asyncio.to_thread(self._swap, *whole)
        finally:
            if fetched is not None:
                shutil.rmtree(fetched[1], ignore_errors=True)

    async def _fetch(self, listed: dict[str, Listed], last: tuple[dict[str, Listed], Path] | None) -> Path:
        """A new folder with all documents; unchanged ones are linked. last: an earlier try, which is removed."""
        limits = self._limits
        if len(listed) > limits.max_documents:
            raise StoreFailed(f"{self.state.url} holds more than {limits.max_documents} documents")
        if sum(each.size for each in listed.values()) > limits.max_total_bytes:
            larger = f"together larger than {limits.max_total_bytes} bytes"
            raise StoreFailed(f"the documents of {self.state.url} are {larger}")
        into = Path(tempfile.mkdtemp(prefix=".set-", dir=self._home))
        known = [(self._listed, self.folder), *([last] if last else [])]
        try:
            for name, each in listed.items():
                held = next((at for has, at in known if has.get(name) == each and (at / name).exists()), None)
                bound = KINDS[Path(name).suffix]
                if held is not None:
                    os.link(held / name, into / name)
                elif each.size > bound:
                    # Not fetched: a sparse file long enough for the reader of the folder to report it as too large.
                    with (into / name).open("xb") as file:
                        file.truncate(bound + 1)
                else:
                    await self._documents.fetch(name, each, into / name)
        except BaseException:
            shutil.rmtree(into, ignore_errors=True)
            raise
        if last is not None:
            await asyncio.to_thread(shutil.rmtree, last[1], ignore_errors=True)
        return into

    def _swap(self, listed: dict[str, Listed], into: Path) -> None:
        before = self.folder.resolve() if self.folder.is_symlink() else None
        (into / _LISTED).write_text(json.dumps({name: asdict(each) for name, each in listed.items()}))
        beside = self._home / f".link-{os.getpid()}"
        beside.unlink(missing_ok=True)
        beside.symlink_to(into.name)
        os.replace(beside, self.folder)
        self._listed = listed
        # The previous set stays: its reader opens one file after the other. Older sets are removed.
        for old in self._home.glob(".set-*"):
            if old not in (into, before):
                shutil.rmtree(old, ignore_errors=True)

    def _copy(self) -> float | None:
        """Adopt the copy of an earlier process, if there is one. Returns the epoch seconds of its confirmation."""
        try:
            kept = json.loads((self.folder / _LISTED).read_bytes())
            listed = {str(name): Listed(**each) for name, each in kept.items()}
            for name, each in listed.items():
                size = (self.folder / name).stat().st_size
                if size != min(each.size, KINDS[Path(name).suffix] + 1):
                    return None
            confirmed = (self._home / _CONFIRMED).stat().st_mtime
        except (OSError, ValueError, TypeError, AttributeError, KeyError):
            return None
        self._listed = listed
        return confirmed

    async def _confirm(self) -> None:
        now = self._now()
        if self._kept and now - self.state.confirmed_at >= CONFIRM_EVERY_S:
            await asyncio.to_thread(_touch, self._home / _CONFIRMED, now)
        self.state.confirmed_at = now


def _touch(path: Path, now: float) -> None:
    try:
        path.touch(mode=0o600)
        os.utime(path, (now, now))
    except OSError as error:
        _log.warning("the time of the last successful policy sync cannot be saved: %s", error.strerror)


def _copied(home: Path) -> Path:
    """Return a copy of a folder that another process may be changing: a mirror checks what is in it."""
    into = Path(tempfile.mkdtemp(prefix="oriel-policies-"))
    with suppress(OSError):
        shutil.copytree(home, into, symlinks=True, dirs_exist_ok=True)
    return into


def _home(location: Location, state: Path | None, borrowed: bool) -> tuple[Path, int | None]:
    """A folder that only this process uses, and the lock on it; without a lock it does not outlive the process."""
    if state is not None:
        home = state / f"policies-{sha256(str(location).encode()).hexdigest()[:16]}"
        try:
            home.mkdir(parents=True, exist_ok=True, mode=0o700)
            about = home.lstat()
            if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o022:
                _log.warning("no copy of the policies is kept for the next start: other users can write to its folder")
            elif borrowed:
                return _copied(home), None
            else:
                lock = os.open(home / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return home, lock
                except OSError:
                    os.close(lock)
                    _log.warning("no copy of the policies is kept for the next start: another gateway uses its folder")
        except OSError as error:
            _log.warning("no copy of the policies is kept for the next start: %s", error.strerror)
    return Path(tempfile.mkdtemp(prefix="oriel-policies-")), None
