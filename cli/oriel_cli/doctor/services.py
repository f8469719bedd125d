"""Checks of the parts of an installation: documents and keys, endpoints, Redis, model repositories, services."""

import asyncio
import hashlib
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from email.utils import parsedate_to_datetime
from pathlib import Path
from time import monotonic, time
from typing import TYPE_CHECKING
from uuid import uuid4

from oriel_cli.doctor.findings import EXPIRY_WARNING_S, Finding, fail, good, warn
from oriel_cli.errors import CommandFailed
from oriel_policies.documents import Snapshot, compile_documents
from oriel_policies.errors import BadDocument
from oriel_wire.discovery.discovery import DiscoveryFailed
from oriel_wire.discovery.endpoint_slices import KUBERNETES, EndpointSlices
from oriel_wire.engine.client import HttpClient
from oriel_wire.errors import StartFailed, UpstreamError
from oriel_wire.process.flags import split_url

if TYPE_CHECKING:
    from oriel_wire.v2.proto import model_config_pb2 as pb

Documents = Mapping[str, bytes]

ANSWER_S = 3.0
STORE_S = 30.0
MAX_NAMED = 10
DEMO_KEYS = {hashlib.sha256(f"oriel-demo-{tier}".encode()).digest() for tier in ("gold", "silver", "bronze")}
OLDEST_REDIS = (6, 2)


def documents(files: Mapping[str, bytes], where: str) -> tuple[list[Finding], Snapshot | None]:
    """Check that a gateway would accept the policy documents."""
    try:
        snapshot = compile_documents(files)
    except BadDocument as bad:
        mistakes = [bad, *bad.others]
        named = [fail("policies", str(each), "correct the document") for each in mistakes[:MAX_NAMED]]
        return named, None
    counts = f"{len(snapshot.tenants)} tenants, {len(snapshot.routes)} routes, {len(snapshot.pools)} pools"
    found = [good("policies", f"{counts} in {where}")]
    if not snapshot.tenants and not snapshot.issuers:
        found.append(warn("policies", "nobody may call: there is no tenant", "'oriel keys new --tenant NAME'"))
    if not snapshot.routes:
        found.append(warn("policies", "nothing can be reached: there is no route", "add [[routes]] and [pools.NAME]"))
    return found, snapshot


def keys(snapshot: Snapshot, own: str) -> Iterator[Finding]:
    """Check that keys have not expired, that every tenant has one, and that the caller's own key is valid.

    own: the caller's key, "" for none. No key and no hash is ever printed.
    """
    now = time()
    for state, fix in (("have expired", "'oriel keys new' makes others"), ("expire within 30 days", "rotate them")):
        until = now if state == "have expired" else now + EXPIRY_WARNING_S
        since = 0.0 if state == "have expired" else now
        named = [
            f"{key.tenant.name}{f' ({key.name})' if key.name else ''}"
            for key in snapshot.keys.values()
            if key.expires_at is not None and since < key.expires_at <= until
        ]
        if named:
            yield warn("keys", f"{len(named)} keys {state}: {', '.join(sorted(named)[:MAX_NAMED])}", fix)
    if DEMO_KEYS & snapshot.keys.keys():
        yield warn("keys", "the demo's published keys are accepted", "replace them: 'oriel keys new' makes others")
    with_key = {key.tenant.name for key in snapshot.keys.values()}
    without = sorted(set(snapshot.tenants) - with_key) if not snapshot.issuers else []
    if without:
        named_tenants = ", ".join(without[:MAX_NAMED])
        yield warn("keys", f"{len(without)} tenants have no key: {named_tenants}", "'oriel keys new --tenant NAME'")
    if own:
        key = snapshot.keys.get(hashlib.sha256(own.encode("utf-8", "surrogateescape")).digest())
        if key is None:
            yield fail("keys", "the key in ORIEL_KEY belongs to no tenant", "'oriel keys new' makes one")
        elif key.expires_at is not None and key.expires_at <= now:
            yield fail("keys", "the key in ORIEL_KEY has expired", "'oriel keys new' makes another")
        else:
            yield good("keys", f"the key in ORIEL_KEY is of {key.tenant.name}, tier {key.tenant.tier.name}")
    else:
        yield good("keys", f"{len(snapshot.keys)} keys of {len(with_key)} tenants")


async def endpoints(snapshot: Snapshot) -> tuple[list[Finding], dict[str, float]]:
    """Check that each endpoint answers, with its health if the pool has a probe; also how far clocks are ahead."""
    probes: dict[str, asyncio.Task[tuple[Finding, float | None]]] = {}
    found: list[Finding] = []
    async with asyncio.TaskGroup() as group:
        for pool in snapshot.pools.values():
            for discovered, kind in ((pool.discover, ""), (pool.grpc_discover, "grpc_")):
                if discovered is not None:
                    found.append(await _resolved(pool.name, kind, *discovered))
            for host, port in pool.endpoints:
                name = f"{pool.name} {host}:{port}"
                probes[name] = group.create_task(_endpoint(pool.name, host, port, pool.probe))
            for host, port in pool.grpc_endpoints:
                probes[f"{pool.name} {host}:{port} gRPC"] = group.create_task(_endpoint(pool.name, host, port, None))
    ahead = {name: skew for name, task in probes.items() if (skew := task.result()[1]) is not None}
    return [*found, *(task.result()[0] for task in probes.values())], ahead


async def _resolved(pool: str, kind: str, host: str, port: int) -> Finding:
    if host.startswith(KUBERNETES):
        return await _listed(pool, host.removeprefix(KUBERNETES), port)
    try:
        async with asyncio.timeout(ANSWER_S):
            answers = await asyncio.get_running_loop().getaddrinfo(host, port, type=1)
        return good("endpoint", f"pool {pool}: {host} has {len({each[4][0] for each in answers})} addresses")
    except (OSError, TimeoutError):
        fix = f"correct `{kind}discover` of [pools.{pool}], or ask from inside of the cluster"
        return fail("endpoint", f"pool {pool}: the name {host} has no address", fix)


async def _listed(pool: str, service: str, port: int) -> Finding:
    slices = EndpointSlices(service, port)
    watch = asyncio.create_task(slices.run())
    try:
        ready = len(await slices.lookup())
        return good("endpoint", f"pool {pool}: {ready} of {len(slices.found or ())} pods of {service} are ready")
    except DiscoveryFailed as error:
        fix = "ask from inside of the cluster, with a service account that may watch EndpointSlices (docs/deploy.md)"
        return fail("endpoint", f"pool {pool}: {error}", fix)
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)


async def _endpoint(pool: str, host: str, port: int, probe: str | None) -> tuple[Finding, float | None]:
    """Check one endpoint; return what was found, and by how many seconds its clock is ahead (None if unknown).

    probe: the path to GET, "" if any answer over HTTP will do, None if it is enough that it accepts a connection.
    """
    where = f"pool {pool}: {host}:{port}"
    fix = f"start the server there, or correct the endpoint of [pools.{pool}]"
    if probe is None:
        try:
            async with asyncio.timeout(ANSWER_S):
                _, writer = await asyncio.open_connection(host, port)
            writer.close()
            return good("endpoint", f"{where} takes connections (gRPC)"), None
        except (OSError, TimeoutError):
            return fail("endpoint", f"{where} takes no connection (gRPC)", fix), None
    client = HttpClient(host=host, port=port)
    try:
        answer = await client.request("GET", probe or "/", [], b"", deadline=monotonic() + ANSWER_S)
    except UpstreamError as error:
        return fail("endpoint", f"{where} does not answer: {error}", fix), None
    finally:
        await client.close()
    date, ahead = answer.get("date"), None
    if date:
        try:
            ahead = parsedate_to_datetime(date).timestamp() - time()
        except ValueError:
            pass
    if probe and answer.status != 200:
        return fail(
            "endpoint", f"{where} answers {probe} with {answer.status}: it is not ready", "its log says why"
        ), ahead
    return good("endpoint", f"{where} {'is ready' if probe else 'answers'}"), ahead


async def redis(url: str, authorities: Path | None) -> tuple[list[Finding], dict[str, float]]:
    """Check the Redis of the shared limiter."""
    if url in ("", "embedded"):
        return [], {}
    parts = split_url(url)
    if not parts.hostname:
        return [fail("redis", "the limiter is not redis://HOST:PORT/DB", "fix --limiter or ORIEL_LIMITER")], {}
    where = f"{parts.hostname}:{parts.port or 6379}"
    try:
        from oriel_gateway.limits.ledger import LedgerLost
        from oriel_gateway.limits.redis_ledger import RedisLedger
    except ImportError:
        return [fail("redis", "redis-py is not installed", "pip install 'oriel-serving[redis]'")], {}
    password = os.environ.get("ORIEL_LIMITER_PASSWORD")
    ledger = RedisLedger(url, holder=f"doctor-{uuid4().hex[:8]}", password=password, authorities=authorities)
    began = time()
    try:
        async with asyncio.timeout(ANSWER_S):
            version, now = await ledger.examine()
    except (LedgerLost, TimeoutError) as error:
        kind = str(error) or "no answer in time"
        fix = "start it, or correct --limiter"
        if "Auth" in kind or "Permission" in kind or kind.startswith("ResponseError"):
            fix = "put its password into ORIEL_LIMITER_PASSWORD; its user needs EVAL, EVALSHA, TIME and INFO"
        return [fail("redis", f"{where}: {kind}", fix)], {}
    finally:
        await ledger.close()
    ahead = {"redis": now - (began + time()) / 2}
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
    if numbers < OLDEST_REDIS:
        return [fail("redis", f"{where} is Redis {version}", "6.2 or later is needed")], ahead
    return [good("redis", f"{where} answers, Redis {version}")], ahead


async def repository(named: Path | str) -> list[Finding]:
    """Check that a model repository can be listed and its configurations can be read."""
    try:
        async with asyncio.timeout(STORE_S):
            return await asyncio.to_thread(_models, named)
    except TimeoutError:
        return [fail("models", f"{named} cannot be listed within {STORE_S:.0f} s", "is its store in reach?")]


def _models(named: Path | str) -> list[Finding]:
    from oriel_inference.errors import ConfigInvalid, InferenceError
    from oriel_inference.repository.config import CONFIG_FILE, parse
    from oriel_inference.repository.ensembles import is_ensemble
    from oriel_inference.stores.opening import open_stores
    from oriel_wire.v2.proto import model_config_pb2 as pb

    if isinstance(named, Path) and not named.is_dir():
        return [fail("models", f"there is no folder {named}", "correct --model-repository")]
    found: list[Finding] = []
    with tempfile.TemporaryDirectory() as cache:
        try:
            (store,) = open_stores([named], Path(cache), max_cache_bytes=1 << 30, in_use=set)
            names = store.models()
            for name in names:
                if not (versions := store.versions(name)):
                    found.append(warn("models", f"{name} has no version", "its folder holds 1, 2, ... with the files"))
                text, file = store.text(name, CONFIG_FILE), f"{name}/{CONFIG_FILE}"
                try:
                    config = parse(text, file) if text is not None else pb.ModelConfig()
                except ConfigInvalid as error:
                    found.append(fail("models", str(error), f"correct {file}"))
                    continue
                if (
                    versions
                    and not is_ensemble(config)
                    and (lack := _lack(config, file, store.files(name, versions[-1])))
                ):
                    found.append(lack)
        except InferenceError as error:
            return [fail("models", f"{named}: {error}", "correct --model-repository, or the credentials of its store")]
    if not names:
        found.append(warn("models", f"{named} holds no model", "NAME/1/model.onnx is the smallest one"))
    return found or [good("models", f"{len(names)} models in {named}")]


def _lack(config: "pb.ModelConfig", file: str, files: Sequence[str]) -> Finding | None:
    """Return what a model needs that is not installed here, or why no engine runs it; None if nothing is missing."""
    from oriel_inference.backends import find_backend
    from oriel_inference.errors import LoadFailed
    from oriel_inference.repository.engines import name_engine

    try:
        name_engine(config, file, files)
        if config.backend != "python":
            find_backend(config.backend)
    except LoadFailed as failure:
        what, _, fix = failure.reason.partition(": pip install")
        model = file.partition("/")[0]
        shown = what if what.startswith(model) else f"{model}: {what}"
        return warn("models", shown, f"pip install{fix}" if fix else "docs/model-repository.md has the engines")
    return None


def services(folder: Path) -> Iterator[Finding]:
    """Check the handlers of a folder and their settings, without importing them."""
    from oriel_logic.dev.target import find
    from oriel_logic.loading.listing import read_listing

    try:
        target = find(folder)
        listing = read_listing([target.root])
    except (StartFailed, OSError) as error:
        yield fail("services", str(error), "correct --services")
        return
    broken = [source for source in listing.sources.values() if source.problem]
    for source in broken:
        yield fail("services", f"{source.file.label}: {source.problem}", "correct the file")
    for entry, why in listing.unread.items():
        yield fail("services", f"{Path(entry).name} cannot be read: {why}", "give it to this user")
    if not broken and not listing.unread:
        yield good("services", f"{len(target.files)} handlers in {folder}")


def read(where: str) -> tuple[Mapping[str, bytes] | None, list[Finding]]:
    """Read the policy documents of a folder or an object store."""
    from oriel_cli.policies.explain import read as read_documents

    try:
        return read_documents(where), []
    except (CommandFailed, StartFailed) as error:
        return None, [fail("policies", str(error), "correct --policies, or the credentials of its store")]
