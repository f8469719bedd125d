"""The gateway's composition root."""

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from uuid import uuid4

from oriel_gateway.admin.app import admin_app
from oriel_gateway.admin.console.live import STREAM, Live, Source
from oriel_gateway.admin.guard import admin_token
from oriel_gateway.admin.reload import Reloader
from oriel_gateway.core import INCOMPLETE_S, Gateway
from oriel_gateway.documents.compiler import BadFolder, FolderCompiler
from oriel_gateway.documents.mirror import Mirror
from oriel_gateway.documents.source import FolderSource
from oriel_gateway.documents.stored import LIMITS, StoredDocuments, StoreFailed
from oriel_gateway.identity.tickets import Tickets
from oriel_gateway.ingress.http import public_limits, serve_public
from oriel_gateway.limits import EmbeddedLimiter, Limiter, SharedLimiter
from oriel_gateway.limits.quota_file import QuotaFile
from oriel_gateway.limits.worker_link import LINK_BUDGET_S, WorkerLink
from oriel_gateway.observe.access_log import AccessLog
from oriel_gateway.observe.budget_file import NAME, BudgetFile
from oriel_gateway.observe.shared_use import SharedUse
from oriel_gateway.observe.usage import UNIT
from oriel_gateway.settings import Settings
from oriel_gateway.shared.canaries import folder_name
from oriel_policies.documents import Pool, Snapshot
from oriel_policies.errors import BadDocument
from oriel_wire.engine.listener import HttpServer
from oriel_wire.engine.tls import Certificates
from oriel_wire.errors import StartFailed
from oriel_wire.objects.client import Location
from oriel_wire.objects.errors import ClientUnusable
from oriel_wire.objects.opening import open_client
from oriel_wire.observe.recall import Recaller
from oriel_wire.observe.sampling import EVERY
from oriel_wire.observe.spans import open_sink
from oriel_wire.process.control import ControlLimits, serve_control
from oriel_wire.process.worker import Worker, listening
from oriel_wire.usage.files import lines_since, minute_of
from oriel_wire.usage.ledger import UsageLedger, open_ledger
from oriel_wire.usage.lines import UsageLine

if TYPE_CHECKING:
    from oriel_gateway.admin.external_scaler import ExternalScaler

_log = logging.getLogger(__name__)
DRAIN_S = 25.0
BUDGET_S = 1.0  # seconds until calls that have ended are charged to budgets, if they do not fill a batch earlier
INTERNAL_DRAIN_S = 1.0
REFUSE_S = 5.0  # this long before the end of the drain, calls that still wait are refused
# The garbage collector's young generation is collected rarely, and the older ones after few collections of it: each
# collection traverses all waiting calls, and a call that has ended leaves no cycle that only the collector could free.
COLLECTOR = (20_000, 5, 20)


def compiler_of(settings: Settings, folder: Path) -> FolderCompiler:
    """Return the compiler of the documents in `folder` that have the pools whose addresses the command line names."""
    return FolderCompiler(folder, {*settings.endpoints, *settings.grpc_endpoints})


async def load(settings: Settings, compiler: FolderCompiler) -> Snapshot:
    """Return the compiler's documents with the addresses of the command line. Raises BadDocument.

    compiler: see `compiler_of`.
    """
    try:
        snapshot = await compiler.compile()
    except BadFolder as bad:
        if bad.remaining is not None:
            bad.remaining = _addressed(settings, bad.remaining)
        raise
    return _addressed(settings, snapshot)


def _addressed(settings: Settings, snapshot: Snapshot) -> Snapshot:
    pools = dict(snapshot.pools)
    for name, addresses in settings.endpoints.items():
        pools[name] = replace(pools[name], endpoints=addresses, discover=None)
    for name, addresses in settings.grpc_endpoints.items():
        pools[name] = replace(pools[name], grpc_endpoints=addresses, grpc_discover=None)
    if settings.worker is not None:
        pools = {name: _part(settings.worker, pool) for name, pool in pools.items()}
        for route in snapshot.routes:
            if route.sequences:
                reason = "a sequence's steps may reach any of several workers: serve it with --workers 1"
                raise BadDocument("gateway", f"routes.{route.name}.sticky", reason)
    return replace(snapshot, pools=pools)


def _part(worker: Worker, pool: Pool) -> Pool:
    """Return a pool with a worker's part of its bounds, which all workers together fill exactly. Raises BadDocument."""
    parts: dict[str, Any] = {}
    for name in ("max_inflight", "max_streams", "max_queue", "max_queue_bytes"):
        whole = getattr(pool, name)
        if 0 < whole < worker.count:
            reason = f"{whole} cannot be divided among {worker.count} workers: raise it or lower --workers"
            raise BadDocument("gateway", f"pools.{pool.name}.{name}", reason)
        parts[name] = whole // worker.count + (worker.index < whole % worker.count)
    return replace(pool, **parts)


async def _limiter(settings: Settings, link: WorkerLink | None = None) -> Limiter:
    """Build the limiter. Raises StartFailed if it cannot be built; one that does not answer does not prevent the
    start.

    link: the one to the parent of a worker.
    """
    workers = 1 if settings.worker is None else settings.worker.count
    if settings.limiter == "embedded" and link is not None:
        limiter = SharedLimiter(link, replicas=workers, budget_s=LINK_BUDGET_S)
        limiter.open()
        return limiter
    if settings.limiter == "embedded":
        file = QuotaFile(settings.quota_file)
        await file.prepare()
        return EmbeddedLimiter(file=file)
    parts = urlsplit(settings.limiter)
    if parts.scheme not in ("redis", "rediss") or not parts.hostname:
        raise StartFailed("the limiter is neither 'embedded' nor redis://HOST:PORT/DB: fix --limiter or ORIEL_LIMITER")
    try:
        from oriel_gateway.limits.redis_ledger import RedisLedger
    except ImportError as error:
        raise StartFailed("this limiter needs redis-py: pip install 'oriel-serving[redis]'") from error
    try:
        ledger = RedisLedger(
            settings.limiter,
            holder=uuid4().hex[:12],
            prefix=settings.limiter_prefix,
            password=settings.limiter_password,
            authorities=settings.limiter_ca,
        )
    except ValueError as error:
        raise StartFailed("the limiter's URL has a port or a database that is not a number") from error
    limiter = SharedLimiter(ledger, replicas=settings.limiter_replicas * workers)
    limiter.open()
    return limiter


async def serve(settings: Settings, stop: asyncio.Event) -> None:
    """Serve until `stop` is set, then drain. Raises StartFailed before anything is served."""
    policies = settings.policies
    if isinstance(policies, Path):
        with compiler_of(settings, policies) as compiler:
            await _serve(settings, stop, compiler, FolderSource(policies), None)
        return
    mirror = mirror_of(policies, settings.state, borrowed=settings.worker is not None and not settings.worker.first)
    try:
        await mirror.start()
        with compiler_of(settings, mirror.folder) as compiler:
            await _serve(settings, stop, compiler, FolderSource(mirror.folder), mirror)
    except StoreFailed as error:
        raise StartFailed(f"the policies cannot be fetched: {error}") from error
    finally:
        await mirror.close_all()


async def check(settings: Settings) -> None:
    """Raise StartFailed if a folder of documents is not usable with these settings."""
    if isinstance(settings.policies, Path):
        with compiler_of(settings, settings.policies) as compiler:
            await _first_snapshot(settings, compiler)


def mirror_of(location: Location, state: Path | None, *, borrowed: bool = False) -> Mirror:
    """A mirror of the documents at `location`; no request is sent yet. borrowed: see `Mirror`. Raises StartFailed."""
    # obstore's own variable for an S3-compatible store; aiobotocore reads AWS_ENDPOINT_URL itself.
    endpoint = os.environ.get("AWS_ENDPOINT", "") if location.kind == "s3" else ""
    try:
        documents = StoredDocuments(location, open_client(replace(location, endpoint=endpoint), LIMITS))
        return Mirror(location, documents, state, borrowed=borrowed)
    except ClientUnusable as error:
        raise StartFailed(f"the policies cannot be read: {error}") from error
    except OSError as error:
        raise StartFailed(f"a folder for a copy of the policies cannot be made: {error.strerror}") from error


async def _serve(
    settings: Settings, stop: asyncio.Event, compiler: FolderCompiler, source: FolderSource, mirror: Mirror | None
) -> None:
    token = admin_token(settings.admin_host, pages=settings.admin_pages)
    seen = await asyncio.to_thread(source.stamp)
    snapshot = await _first_snapshot(settings, compiler)
    certificates, scaler_certificates = _certificates(settings), _scaler_certificates(settings)
    worker = settings.worker
    http_socket = listening(worker, settings.host, settings.http_port, "gateway HTTP")
    grpc_socket = listening(worker, settings.host, settings.grpc_port, "gateway gRPC")
    admin_socket = listening(worker, settings.admin_host, settings.admin_port, "gateway admin")
    link = None if worker is None else await WorkerLink.connected(worker.link)
    async with AsyncExitStack() as closing:
        gateway, budgets, recaller = await _gateway(settings, snapshot, mirror, link, closing)
        tls = certificates.context if certificates is not None else None
        gateway.records.scheme = "https" if tls is not None else "http"
        public = replace(public_limits(), idle_timeout_s=settings.keep_alive_s)
        ports = _Ports(
            scaler=await _scaler(settings, gateway, scaler_certificates) if settings.scaler_port else None,
            http=await serve_public(gateway, http_socket, limits=public, tls=tls),
            grpc=await serve_public(gateway, grpc_socket, limits=public, tls=tls),
            internal=await _internal(settings, gateway),
        )
        # Objects that exist now live as long as the process: they are kept out of every later collection.
        gc.collect()
        gc.freeze()
        gc.set_threshold(*COLLECTOR)
        if worker is None or worker.first:
            _announce(settings, ports, len(snapshot.tenants))
        usage, control_stop = _usage_ledger(settings, gateway), asyncio.Event()
        counts = None if usage is None else usage.counts
        live = Live(Source(gateway, certificates, counts))
        admin = admin_app(
            gateway, token=token, certificates=certificates, live=live, trace_url=settings.trace_url, usage=counts
        )
        together = None if link is None else link.meet
        reloader = Reloader(gateway, source.stamp, lambda: load(settings, compiler), seen=seen, together=together)
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _ask, reloader, mirror)
        watches = [each.watch() for each in (certificates, scaler_certificates) if each is not None]
        watches += [reloader.run(), recaller.run(), *_loops(gateway, usage)]
        if mirror is not None:
            watches.append(mirror.run())
        async with asyncio.TaskGroup() as group:
            limits = ControlLimits(streams=frozenset({STREAM}))
            app = admin if worker is None else admin.app  # the parent of a worker is the guard
            group.create_task(serve_control(app, admin_socket, control_stop, limits=limits))
            watching = [group.create_task(each) for each in watches]
            counting = [group.create_task(_charge_budgets(gateway)), group.create_task(budgets.run())]
            recording = None if usage is None else group.create_task(usage.run())
            if link is not None:
                group.create_task(link.serves())
            await stop.wait()
            for task in watching:
                task.cancel()
            await _drain(gateway, ports, group)
            if usage is not None and recording is not None:
                await usage.close()
                recording.cancel()
            live.close()
            for task in counting:
                task.cancel()
            control_stop.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ports:
    """The ports for callers. internal: takes tickets. scaler: the port for KEDA."""

    http: HttpServer
    grpc: HttpServer
    internal: HttpServer | None
    scaler: "ExternalScaler | None"


async def _first_snapshot(settings: Settings, compiler: FolderCompiler) -> Snapshot:
    """Return the documents to begin with. Raises StartFailed."""
    try:
        return await load(settings, compiler)
    except BadDocument as error:
        more = f" (and {len(error.others)} more: `oriel policies check` names them)" if error.others else ""
        raise StartFailed(f"the policies are not usable: {error}{more}") from error


async def _gateway(
    settings: Settings,
    snapshot: Snapshot,
    mirror: Mirror | None,
    link: WorkerLink | None,
    closing: AsyncExitStack,
) -> tuple[Gateway, BudgetFile, Recaller]:
    """Build the gateway with its files; `closing` closes them, the gateway first. Raises StartFailed."""
    worker = settings.worker
    keeps = settings.state is not None and (worker is None or worker.first)
    access_log = AccessLog(settings.access_log) if settings.access_log else None
    if access_log is not None:
        closing.callback(access_log.close)
    sink = open_sink("gateway")
    closing.callback(sink.close)
    gateway = Gateway(
        snapshot,
        limiter=await _limiter(settings, link),
        sink=sink,
        sampling=EVERY if sink.enabled and settings.trace_tail == "collector" else None,
        cache_bytes=settings.cache_bytes // (1 if worker is None else worker.count),
    )
    budgets = BudgetFile(settings.state / NAME if settings.state and keeps else None, gateway.records.stats)
    closing.callback(budgets.close)
    closing.push_async_callback(gateway.close)
    recaller = gateway.recaller = Recaller()
    if sink.enabled and settings.trace_tail == "gateway":
        gateway.records.recall = lambda at, trace, grpc: recaller.ask(at.host, at.port, trace, grpc=grpc)
    gateway.records.access_log = access_log
    await asyncio.to_thread(budgets.open)
    if settings.state is not None:
        await asyncio.to_thread(gateway.routing.canaries.open, settings.state / folder_name(settings.policies))
        gateway.apply_rollbacks()
    if link is not None:
        gateway.routing.canaries.share = link.share
        link.follow(gateway.routing.canaries.take_over)
    gateway.documents.store = mirror.state if mirror is not None else None
    return gateway, budgets, recaller


def _announce(settings: Settings, ports: _Ports, tenants: int) -> None:
    """Log where the gateway serves. tenants: their number."""
    secure = ports.http.secure
    _log.info(
        "serving %d tenants on HTTP%s %s:%d and gRPC %s:%d",
        tenants,
        "S" if secure else "",
        settings.host,
        ports.http.port,
        settings.host,
        ports.grpc.port,
    )
    shown = f"[{settings.host}]" if ":" in settings.host else settings.host
    _log.info("API documentation: http%s://%s:%d/docs", "s" * secure, shown, ports.http.port)


def _loops(gateway: Gateway, usage: UsageLedger | None) -> list[Coroutine[Any, Any, None]]:
    """Return the loops that end when the drain begins. usage: the ledger of what tenants use."""
    limiter = gateway.limiter
    ledger = limiter.ledger if isinstance(limiter, SharedLimiter) else None
    published = gateway.api_docs.published.run(lambda: (gateway.snapshot, gateway.pools))
    loops = [published, gateway.scaled.run(ledger), gateway.placements.run()]
    if usage is not None:
        loops.append(_remember_use(usage, gateway))
    if isinstance(limiter, SharedLimiter):
        client = limiter.ledger_client
        loops.append(SharedUse(gateway.records.stats, limiter.ledger, lambda: client.replicas).run())
    return loops


async def _drain(gateway: Gateway, ports: _Ports, group: asyncio.TaskGroup) -> None:
    """Take no new connections, and wait until the calls under way are over or `DRAIN_S` have passed."""
    gateway.draining = True
    if ports.scaler is not None:
        group.create_task(ports.scaler.close())
    gateway.overload.stop()
    asyncio.get_running_loop().call_later(INCOMPLETE_S, gateway.refuse_incomplete)
    asyncio.get_running_loop().call_later(DRAIN_S - REFUSE_S, gateway.refuse_waiting)
    beside = asyncio.ensure_future(ports.grpc.drain(DRAIN_S))
    await asyncio.gather(ports.http.drain(DRAIN_S, beside), beside)
    if ports.internal is not None:  # services that answer public calls have called models until now
        await ports.internal.drain(INTERNAL_DRAIN_S)


async def _internal(settings: Settings, gateway: Gateway) -> HttpServer | None:
    """Open the port that takes tickets, if there are keys for them. Raises StartFailed."""
    if not settings.ticket_keys:
        return None
    sock = listening(settings.worker, settings.internal_host, settings.internal_port, "gateway internal")
    server = await serve_public(gateway, sock)
    server.lame_duck_s = 0.0
    gateway.callers.tickets, gateway.callers.internal = Tickets(settings.ticket_keys), server.memo
    _log.info("logic servers can call models at http://%s:%d", settings.internal_host, server.port)
    return server


def _usage_ledger(settings: Settings, gateway: Gateway) -> UsageLedger | None:
    """Open the ledger of what tenants use. Raises StartFailed."""
    if settings.usage_folder is None:
        return None

    def added(minute: str) -> list[UsageLine]:
        return gateway.records.stats.usage.added(minute)

    return open_ledger(settings.usage_folder, UNIT, added, store=settings.usage_store)


async def _remember_use(ledger: UsageLedger, gateway: Gateway) -> None:
    """Read what tenants used this month before this gateway started; while it serves, because it may take long."""
    now = minute_of(time())
    await ledger.write()  # seals what a crashed gateway has left, which would move while it is read

    def earlier() -> list[UsageLine]:
        found = lines_since(ledger.folder, f"{now[:7]}-01", but=ledger.instance)
        return [line for line in found if line.kind == "seen"]

    try:
        lines = await asyncio.to_thread(earlier)
    except OSError as error:
        _log.error("usage from before this start is not counted, because it cannot be read: %s", error)
        return
    if isinstance(gateway.limiter, EmbeddedLimiter):  # else Redis has kept what was used and spent
        gateway.spending.read_ledger(lines, now[:10], gateway.limiter.remembered)
        gateway.records.stats.usage.read_ledger(lines)


async def _charge_budgets(gateway: Gateway) -> None:
    """Count once a second what has ended, so that a spent budget stops calls soon."""
    while True:
        await asyncio.sleep(BUDGET_S)
        gateway.records.stats.count()


async def _scaler(settings: Settings, gateway: Gateway, certificates: Certificates | None) -> "ExternalScaler":
    """Open the port for KEDA. Raises StartFailed."""
    from oriel_gateway.admin.external_scaler import ExternalScaler

    scaler = ExternalScaler(gateway.scaled)
    await scaler.open(listening(settings.worker, settings.host, settings.scaler_port, "gateway scaler"), certificates)
    return scaler


def _scaler_certificates(settings: Settings) -> Certificates | None:
    """Return the certificates of the port for KEDA; None for plain text. Raises StartFailed."""
    authority, chain, key = settings.scaler_client_ca, settings.tls_cert, settings.tls_key
    if authority is None:
        return None
    if chain is None or key is None:
        raise StartFailed("--scaler-client-ca needs the gateway's own certificate: pass --tls-cert and --tls-key")
    return Certificates(chain, key, http2=True, authority=authority)


def _ask(reloader: Reloader, mirror: Mirror | None) -> None:
    """Read the documents now (SIGHUP)."""
    reloader.request()
    if mirror is not None:
        mirror.ask()


def _certificates(settings: Settings) -> Certificates | None:
    if settings.tls_cert is None and settings.tls_key is None:
        return None
    if settings.tls_cert is None or settings.tls_key is None:
        raise StartFailed("a certificate goes with its key: pass both --tls-cert and --tls-key")
    return Certificates(settings.tls_cert, settings.tls_key, http2=True)
