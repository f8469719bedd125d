"""Sets a handler up in its own processes and tests it before it takes requests.

In order: worker processes import it and run its `setup`; this process imports it, in a thread, if a stage runs on the
loop; every service answers its sample, models included. Any failure, timeout or end of a process raises `SetUpFailed`
with a text for the handler's author, and leaves nothing behind. Code with its own interpreter is never imported here:
its workers report its definitions.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path

from oriel_logic.bodies.schemas import mismatch
from oriel_logic.client.upstream_errors import NO_TICKET
from oriel_logic.deploy.samples import Sample, find_sample, with_shown_sample
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
from oriel_logic.loading.folder_config import BadConfig
from oriel_logic.loading.handlers import forget, load_file, one_line, setup_problem
from oriel_logic.loading.listing import Source
from oriel_logic.loading.sources import HandlerFile
from oriel_logic.observe.stages import Ledger
from oriel_logic.server.failures import close
from oriel_logic.server.inbound import Body, Inbound
from oriel_logic.server.pipeline import Pipeline
from oriel_logic.server.releases import Deployment, Release
from oriel_logic.server.replies import Reply
from oriel_logic.server.visit import Visit
from oriel_logic.services.definition import Definition
from oriel_logic.services.serving import Services
from oriel_logic.settings import Settings
from oriel_logic.workers.launch import ForkServer
from oriel_logic.workers.pool import WorkerPool
from oriel_logic.workers.worker import PoolLimits
from oriel_wire.context import CallContext, new_request_id
from oriel_wire.observe.trace import new_trace

MAX_PROBLEM = 500
# Errors that a later attempt may not meet, although the handler has not changed.
_log = logging.getLogger(__name__)
PASSING = (ModelBusy, ModelUnavailable, ModelUnreachable, Saturated)

Report = Callable[[Deployment, Mapping[str, str]], None]
Serve = Callable[[Release, Inbound, Visit], Awaitable[Reply]]


class SetUpFailed(Exception):
    """A handler cannot serve; the text gives the reason.

    is_passing: the reason lies outside the handler, so that a retry may succeed.
    service: the service at fault, "" for the whole file.
    """

    def __init__(self, problem: str, *, service: str = "", is_passing: bool = False) -> None:
        super().__init__(problem[:MAX_PROBLEM])
        self.problem = problem[:MAX_PROBLEM]
        self.service = service
        self.is_passing = is_passing


class NoService(SetUpFailed):
    """A file has no service: it is a module that others import, or a handler that lost its `@service`."""


class Deployer:
    """Sets handlers up.

    make_pipeline: makes the pipeline for the services and workers of a deployment.
    serve: answers a request with a release, as for a caller.
    report: called with {service: reason} when a worker that started later could not set a service up.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        make_pipeline: Callable[[Services, WorkerPool], Pipeline],
        serve: Serve,
        report: Report,
    ) -> None:
        self._settings = settings
        self._make_pipeline = make_pipeline
        self._serve = serve
        self._report = report
        self._max_sample_bytes = settings.max_body_bytes

    async def set_up(self, source: Source, *, try_it: bool = True) -> Deployment:
        """Return a working deployment. Raises SetUpFailed. Cancelled: nothing is left behind.

        try_it: True if its services have to answer their samples.
        """
        if source.problem:
            raise SetUpFailed(source.problem)
        try:
            return await self._set_up(source, try_it)
        except (BadConfig, OSError) as error:
            raise SetUpFailed(str(error)) from error

    async def try_sample(self, source: Source, release: Release) -> str:
        """Let a release answer its sample, and return the sample's label, "" if there is none.

        Raises SetUpFailed, BadConfig, OSError.
        """
        sample = find_sample(source, release.definition, limit_bytes=self._max_sample_bytes)
        if sample is None:
            return ""
        await self._try(release, sample)
        return sample.label

    async def _set_up(self, source: Source, try_it: bool) -> Deployment:
        pool = await self._started(source, source.config.workers)
        try:
            try:
                async with asyncio.timeout(source.config.setup_timeout_s) as limit:
                    await ready(pool)
                    if source.python is None and any(map(is_on_loop, pool.definitions.values())):
                        await self._try_in_scratch(source, try_it)
                    definitions, services = await self._definitions(source, pool)
            except TimeoutError as error:
                if not limit.expired():
                    raise SetUpFailed(f"its setup failed: {one_line(error)}") from error
                left = f"import and setup took longer than {source.config.setup_timeout_s:g} s"
                raise SetUpFailed(f"{left}: make them quicker, or set setup_timeout_s in [tool.oriel]") from error
            deployment = Deployment([source.file], pool, self._make_pipeline(services, pool))
            pool.on_problems = partial(self._report, deployment)
            for definition in definitions.values():
                shown = await asyncio.to_thread(with_shown_sample, source, source.config.applied(definition))
                Release(shown, source.file, deployment)
            if try_it:
                for release in deployment.releases:
                    await self.try_sample(source, release)
            return deployment
        except BaseException:
            await pool.close()
            forget(source.file.module)
            raise

    async def _started(self, source: Source, workers: int, *, sets_up_all: bool = False) -> WorkerPool:
        """Start a worker pool for the file. Raises OSError. sets_up_all: see ForkServer."""
        limits = pool_limits(self._settings, workers)
        launch = partial(
            ForkServer.launch,
            [source.file],
            python=str(source.python or sys.executable),
            sets_up_all=sets_up_all,
            max_frame_bytes=limits.max_frame_bytes,
        )
        pool = WorkerPool(launch(), limits, launch=launch)
        await pool.start()
        return pool

    async def _try_in_scratch(self, source: Source, try_it: bool) -> None:
        """Load the handler in a scratch process first, so that a crash cannot take the server down.

        Raises SetUpFailed. A wrong answer to a sample is ignored here: workers cannot do everything that the loop can.
        """
        pool = await self._started(source, 1, sets_up_all=True)
        try:
            await ready(pool)
            deployment = Deployment([source.file], pool, self._make_pipeline(Services(), pool))
            for definition in pool.definitions.values() if try_it else ():
                if not is_on_loop(definition) or definition.reads_stream:  # a worker gets whole requests
                    continue
                release = Release(definition.in_workers(), source.file, deployment)
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
            await pool.close()

    async def _definitions(self, source: Source, pool: WorkerPool) -> tuple[Mapping[str, Definition], Services]:
        """Return the definitions of the file, and the instances of services that run on the loop. Raises
        SetUpFailed.
        """
        services = Services()
        if pool.definitions and source.python is not None:
            return {name: each.in_workers() for name, each in pool.definitions.items()}, services
        loaded = await asyncio.to_thread(load_file, source.file, log=False) if source.python is None else []
        if not pool.definitions and not serves_openai(source.file):
            raise NoService("it has no service: put @service on a function or a class")
        found: dict[str, Definition] = {}
        for each in loaded:
            if each.definition is None:
                raise SetUpFailed(each.problem)
            found[each.name] = each.definition
        for name, definition in found.items():
            if not is_on_loop(definition):
                continue
            problem = await asyncio.to_thread(setup_problem, services, definition)
            if problem:
                raise SetUpFailed(problem, service=name)
        return found, services

    async def _try(self, release: Release, sample: Sample) -> None:
        """Send the sample to the service. Raises SetUpFailed if the answer is not as declared."""
        now, limit_s, trace = time.monotonic(), self._settings.sample_timeout_s, new_trace(False)
        call = CallContext(
            request_id=f"self-test-{new_request_id()[:16]}",
            deadline=now + limit_s,
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
        cause: Exception | None = None
        try:
            async with asyncio.timeout(limit_s):
                reply = await self._serve(release, inbound, visit)
                if reply.pieces is not None:
                    try:
                        async for _ in reply.pieces:
                            pass
                    finally:
                        await close(reply.pieces)
                    why = ""
                else:
                    why = mismatch(release.definition.signature.output, reply.content_type, reply.body)
        except (TimeoutError, DeadlineExceeded) as error:
            why, cause = f"there was no answer within {limit_s:g} s", error
        except Exception as error:  # also what a handler raises while its answer is streamed
            if isinstance(error, LogicError) and error.message == NO_TICKET:
                _log.warning(
                    "service '%s': its self-test stopped at its first model call, because it has no gateway ticket",
                    release.name,
                )
                return
            why, cause = why_of(error, release.file.path), error
        if why:
            raise SetUpFailed(
                f"its self-test with {sample.label} failed: {why}",
                service=release.name,
                is_passing=isinstance(cause, PASSING),
            ) from cause


def pool_limits(settings: Settings, workers: int = 0) -> PoolLimits:
    """Return the limits of a pool. workers: 0 for the server's number."""
    return PoolLimits(
        workers=workers or settings.workers,
        max_waiting=settings.max_waiting,
        max_waiting_bytes=settings.max_waiting_bytes,
        max_frame_bytes=settings.max_frame_bytes,
        overrun_s=settings.overrun_s,
    )


async def ready(pool: WorkerPool) -> None:
    """Wait for a pool that gets one chance to start. Raises SetUpFailed as soon as that is impossible."""
    try:
        await pool.wait_ready(starts_once=True)
    except ServiceBroken as error:
        raise SetUpFailed(error.message) from error
    for service, problem in pool.problems.items():
        raise SetUpFailed(problem, service=service if service in pool.definitions else "")


def is_on_loop(definition: Definition) -> bool:
    """Return whether a stage of this service runs in the logic process."""
    return not all(map(definition.runs_in_worker, definition.stages()))


def serves_openai(file: HandlerFile) -> bool:
    """Return whether this imported file serves models to clients of the OpenAI API.

    Raises SetUpFailed if they cannot run.
    """
    if "oriel_logic.openai" not in sys.modules:
        return False
    from oriel_logic.openai.served import served_in

    served = served_in([file])
    for each in served:
        if each.problem():
            raise SetUpFailed(each.problem(), service=each.served_as)
    return bool(served)


def why_of(error: Exception, path: Path | None) -> str:
    """Describe an error to the handler's author, who may see what callers do not: the error of the handler's own
    code.
    """
    if isinstance(error, HandlerFailed) and error.__cause__ is not None:
        return one_line(error.__cause__, path)
    if not isinstance(error, LogicError):
        return one_line(error, path)
    return " ".join(getattr(error, "__notes__", ())) or error.message
