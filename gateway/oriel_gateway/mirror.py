"""Policies of an object store, mirrored into a folder of this machine: what watches folders then watches them too.

A set of documents is fetched whole into a folder beside the one in force, and a link is moved to it in one step: nobody
ever reads half of a set. Documents with a mistake are mirrored like all others: what compiles the folder names file and
reason and keeps the old ones in force. While the store does not answer nothing changes.

The folder lies in the gateway's state and outlives it: a gateway that starts while the store is away begins with what
it last saw there, as one that went on running would have gone on with it. A copy counts only if the store confirmed it
within `COPY_S`, and if nobody but this user could have written it: keys come out of these documents.
"""

import asyncio
import fcntl
import json
import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from random import uniform
from time import time
from typing import BinaryIO, Protocol

from oriel_gateway.sources import KINDS, MAX_DOCUMENTS, StoreUrl

__all__ = ["Documents", "Listed", "Mirror", "Moved", "StoreFailed", "StoreState", "document_name", "to_disk"]

_log = logging.getLogger(__name__)
POLL_S = 10.0
MAX_POLL_S = 120.0  # between tries while the store does not answer
JITTER = 0.2  # more, by chance: many gateways do not ask at the same moment
POLL_TIMEOUT_S = 300.0
SETTLE_S = 1.0  # an upload of several documents is not over when the first has come
MAX_ROUNDS = 20
MAX_OBJECTS = 1000  # below the prefix, documents or not
MAX_TOTAL_BYTES = 512 * 1024 * 1024
COPY_S = 24 * 3600.0
CONFIRM_EVERY_S = 60.0
_LISTED = ".listed"
_CONFIRMED = ".confirmed"


class StoreFailed(Exception):
    """The store cannot give its documents now. The text is for the operator and holds no credential."""


class Moved(Exception):
    """A document was written anew or deleted since it was listed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """A document as the store lists it. size: bytes."""

    etag: str
    size: int


class Documents(Protocol):
    """One folder of an object store: `sources_s3.S3Documents`, `sources_object.ObjectDocuments`."""

    async def listing(self) -> Mapping[str, Listed]: ...

    async def fetch(self, name: str, listed: Listed, into: Path) -> None: ...

    async def close(self) -> None:
        """Connections end."""
        ...


@dataclass(slots=True, kw_only=True)
class StoreState:
    """For metrics and the admin port. confirmed_at: epoch seconds when the store last said that the mirror is as it is;
    0: not yet. reason: why it does not answer, "" when it does. Single writer: the mirror."""

    url: str
    confirmed_at: float = 0.0
    reason: str = ""


class Mirror:
    """See the module's head. state: the gateway's folder for what outlives it, None: nothing does."""

    def __init__(
        self, url: StoreUrl, documents: Documents, state: Path | None, *, now: Callable[[], float] = time
    ) -> None:
        self._documents = documents
        self._now = now
        self._asked = asyncio.Event()
        self._poll_s = POLL_S
        self.state = StoreState(url=str(url))
        self._home, self._lock = _home(url, state)
        self._kept = self._lock is not None
        self.folder = self._home / ("policies" if url.name.startswith(".") else url.name)
        self._listed: dict[str, Listed] = {}

    def close(self) -> None:
        """The copy stays for the next start; one that nobody could find is removed."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        if not self._kept:
            shutil.rmtree(self._home, ignore_errors=True)

    async def leave(self) -> None:
        """`close`, and the connections to the store end."""
        try:
            await self._documents.close()
        finally:
            self.close()

    def ask(self) -> None:
        """Look at the store now (SIGHUP)."""
        self._asked.set()

    async def start(self) -> None:
        """Have documents in `folder`. Raises StoreFailed if neither the store nor a copy has them."""
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
        """Look every `POLL_S` or so, less often while the store does not answer, until cancelled."""
        while True:
            try:
                async with asyncio.timeout(self._poll_s * uniform(1.0, 1.0 + JITTER)):
                    await self._asked.wait()
            except TimeoutError:
                pass
            self._asked.clear()
            before = self.state.reason
            try:
                await self.poll()
                if before:
                    _log.info("%s answers again", self.state.url)
            except StoreFailed as error:
                if str(error) != before:
                    _log.error("%s; the policies in force stay", error)
            except Exception:
                # The edge of a task that must live.
                _log.exception("looking for policies in the store failed")

    async def poll(self) -> None:
        """Ask the store once and mirror what is new. Raises StoreFailed; the folder is as it was then."""
        try:
            try:
                async with asyncio.timeout(POLL_TIMEOUT_S):
                    await self._look()
            except TimeoutError:
                raise StoreFailed(f"{self.state.url} did not answer within {POLL_TIMEOUT_S:g} s") from None
            except OSError as error:
                raise StoreFailed(f"{self.state.url} cannot be mirrored to this machine: {error.strerror}") from error
        except StoreFailed as error:
            self._poll_s, self.state.reason = min(self._poll_s * 2.0, MAX_POLL_S), str(error)
            raise
        self._poll_s, self.state.reason = POLL_S, ""
        await self._confirm()

    async def _look(self) -> None:
        listed = dict(await self._documents.listing())
        if listed == self._listed and self.folder.exists():
            return
        fetched: tuple[dict[str, Listed], Path] | None = None
        try:
            for _ in range(MAX_ROUNDS):
                try:
                    if fetched is None or fetched[0] != listed:
                        fetched = listed, await self._fetch(listed, fetched)
                except Moved:
                    pass
                await asyncio.sleep(SETTLE_S)
                listed = dict(await self._documents.listing())
                if fetched is not None and fetched[0] == listed:
                    break
            if fetched is None:
                raise StoreFailed(f"{self.state.url} does not hold still: its documents change while they are read")
            # After so many rounds a set that still moves is taken: a revoked key must not live on for that.
            whole, fetched = (
                fetched,
                None,
            )  # before: who is cancelled meanwhile must not remove what is linked to by then
            await asyncio.to_thread(self._swap, *whole)
        finally:
            if fetched is not None:
                shutil.rmtree(fetched[1], ignore_errors=True)

    async def _fetch(self, listed: dict[str, Listed], last: tuple[dict[str, Listed], Path] | None) -> Path:
        """A new folder with all of them; what has not changed is linked, not fetched. last: an earlier try, removed."""
        if len(listed) > MAX_DOCUMENTS:
            raise StoreFailed(f"{self.state.url} holds more than {MAX_DOCUMENTS} documents")
        if sum(each.size for each in listed.values()) > MAX_TOTAL_BYTES:
            raise StoreFailed(f"the documents of {self.state.url} are together larger than {MAX_TOTAL_BYTES} bytes")
        into = Path(tempfile.mkdtemp(prefix=".set-", dir=self._home))
        known = [(self._listed, self.folder), *([last] if last else [])]
        try:
            for name, each in listed.items():
                held = next((at for has, at in known if has.get(name) == each and (at / name).exists()), None)
                bound = KINDS[Path(name).suffix]
                if held is not None:
                    os.link(held / name, into / name)
                elif each.size > bound:
                    # Not fetched; as long as it takes for what reads the folder to name it as too large.
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
        said = {name: asdict(each) for name, each in listed.items()}
        (into / _LISTED).write_text(json.dumps(said))
        beside = self._home / f".link-{os.getpid()}"
        beside.unlink(missing_ok=True)
        beside.symlink_to(into.name)
        os.replace(beside, self.folder)
        self._listed = listed
        # Whoever reads the set before this one may have its files open, not its folder: it looks again.
        for old in self._home.glob(".set-*"):
            if old not in (into, before):
                shutil.rmtree(old, ignore_errors=True)

    def _copy(self) -> float | None:
        """Take up what is in the folder from before; when the store confirmed it, epoch seconds. None: nothing is."""
        try:
            said = json.loads((self.folder / _LISTED).read_bytes())
            listed = {str(name): Listed(**each) for name, each in said.items()}
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


def document_name(url: StoreUrl, path: str) -> str | None:
    """The file name of what lies at `path` below the prefix; None: it is no document. Raises StoreFailed."""
    if "/" in path or Path(path).suffix not in KINDS or path.startswith("."):
        return None
    if not path.isprintable() or len(path.encode()) > 200:
        raise StoreFailed(f"{url}: {path[:100]!r} is no name for a file")
    return path


def to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _touch(path: Path, now: float) -> None:
    try:
        path.touch(mode=0o600)
        os.utime(path, (now, now))
    except OSError as error:
        _log.warning("when the store confirmed its policies cannot be kept: %s", error.strerror)


def _home(url: StoreUrl, state: Path | None) -> tuple[Path, int | None]:
    """A folder of this process alone, and the lock that says so; without one it does not outlive the process."""
    if state is not None:
        home = state / f"policies-{sha256(str(url).encode()).hexdigest()[:16]}"
        try:
            home.mkdir(parents=True, exist_ok=True, mode=0o700)
            about = home.lstat()
            if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & 0o022:
                _log.warning("others may write the folder of this gateway's copy of the policies: none is kept")
            else:
                lock = os.open(home / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return home, lock
                except OSError:
                    os.close(lock)
                    _log.warning("another gateway keeps its copy of these policies there: this one keeps none")
        except OSError as error:
            _log.warning("no copy of the policies is kept over a restart: %s", error.strerror)
    return Path(tempfile.mkdtemp(prefix="oriel-policies-")), None
