"""Ask the pools, beside the calls, what they serve: services by OpenAPI document, models by the v2 protocol.

Up to `MAX_ENDPOINTS` usable endpoints of each pool that a route names for services or models are asked, one after the
other on separate connections, every `EVERY_S` seconds (sooner while a pool has never answered). Answers are bounded in
bytes, time and count. A pool that does not answer keeps its last description.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from random import uniform
from time import monotonic

from oriel_gateway.api_docs.reading import (
    MAX_ANSWER_BYTES,
    MAX_NAMES,
    MODEL_NAME,
    Description,
    ModelFacts,
    ServiceFacts,
    read_index,
    read_model,
    read_services,
)
from oriel_gateway.pools.pool import PoolGate
from oriel_policies.documents import Route, Snapshot
from oriel_wire.discovery.discovery import Address
from oriel_wire.engine.client import HttpClient
from oriel_wire.errors import UpstreamError
from oriel_wire.observe.trace import format_traceparent, new_trace
from oriel_wire.process.api_page import OPENAPI

_log = logging.getLogger(__name__)
EVERY_S = 10.0
SOONEST_S = 0.5
NEW_S = 1.0  # between two turns while a pool has never answered, for `MAX_MISSES` turns
MAX_MISSES = 60
ANSWER_S = 2.0
MAX_POOLS = 32
MAX_ENDPOINTS = 4
MAX_METADATA = 32  # the most new models of an endpoint whose metadata is read in one turn
AGAIN = 4  # the models whose metadata is read again in one turn
_INDEX, _READY = "/v2/repository/index", b'{"ready":true}'


@dataclass(slots=True, kw_only=True)
class PoolFacts:
    """The report of one pool.

    services, models: facts by name; None until it has reported some. A model is None if only its name is known.
    openai: models by path of the OpenAI API.
    versions: time when the facts of each known model were read.
    misses: turns in a row without an answer.
    """

    services: Mapping[str, ServiceFacts] | None = None
    openai: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    models: Mapping[str, ModelFacts | None] | None = None
    versions: dict[str, tuple[str, ...]] = field(default_factory=dict)
    misses: int = 0
    due_s: float = 0.0


class Published:
    """The reports of all pools. Single writer: the loop.

    pools: the reports by name of the pool.
    changes: a counter of their changes.
    """

    def __init__(self) -> None:
        self.pools: dict[str, PoolFacts] = {}
        self.changes = 0
        self.answer_s = ANSWER_S  # seconds that a server may take for one answer
        self._of: Snapshot | None = None
        self._wanted: dict[str, tuple[bool, frozenset[str] | None]] = {}  # pool -> what that snapshot's routes need
        self._documents: dict[Address, tuple[bytes, Description]] = {}  # the documents that were read last

    async def run(self, read: Callable[[], tuple[Snapshot, Mapping[str, PoolGate]]]) -> None:
        """Ask the pools that are due until cancelled. read: returns the documents in force and the pools."""
        while True:
            try:
                await self.ask(*read())
            except Exception:
                # This is the edge of a task that must live: descriptions may never end the gateway.
                _log.exception("the descriptions of the pools cannot be read")
            await asyncio.sleep(SOONEST_S)

    async def ask(self, snapshot: Snapshot, pools: Mapping[str, PoolGate]) -> None:
        """Ask every pool that is due, once."""
        if self._of is not snapshot:
            self._of, self._wanted = snapshot, _wanted(snapshot.routes)
            self.pools = {name: facts for name, facts in self.pools.items() if name in self._wanted}
        for name, (services, models) in self._wanted.items():
            gate, facts = pools.get(name), self.pools.setdefault(name, PoolFacts())
            if gate is None or facts.due_s > monotonic() or not gate.endpoints.usable:
                continue
            answered = await self._ask(gate, facts, services, models)
            facts.misses = 0 if answered else facts.misses + 1
            never = facts.services is None and facts.models is None and not answered
            wait_s = NEW_S if never and facts.misses < MAX_MISSES else EVERY_S
            facts.due_s = monotonic() + wait_s * uniform(0.9, 1.1)

    async def _ask(self, gate: PoolGate, facts: PoolFacts, services: bool, models: frozenset[str] | None) -> bool:
        """Ask one pool. Returns whether a server answered.

        models: names of the models of routes, asked for one by one if the server has no index; None if there are none.
        """
        found: dict[str, ServiceFacts] = {}
        openai: dict[str, tuple[str, ...]] = {}
        known: dict[str, ModelFacts | None] = {}
        described = indexed = False
        for endpoint in gate.endpoints.usable[:MAX_ENDPOINTS]:
            client = HttpClient(
                host=endpoint.host, port=endpoint.port, max_connections=1, max_response_bytes=MAX_ANSWER_BYTES
            )
            try:
                if services and (each := await self._services(client, endpoint.address)) is not None:
                    described = True
                    found = {**each.services, **found}
                    openai = {**each.openai, **openai}
                if models is not None and (rows := await self._models(client, facts, models)) is not None:
                    indexed = True
                    known = {**rows, **known}
            except UpstreamError:
                continue
            finally:
                await client.close()
        if described and (found, openai) != (facts.services, facts.openai):
            facts.services, facts.openai = dict(sorted(found.items())[:MAX_NAMES]), openai
            self.changes += 1
        if indexed and known != facts.models:
            facts.models = dict(sorted(known.items())[:MAX_NAMES])
            facts.versions = {name: each for name, each in facts.versions.items() if name in known}
            self.changes += 1
        return described or indexed

    async def _services(self, client: HttpClient, address: Address) -> Description | None:
        """Return the described services; None if this server describes none. Raises UpstreamError."""
        # Nobody's request: a server that keeps every trace would keep one of each poll.
        headers = [("traceparent", format_traceparent(new_trace(sampled=False)))]
        answer = await client.request("GET", OPENAPI, headers, deadline=monotonic() + self.answer_s)
        if answer.status != 200:
            return None
        before = self._documents.get(address)
        if before is not None and before[0] == answer.body:
            return before[1]
        try:
            services = await asyncio.to_thread(read_services, answer.body)
        except ValueError:
            return None
        if len(self._documents) >= MAX_POOLS * MAX_ENDPOINTS:
            self._documents.clear()
        self._documents[address] = answer.body, services
        return services

    async def _models(
        self, client: HttpClient, facts: PoolFacts, named: frozenset[str]
    ) -> Mapping[str, ModelFacts | None] | None:
        """Return the models; None if this server does not speak the v2 protocol. Raises UpstreamError."""
        body = [("content-type", "application/json")]
        answer = await client.request("POST", _INDEX, body, _READY, deadline=monotonic() + self.answer_s)
        listed: Mapping[str, tuple[str, ...]] = dict.fromkeys(sorted(named), ())
        if answer.status == 200:
            try:
                listed = read_index(answer.body)
            except ValueError:
                return None
        elif not named:
            return None
        known: dict[str, ModelFacts | None] = {name: (facts.models or {}).get(name) for name in listed}
        changed = [name for name, versions in listed.items() if facts.versions.get(name) != versions]
        # The oldest facts are read again: a model may be loaded anew in the same version.
        oldest = [name for name in facts.versions if name in known and name not in changed]
        for name in changed[:MAX_METADATA] + oldest[:AGAIN]:
            metadata = await client.request("GET", f"/v2/models/{name}", (), deadline=monotonic() + self.answer_s)
            facts.versions.pop(name, None)
            if metadata.status != 200:
                del known[name]
                continue
            try:
                known[name] = read_model(metadata.body, name)
            except ValueError:
                known[name] = None
            facts.versions[name] = listed[name]
        return known


def _wanted(routes: Iterable[Route]) -> dict[str, tuple[bool, frozenset[str] | None]]:
    """Return, of the first pools that routes name, whether they may have services, and models with their names."""
    services: dict[str, None] = {}
    models: dict[str, set[str]] = {}
    for route in routes:
        if route.model is None:
            services[route.pool] = None
            continue
        named = models.setdefault(route.pool, set())
        if MODEL_NAME.match(route.model) and len(named) < MAX_NAMES:
            named.add(route.model)
    found = {}
    for name in list(dict.fromkeys([*services, *models]))[:MAX_POOLS]:
        found[name] = name in services, frozenset(models[name]) if name in models else None
    return found
