"""Sets a handler up in processes of its own and tries it, before anybody depends on it.

In order: worker processes import it and run its `setup`; this process imports it where a stage runs on the loop, in a
thread, so that nobody's request waits for it; every service answers its sample, models included. Whatever goes wrong,
takes too long or ends the process on the way is a `SetUpFailed` with a sentence for the handler's author, and leaves
nothing behind. Code with an interpreter of its own is never imported here: what there is to know of it, its workers
say.
"""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from oriel_logic.declared import breach
from oriel_logic.definition import Definition
from oriel_logic.envelope import Visit, end
from oriel_logic.errors import (
    DeadlineExceeded,
    HandlerFailed,
    HandlerTimedOut,
    LogicError,
    ModelBusy,
    ModelUnavailable,
    ModelUnreachable,
    Saturated,
    ServiceBroken,
    WorkerDied,
)
from oriel_logic.folder_config import BadConfig
from oriel_logic.inbound import Body, Inbound
from oriel_logic.listing import Source
from oriel_logic.loading import forget, load_file, one_line
from oriel_logic.pipeline import Pipeline
from oriel_logic.releases import Deployment, Release
from oriel_logic.replies import Reply
from oriel_logic.samples import Sample, find_sample, with_shown_sample
from oriel_logic.sources import HandlerFile
from oriel_logic.stages import Ledger
from oriel_logic.workers.launch import ForkServer
from oriel_logic.workers.pool import PoolLimits, WorkerPool
from oriel_logic.workers.references import Services
from oriel_wire.context import CallContext, new_request_id
from oriel_wire.trace import new_trace

__all__ = ["Deployer", "NoService", "SetUpFailed"]

LOOK_S = 0.1
MAX_PROBLEM = 500
# It may be well by the next try, without anybody having changed the handler.
PASSING = (ModelBusy, ModelUnavailable, ModelUnreachable, Saturated)

Report = Callable[[Deployment, Mapping[str, str]], None]
Serve = Callable[[Release, Inbound, Visit], Awaitable[Reply]]


class SetUpFailed(Exception):
    """A handler cannot serve; the text says why. is_passing: the reason lies outside of it, trying again can help.

    service: which of its services, "" for the file as a whole.
    """

    def __init__(self, problem: str, *, service: str = "", is_passing: bool = False) -> None:
        super().__init__(problem[:MAX_PROBLEM])
        self.problem = problem[:MAX_PROBLEM]
        self.service = service
        self.is_passing = is_passing


class NoService(SetUpFailed):
    """There is nothing in it to serve: a neighbour that others import, or a handler that lost its `@service`."""


class Deployer:
    """limits: makes those of a pool with so many workers. make_pipeline: for the services and workers of a deployment.

    serve: answers a request with a release, as for a caller. report: told what a worker that came later could not set
    up: {service: why}.
    """

    def __init__(
        self,
        *,
        limits: Callable[[int], PoolLimits],
        make_pipeline: Callable[[Services, WorkerPool], Pipeline],
        serve: Serve,
        report: Report,
        sample_timeout_s: float,
        max_sample_bytes: int,
    ) -> None:
        self._limits = limits
        self._make_pipeline = make_pipeline
        self._serve = serve
        self._report = report
        self._sample_timeout_s = sample_timeout_s
        self._max_sample_bytes = max_sample_bytes

    async def set_up(self, source: Source, *, try_it: bool = True) -> Deployment:
        """A deployment that works. Raises SetUpFailed. Cancelled: nothing is left behind.

        try_it: whether its services have to answer their samples.
        """
        if source.problem:
            raise SetUpFailed(source.problem)
        try:
            return await self._set_up(source, try_it)
        except (BadConfig, OSError) as error:
            raise SetUpFailed(str(error)) from error

    async def try_sample(self, source: Source, release: Release) -> str:
        """Which sample the release has answered, "" if it has none. Raises SetUpFailed, BadConfig, OSError."""
        sample = find_sample(source, release.definition, limit_bytes=self._max_sample_bytes)
        if sample is None:
            return ""
        await self._try(release, sample)
        return sample.label

    async def _set_up(self, source: Source, try_it: bool) -> Deployment:
        trial = Trial(source, self._limits(source.config.workers), self._report)
        await trial.start()
        try:
            try:
                async with asyncio.timeout(source.config.setup_timeout_s) as limit:
                    await trial.until_ready()
                    if source.python is None and any(map(is_on_loop, trial.pool.descriptions.values())):
                        await self._rehearse(source, try_it)
                    definitions, services = await self._definitions(source, trial.pool)
            except TimeoutError as error:
                if not limit.expired():
                    raise SetUpFailed(f"its setup failed: {one_line(error)}") from error
                left = f"import and setup took longer than {source.config.setup_timeout_s:g} s"
                raise SetUpFailed(f"{left}: make them quicker, or set setup_timeout_s in [tool.oriel]") from error
            deployment = Deployment([source.file], trial.pool, self._make_pipeline(services, trial.pool))
            trial.deployment = deployment
            for definition in definitions.values():
                shown = await asyncio.to_thread(with_shown_sample, source, source.config.applied(definition))
                Release(shown, source.file, deployment)
            if try_it:
                for release in deployment.releases:
                    await self.try_sample(source, release)
            return deployment
        except BaseException:
            await trial.pool.close()
            forget(source.file.module)
            raise

    async def _rehearse(self, source: Source, try_it: bool) -> None:
        """Do in a process of its own what is done in this one next: it may take its process down with it.

        Raises SetUpFailed. What a sample is answered says nothing yet: workers cannot do all that the loop can.
        """
        rehearsal = Trial(source, self._limits(1), self._report, sets_up_all=True)
        await rehearsal.start()
        try:
            await rehearsal.until_ready()
            pipeline = self._make_pipeline(Services(), rehearsal.pool)
            deployment = Deployment([source.file], rehearsal.pool, pipeline)
            for described in rehearsal.pool.descriptions.values() if try_it else ():
                if not is_on_loop(described):
                    continue
                release = Release(Definition.from_description(described), source.file, deployment)
                sample = find_sample(source, release.definition, limit_bytes=self._max_sample_bytes)
                if sample is None:
                    continue
                try:
                    await self._try(release, sample)
                except SetUpFailed as failed:
                    if isinstance(failed.__cause__, TimeoutError | DeadlineExceeded | HandlerTimedOut):
                        raise
                    if isinstance(failed.__cause__, WorkerDied):
                        why = f"its self-test with {sample.label} failed: it ended its process: the log says more"
                        raise SetUpFailed(why, service=release.name) from failed
        finally:
            await rehearsal.pool.close()

    async def _definitions(self, source: Source, pool: WorkerPool) -> tuple[Mapping[str, Definition], Services]:
        """What the file serves, and the instances of what runs on the loop. Raises SetUpFailed."""
        described = {name: Definition.from_description(each) for name, each in pool.descriptions.items()}
        services = Services()
        if described and source.python is not None:
            return described, services
        loaded = await asyncio.to_thread(load_file, source.file, log=False) if source.python is None else []
        if not described and not serves_openai(source.file):
            raise NoService("it has no service: put @service on a function or a class")
        found: dict[str, Definition] = {}
        for each in loaded:
            if each.definition is None:
                raise SetUpFailed(each.problem)
            found[each.name] = each.definition
        for name, definition in found.items():
            if all(map(definition.runs_in_worker, definition.stages())):
                continue
            failure = await asyncio.to_thread(failure_of, services, definition)
            if failure is not None:
                raise SetUpFailed(f"its setup failed: {one_line(failure, source.file.path)}", service=name) from failure
        return found, services

    async def _try(self, release: Release, sample: Sample) -> None:
        """Raises SetUpFailed if the service does not answer the sample."""
        now = time.monotonic()
        trace = new_trace(False)
        call = CallContext(
            request_id=f"self-test-{new_request_id()[:16]}",
            deadline=now + self._sample_timeout_s,
            tier="",
            band=0,
            tenant="",
            models=(),
            trace=trace,
        )
        visit = Visit(call=call, ledger=Ledger(trace), started_s=now)
        inbound = Inbound(
            method="POST",
            path=f"/v1/services/{release.name}",
            headers={"content-type": sample.content_type},
            size_bytes=len(sample.body),
            body=Body(sample.body),
        )
        try:
            async with asyncio.timeout(self._sample_timeout_s):
                reply = await self._serve(release, inbound, visit)
                await consumed(reply)
        except TimeoutError as error:
            why = f"it gave no answer within {self._sample_timeout_s:g} s"
            raise SetUpFailed(f"its self-test with {sample.label} failed: {why}", service=release.name) from error
        except LogicError as error:
            raise SetUpFailed(
                f"its self-test with {sample.label} failed: {why_of(error, release.file.path)}",
                service=release.name,
                is_passing=isinstance(error, PASSING),
            ) from error
        except Exception as error:  # what a handler raises while its answer is streamed
            why = one_line(error, release.file.path)
            raise SetUpFailed(f"its self-test with {sample.label} failed: {why}", service=release.name) from error
        why = breach(release.definition, reply.content_type, reply.body) if reply.pieces is None else ""
        if why:
            raise SetUpFailed(f"its self-test with {sample.label} failed: {why}", service=release.name)


def failure_of(services: Services, definition: Definition) -> BaseException | None:
    """What the setup of a service raised: user code, of which nothing may get out of its thread."""
    try:
        services.set_up(definition)
    except BaseException as error:
        return error
    return None


def is_on_loop(described: Mapping[str, Any]) -> bool:
    """Whether a stage of this service runs in the logic process."""
    return any(each["where"] == "loop" for each in described["stages"].values())


def serves_openai(file: HandlerFile) -> bool:
    """Whether this file, imported before, has something for clients of the OpenAI API. Raises SetUpFailed if it cannot
    run."""
    if "oriel_logic.openai" not in sys.modules:
        return False
    from oriel_logic.openai.served import served_in

    served = served_in([file])
    for each in served:
        if each.problem():
            raise SetUpFailed(each.problem(), service=each.served_as)
    return bool(served)


async def consumed(reply: Reply) -> None:
    if reply.pieces is None:
        return
    try:
        async for _ in reply.pieces:
            pass
    finally:
        await end(reply.pieces)


def why_of(error: LogicError, path: Path | None) -> str:
    """For the author, who may see what callers do not: what the handler's own code raised."""
    if isinstance(error, HandlerFailed) and error.__cause__ is not None:
        return one_line(error.__cause__, path)
    return " ".join(getattr(error, "__notes__", ())) or error.message


class Trial:
    """A pool that is given one chance to come up. sets_up_all: see ForkServer."""

    def __init__(self, source: Source, limits: PoolLimits, report: Report, *, sets_up_all: bool = False) -> None:
        self._file: HandlerFile = source.file
        self._python = str(source.python) if source.python is not None else sys.executable
        self._sets_up_all = sets_up_all
        self._limits = limits
        self._report = report
        self._problems: dict[str, str] = {}
        self._is_lost = False
        self._was_ready = False
        self.pool: WorkerPool
        self.deployment: Deployment | None = None

    async def start(self) -> None:
        """Raises OSError. Cancelled: nothing is left behind."""
        launching = asyncio.get_running_loop().run_in_executor(None, self._launch)
        try:
            server = await asyncio.shield(launching)
        except asyncio.CancelledError:
            with suppress(OSError):
                await asyncio.to_thread((await launching).close)
            raise
        self.pool = WorkerPool(server, self._limits, launch=self._relaunch, on_problems=self._told)
        await self.pool.start()

    async def until_ready(self) -> None:
        """Raises SetUpFailed as soon as it is clear that it will not be."""
        ready = asyncio.create_task(self.pool.wait_ready(), name="worker pool of a new release")
        try:
            while not ready.done():
                await asyncio.wait([ready], timeout=LOOK_S)
                if self._problems:
                    service, problem = next(iter(self._problems.items()))
                    raise SetUpFailed(problem, service=service if service in self.pool.descriptions else "")
                if self.pool.problem:
                    raise SetUpFailed(self.pool.problem)
                if self._is_lost or self.pool.stillborn:
                    raise SetUpFailed("its process ended while it was imported or set up: the log has its last words")
            ready.result()
        except ServiceBroken as error:
            raise SetUpFailed(error.message) from error
        finally:
            ready.cancel()
            with suppress(asyncio.CancelledError, ServiceBroken):
                await ready
        self._was_ready = True

    def _told(self, problems: dict[str, str]) -> None:
        self._problems.update(problems)
        if self.deployment is not None:
            self._report(self.deployment, problems)

    def _launch(self) -> ForkServer:
        return ForkServer.launch(
            [self._file],
            python=self._python,
            sets_up_all=self._sets_up_all,
            max_frame_bytes=self._limits.max_frame_bytes,
        )

    def _relaunch(self) -> ForkServer:
        """The pool lost its fork server."""
        if not self._was_ready:
            self._is_lost = True
            raise OSError("its process ended before it was ready")
        return self._launch()
