"""Hot update: sets up changed services, tests them, and lets them take over.

Every `poll_s` the folders are listed, in a thread, and `plan` decides what to do with each handler:

    changed   it is set up in its own processes and tested (`deploying`), then published: new requests go to it, and
              the release it replaces finishes its requests and is closed
    failed    the current release goes on serving; the reason is in `GET /v1/services`, in the log and counted. It is
              tried again when it changes, or after a while if the reason lies elsewhere (a model that is missing yet)
    removed   the release takes no new requests, finishes those it has and is closed

A folder that cannot be read changes nothing. `MAX_AT_ONCE` handlers are set up at the same time; a handler that changes
again meanwhile is started over, so that one that hangs does not delay its own fix.

A file that has just changed may be incomplete, so it is left alone until two listings in a row show it the same: an
upload that is still growing, or an editor that removes a file before it writes it anew, has no effect. A state that was
handled is not handled again, whatever the result: a broken upload is tried once, and again when it changes.
"""

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping, Set
from dataclasses import replace
from functools import partial
from pathlib import Path

from oriel_logic.deploy.deploying import Deployer, NoService, SetUpFailed
from oriel_logic.loading.handlers import forget
from oriel_logic.loading.listing import Listing, Source, read_listing
from oriel_logic.loading.sources import HandlerFile
from oriel_logic.server.registry import Registry
from oriel_logic.server.releases import Deployment, Release
from oriel_logic.services.context import Workers
from oriel_logic.settings import Settings

_log = logging.getLogger(__name__)
MAX_AT_ONCE = 2
RETRY_MIN_S = 2.0
RETRY_MAX_S = 60.0


Stamps = Mapping[str, Hashable]


def plan(done: Stamps, before: Stamps, now: Stamps, *, busy: Set[str] = frozenset()) -> tuple[list[str], list[str]]:
    """Compare listings, and return the handlers to set up and those to remove, by key, sorted.

    done: key -> the stamp that was handled last.
    before: the listing before `now`.
    busy: keys that are still being handled; they are left for a later poll.
    """
    still = [key for key in now if key in before and before[key] == now[key] and key not in busy]
    changed = sorted(key for key in still if key not in done or done[key] != now[key])
    return changed, sorted(key for key in done if key not in now and key not in before and key not in busy)


class Updates:
    """Keeps the deployments in line with the services folders. Single writer: the loop.

    settings: the folders, how often they are listed, and how long a release that was replaced may drain.
    count: called with the result of each update.
    changed: called when `files`, the newest of each place that could be set up, have changed.
    closed: called with the pool of a deployment that was closed.
    seen: called with a handler whose files were found changed, before it is set up.
    """

    def __init__(
        self,
        registry: Registry,
        deployer: Deployer,
        settings: Settings,
        *,
        count: Callable[[str], None],
        changed: Callable[[], None],
        closed: Callable[[Workers], None],
    ) -> None:
        self._registry = registry
        self._deployer = deployer
        self._read = partial(read_listing, settings.services)
        self._count = count
        self._changed = changed
        self._closed = closed
        self._poll_s = settings.poll_s
        self._release_drain_s = settings.release_drain_s
        self.retry_min_s = RETRY_MIN_S  # before what failed for a passing reason is tried again; it doubles
        self._done: dict[str, Hashable] = {}
        self._weighed: dict[str, Hashable] = {}
        self._before = Listing()
        self._busy: dict[str, asyncio.Task[None]] = {}
        self._first: set[str] = set()
        self._retries: dict[str, tuple[float, float]] = {}  # origin -> (not before, seconds until then)
        self._turns = itertools.count(2)
        self._slots = asyncio.Semaphore(MAX_AT_ONCE)
        self._tasks: set[asyncio.Task[None]] = set()
        self._was_unreadable = False
        self.seen: Callable[[HandlerFile], None] = lambda file: None
        self.deployments: list[Deployment] = []
        self.files: dict[str, HandlerFile] = {}  # origin -> file

    @property
    def has_begun(self) -> bool:
        """Return whether every handler that existed at start has been set up or has failed."""
        return not self._first

    def begin(self, listing: Listing, together: Deployment) -> None:
        """Take over the deployment of the start, and set up the handlers that need their own processes, without a
        sample.

        While nothing serves yet, a missing model must not keep everything from being served.
        """
        self.deployments.append(together)
        self.files = {file.origin: file for file in together.files}
        known = set(self.files)
        self._before = listing
        self._weigh(listing)
        for origin, source in listing.sources.items():
            self._done[origin] = source.stamp
            if origin not in known:
                self._first.add(origin)
                self._start(origin, source, try_it=False)

    def states(self) -> dict[str, int]:
        """Return the number of releases in each state."""
        serving = len(self._registry.releases())
        return {
            "serving": serving,
            "draining": sum(len(each.releases) for each in self.deployments) - serving,
            "setting_up": len(self._busy),
            "failed": self._registry.failed_files,
        }

    async def run(self) -> None:
        """Poll until cancelled."""
        while True:
            await asyncio.sleep(self._poll_s)
            await self.poll()

    async def poll(self) -> None:
        """Poll once: list the folders and begin what is to be done."""
        try:
            listing = await asyncio.to_thread(self._read)
        except OSError as error:
            if not self._was_unreadable:
                _log.error("services: a folder cannot be read (%s); the present services stay in use", error.strerror)
            self._was_unreadable = True
            return
        self._was_unreadable = False
        for origin in [each for each, (when, _) in self._retries.items() if when <= time.monotonic()]:
            if origin not in self._busy:
                self._done.pop(origin, None)
        for entry in listing.unread.keys() - self._before.unread.keys():
            _log.error("services: %s cannot be read (%s)", Path(entry).name, listing.unread[entry])
        unread = {origin for origin in self._done if any(is_within(origin, entry) for entry in listing.unread)}
        before, now = self._before.stamps(), listing.stamps()
        for origin, stamp in now.items():
            if stamp not in (before.get(origin), self._done.get(origin)):
                if self._drop(origin):
                    self._done[origin] = None  # so that the next state counts as new
                self.seen(listing.sources[origin].file)
        changed, removed = plan(self._done, before, now, busy=unread)
        self._before = listing
        self._weigh(listing)
        self._act(changed, removed)

    async def settled(self) -> None:
        """Wait until nothing is under way, drains included."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def close(self) -> None:
        """Cancel all set-ups and end all processes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(each.pool.close() for each in self.deployments))
        self.deployments.clear()

    # Internals ------------------------------------------------------------------------------------------------------

    def _act(self, changed: list[str], removed: list[str]) -> None:
        for origin in removed:
            self._drop(origin)
            self._first.discard(origin)
            del self._done[origin]
            self._retries.pop(origin, None)
            gone = self._registry.withdraw(origin)
            if gone:
                _log.info("services: %s was removed and takes no more requests", gone[0].file.label)
                self._count("removed")
            self._retire(gone)
            self.files.pop(origin, None)
        if removed:
            self._changed()
        for origin in changed:
            source = self._before.sources[origin]
            self._done[origin] = source.stamp
            self._start(origin, source)

    def _weigh(self, listing: Listing) -> None:
        unknown = {source.file.name for source in listing.sources.values() if source.problem}
        unknown |= {Path(entry).name for entry in listing.unread}
        stamps = {name: tuple(sorted(weights.items())) for name, weights in listing.weights.items()}
        for name in {*stamps, *self._weighed} - unknown:
            if self._weighed.get(name) != stamps.get(name):
                self._registry.weigh(name, listing.weights.get(name, {}))
        self._weighed = {**{name: self._weighed[name] for name in unknown & set(self._weighed)}, **stamps}

    def _start(self, origin: str, source: Source, *, try_it: bool = True) -> None:
        self._drop(origin)
        self._registry.expect(source.file, next(iter(self._served_from(origin)), ""))
        self._busy[origin] = self._spawn(self._update(origin, source, try_it))

    def _drop(self, origin: str) -> bool:
        """Cancel the set-up of the handler at `origin`; return whether one was under way."""
        task = self._busy.pop(origin, None)
        if task is None or not task.cancel():
            return False
        self._count("superseded")
        return True

    def _served_from(self, origin: str) -> list[str]:
        return [each.name for each in self._registry.releases() if each.file.origin == origin]

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _update(self, origin: str, source: Source, try_it: bool) -> None:
        try:
            async with self._slots:
                module = f"{source.file.module}@{next(self._turns)}"
                deployment = await self._deployer.set_up(
                    replace(source, file=replace(source.file, module=module)), try_it=try_it
                )
            await self._publish(origin, source, deployment)
        except SetUpFailed as failure:
            self._fail(origin, source, failure)
        except Exception:  # our own fault must end neither the polling nor the serving release
            _log.exception("services: %s cannot be set up", source.file.label)
            self._fail(origin, source, SetUpFailed("the server failed to set it up: its log says why"))
        finally:
            if self._busy.get(origin) is asyncio.current_task():
                del self._busy[origin]
                self._first.discard(origin)

    async def _publish(self, origin: str, source: Source, deployment: Deployment) -> None:
        """Let a deployment take requests. Raises SetUpFailed if a name is taken. The deployment is closed unless it
        serves.
        """
        try:
            if await self._has_changed(origin, source):
                self._count("superseded")  # it may be a mixture of two states; the next one is planned already
                await deployment.pool.close()
                forget(deployment.files[0].module)
                return
            for release in deployment.releases:
                holder = self._registry.holder(release.name, release.version)
                if holder is not None and holder.file.origin != origin:
                    problem = f"the name '{release.name}' is taken by {holder.file.label}"
                    raise SetUpFailed(problem, service=release.name)
        except BaseException:
            await deployment.pool.close()
            raise
        self._retries.pop(origin, None)
        gone = self._registry.publish(origin, deployment.releases)
        before, self.files[origin] = self.files.get(origin), deployment.files[0]
        self._changed()
        if before is not None and not gone:  # otherwise `_drain` does it after the last request
            forget(before.module)
        if deployment.releases:
            self.deployments.append(deployment)
        else:  # its OpenAI models run in the shared workers
            await deployment.pool.close()
        for release in deployment.releases:
            _log.info(
                "services: '%s' version %s, release %d, takes requests", release.name, release.version, release.number
            )
        self._count("published")
        self._retire(gone)

    async def _has_changed(self, origin: str, source: Source) -> bool:
        try:
            listing = await asyncio.to_thread(self._read)
        except OSError:
            return False
        now = listing.sources.get(origin)
        return now is None or now.stamp != source.stamp

    def _fail(self, origin: str, source: Source, failure: SetUpFailed) -> None:
        serving = self._served_from(origin)
        if isinstance(failure, NoService) and source.file.is_plain and not serving:
            self._registry.withdraw(origin)  # clear its earlier failure
            return
        name = failure.service or (serving[0] if serving else source.file.name)
        self._registry.fail(source.file, name, failure.problem)
        self._count("failed")
        if failure.is_passing:
            self._retry_later(origin)
        else:
            self._retries.pop(origin, None)

    def _retry_later(self, origin: str) -> None:
        _, delay_s = self._retries.get(origin, (0.0, self.retry_min_s / 2))
        delay_s = min(RETRY_MAX_S, 2 * delay_s)
        self._retries[origin] = (time.monotonic() + delay_s, delay_s)

    def _retire(self, gone: Iterable[Release]) -> None:
        releases = list(gone)
        if releases:
            self._spawn(self._drain(releases))

    async def _drain(self, gone: list[Release]) -> None:
        try:
            async with asyncio.timeout(self._release_drain_s):
                for release in gone:
                    await release.drained.wait()
        except TimeoutError:
            left = sum(release.in_flight for release in gone)
            _log.warning("services: %d request(s) of a replaced release did not end in time", left)
        for module in {release.file.module for release in gone}:
            forget(module)
        for deployment in {id(release.deployment): release.deployment for release in gone}.values():
            if all(release.is_leaving for release in deployment.releases) and deployment in self.deployments:
                await deployment.pool.close()
                self.deployments.remove(deployment)
                self._closed(deployment.pool)


def is_within(origin: str, entry: str) -> bool:
    return origin == entry or origin.startswith(f"{entry}/")
