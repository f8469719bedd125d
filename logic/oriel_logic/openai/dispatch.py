"""`/v1/embeddings`, `/v1/completions`, `/v1/chat/completions`, `/v1/responses` and `/v1/models`: several models at one
path.

The body's `model` names one. A model that the caller's tenant may not use gets the same answer as one that does not
exist: `x-oriel-models`, the tenant's patterns, comes from the gateway, which checks bodies by them too.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from functools import partial
from typing import Any, TypeVar
from urllib.parse import unquote

import msgspec

from oriel_logic.bodies.json import MAX_JSON_BYTES
from oriel_logic.errors import (
    CallerLeft,
    DeadlineExceeded,
    HandlerFailed,
    LogicError,
    MediaUnsupported,
    ModelUnknown,
    ServiceBroken,
)
from oriel_logic.openai.embeddings import Embeddings
from oriel_logic.openai.language import LanguageModel
from oriel_logic.openai.schema import ChatRequest, CompletionRequest, EmbeddingRequest, ResponseRequest, parse
from oriel_logic.openai.served import Served, Tools
from oriel_logic.server.failures import first_logic_error
from oriel_logic.server.inbound import Inbound
from oriel_logic.server.ingress import Handler, read_body
from oriel_logic.server.pipeline import Bind
from oriel_logic.server.replies import Reply, error_reply
from oriel_logic.server.visit import Visit
from oriel_logic.services.context import Context, Workers
from oriel_policies.documents.promises import fits
from oriel_wire.context import CallContext
from oriel_wire.near_names import did_you_mean

_log = logging.getLogger(__name__)
S = TypeVar("S", bound=Served)
# path -> the type of its bodies, the kind of its models, and the method that answers
ANSWERS: dict[str, tuple[type[Any], type[Served], Callable[..., Awaitable[Reply]]]] = {
    "/v1/embeddings": (EmbeddingRequest, Embeddings, Embeddings.answer),
    "/v1/completions": (CompletionRequest, LanguageModel, LanguageModel.complete),
    "/v1/chat/completions": (ChatRequest, LanguageModel, LanguageModel.converse),
    "/v1/responses": (ResponseRequest, LanguageModel, LanguageModel.respond),
}
Work = Callable[[Inbound, Visit], Awaitable[Reply]]


def may_use(call: CallContext, name: str) -> bool:
    """Return whether the caller's tenant may use this model. Without patterns it may: there is no tenant, or it may use
    all.
    """
    return not call.models or any(fits(pattern, name) for pattern in call.models)


class OpenAI:
    """Serves the models. Owns its entries of `routes`. Single writer: the loop."""

    def __init__(
        self,
        routes: MutableMapping[tuple[str, str], Handler],
        workers: Workers,
        bind: Bind,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._routes = routes
        self._workers = workers
        self._bind = bind
        self._clock = clock
        self._created = int(time.time())
        self._served: dict[str, Served] = {}
        self._broken: list[tuple[Served, str]] = []
        self._own: set[tuple[str, str]] = set()

    def serve(self, served: Iterable[Served]) -> list[tuple[Served, str]]:
        """Serve exactly these from now on; of two with one name the first. Return newly failed ones with the reason."""
        self._served = {}
        before, self._broken = self._broken, []
        for each in served:
            first = self._served.setdefault(each.served_as, each)
            problem = each.problem() if first is each else f"the name is taken by {first.file.label}"
            if problem:
                self._broken.append((each, problem))
        for route in self._own:
            self._routes.pop(route, None)
        own: dict[tuple[str, str], Handler] = {
            ("POST", path): self._as_openai(path.removeprefix("/v1/").replace("/", "."), partial(self._answer, path))
            for path in ANSWERS
        }
        own["GET", "/v1/models"] = self._as_openai("models", self._models)
        own["GET", "/v1/models/"] = self._as_openai("models", self._one_model)
        # without a model the list is empty, and the paths that need one are not there
        self._own = {route for route in own if self._served or route[0] == "GET"}
        self._routes.update({route: own[route] for route in self._own})
        return [each for each in self._broken if each not in before]

    def models(self) -> dict[str, list[str]]:
        """Return the models of each path, for descriptions; paths without a model are left out."""
        found: dict[str, list[str]] = {}
        for name, served in self._served.items():
            if not self._runs(served):
                continue
            for path in (path for path, (_, kind, _) in ANSWERS.items() if isinstance(served, kind)):
                found.setdefault(path, []).append(name)
        return found

    async def _answer(self, path: str, inbound: Inbound, visit: Visit) -> Reply:
        of, kind, answer = ANSWERS[path]
        request = await self._read(inbound, visit, of)
        return await answer(self._find(request.model, kind, visit), request, self._tools(visit))

    async def _models(self, inbound: Inbound, visit: Visit) -> Reply:
        data = [self._fact(name) for name in self._served if self._is_there(name, visit)]
        return Reply(status=200, body=msgspec.json.encode({"object": "list", "data": data}))

    async def _one_model(self, inbound: Inbound, visit: Visit) -> Reply:
        name = unquote(inbound.path.removeprefix("/v1/models/"))
        if not self._is_there(name, visit):
            raise self._absent(name, visit)
        return Reply(status=200, body=msgspec.json.encode(self._fact(name)))

    def _fact(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": "oriel"}

    def _is_there(self, name: str, visit: Visit) -> bool:
        found = self._served.get(name)
        return found is not None and self._runs(found) and may_use(visit.call, name)

    def _runs(self, served: Served) -> bool:
        return all(each is not served for each, _ in self._broken)

    def _find(self, name: str, kind: type[S], visit: Visit) -> S:
        """Return the model with this public name. Raises ModelUnknown or ServiceBroken."""
        found = self._served.get(name)
        if not isinstance(found, kind) or not may_use(visit.call, name):
            raise self._absent(name, visit)
        visit.target = name
        visit.tokens = name, None, None, None
        if not self._runs(found):
            raise ServiceBroken(f"the model '{name}' cannot run: GET /v1/services on the logic server says why")
        return found

    def _absent(self, name: str, visit: Visit) -> ModelUnknown:
        near = did_you_mean(name, (each for each in self._served if self._is_there(each, visit)))
        return ModelUnknown(f"the model {name[:128]!r} does not exist, or you do not have access to it{near}")

    async def _read(self, inbound: Inbound, visit: Visit, kind: type[Any]) -> Any:
        encoding = inbound.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("", "identity"):
            raise MediaUnsupported("send the body without a content encoding, as it is")
        # The most expensive body, 131,072 arrays of one token, holds the loop for 25 ms; 4 MiB of texts for 2 ms.
        return parse(await read_body(inbound, visit, MAX_JSON_BYTES), kind)

    def _tools(self, visit: Visit) -> Tools:
        context = Context(visit.call, visit.ledger, self._workers, clock=self._clock)
        return Tools(visit=visit, context=context, models=self._bind(visit.call, visit.ledger))

    def _as_openai(self, label: str, work: Work) -> Handler:
        """Run `work` under the request's deadline, with errors in that API's form. label: the name for metrics and
        traces.
        """

        async def handle(inbound: Inbound, visit: Visit) -> Reply:
            visit.service = label
            try:
                async with asyncio.timeout(visit.call.remaining_s(self._clock())) as limit:
                    return await work(inbound, visit)
            except CallerLeft:
                raise
            except Exception as error:
                if isinstance(error, TimeoutError) and limit.expired():
                    return refused(DeadlineExceeded(visit.ledger.interrupted), visit)
                meant = first_logic_error(error)
                if meant is None or (isinstance(meant, HandlerFailed) and meant.__cause__ is not None):
                    about = visit.call.log_fields(label)
                    _log.error("request %s: '%s' failed", about["request_id"], label, exc_info=error, extra=about)
                return refused(meant or HandlerFailed("the service failed: its log says why"), visit)

        return handle


def refused(error: LogicError, visit: Visit) -> Reply:
    visit.outcome = error.outcome
    return error_reply(error, visit.call.request_id)
