"""The v2 inference client: binary tensors over HTTP/1.1, one deadline, least outstanding endpoint first.

Metadata is fetched once per model and version. When inputs do not fit it, it is fetched again (at most once a second)
before the service is blamed, because the model may have been replaced meanwhile.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from urllib.parse import quote

from oriel_logic.endpoints import Endpoint, Endpoints
from oriel_logic.errors import DeadlineExceeded, ModelFailed, ModelInputWrong, ModelUnavailable, ModelUnreachable
from oriel_logic.models import ArrayLike, Outputs
from oriel_logic.stages import Ledger, Stage
from oriel_logic.tensors import ModelSpec, check_inputs, parse_metadata
from oriel_logic.upstream_errors import refusal, sentence
from oriel_wire.context import COST_US, CallContext, to_headers
from oriel_wire.engine.client import HttpResponse
from oriel_wire.errors import BadMessage, UpstreamBroken, UpstreamTimedOut, UpstreamUnreachable
from oriel_wire.trace import TraceContext
from oriel_wire.v2.http import decode_response, encode_request
from oriel_wire.v2.messages import InferRequest, RequestedOutput, Tensor

__all__ = ["BoundModels", "InferenceServers"]

HEADER_LENGTH = "inference-header-content-length"
STAGE = "infer"
REFRESH_S = 1.0
MAX_SPECS = 1024


class InferenceServers:
    """The inference servers of this logic server. One object for all requests; `bind` makes a request's view."""

    def __init__(self, endpoints: Endpoints, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._endpoints = endpoints
        self._clock = clock
        self._specs: dict[tuple[str, str], tuple[float, ModelSpec]] = {}
        self._fetching: dict[tuple[str, str], asyncio.Lock] = {}

    def bind(self, call: CallContext, ledger: Ledger) -> "BoundModels":
        return BoundModels(self, call, ledger)

    async def close(self) -> None:
        await self._endpoints.close()

    async def spec(
        self, model: str, version: str, call: CallContext, trace: TraceContext, *, stale_s: float
    ) -> ModelSpec:
        """The model's metadata, not older than `stale_s`. Callers of one model wait for one fetch."""
        key = (model, version)
        known = self._specs.get(key)
        if known is not None and self._clock() - known[0] <= stale_s:
            return known[1]
        lock = self._fetching.setdefault(key, asyncio.Lock())
        try:
            async with asyncio.timeout(call.deadline - self._clock()), lock:
                known = self._specs.get(key)
                if known is not None and self._clock() - known[0] <= stale_s:
                    return known[1]
                response = await self.send("GET", path_of(model, version), [], (), call, trace)
                if response.status != 200:
                    self._specs.pop(key, None)
                    raise refusal(model, response)
                found = parse_metadata(model, response.body)
                if len(self._specs) >= MAX_SPECS:
                    self._specs.clear()
                self._specs[key] = (self._clock(), found)
                return found
        except TimeoutError as error:
            raise DeadlineExceeded(STAGE) from error
        finally:
            if not lock.locked():
                self._fetching.pop(key, None)

    def forget(self, model: str, version: str) -> None:
        self._specs.pop((model, version), None)

    async def send(
        self,
        method: str,
        target: str,
        headers: Sequence[tuple[str, str]],
        body: Sequence[bytes | memoryview],
        call: CallContext,
        trace: TraceContext,
    ) -> HttpResponse:
        """One exchange. Another endpoint is tried only if nothing was sent to the one before.

        Raises ModelUnreachable, ModelFailed or DeadlineExceeded.
        """
        tried: list[Endpoint] = []
        while (endpoint := self._endpoints.pick(tried)) is not None:
            tried.append(endpoint)
            hop = [*headers, *to_headers(call, now=self._clock(), trace=trace)]
            try:
                with endpoint.busy():
                    return await endpoint.client.request(method, target, hop, body, deadline=call.deadline)
            except UpstreamUnreachable:
                self._endpoints.mark_down(endpoint)
            except UpstreamTimedOut as error:
                raise DeadlineExceeded(STAGE) from error
            except UpstreamBroken as error:
                raise ModelFailed("the inference server closed the connection before it answered") from error
        raise ModelUnreachable("no inference server can be reached: try again later", retry_after_s=1.0)


class BoundModels:
    """`Models` for one request: see there. Every call is a stage `infer` of the request."""

    def __init__(self, servers: InferenceServers, call: CallContext, ledger: Ledger) -> None:
        self._servers = servers
        self._call = call
        self._ledger = ledger

    async def infer(
        self,
        model: str,
        inputs: Mapping[str, ArrayLike],
        *,
        outputs: Sequence[str] | None = None,
        version: str = "",
    ) -> Outputs:
        with self._ledger.stage(STAGE, kind="client") as stage:
            stage.attributes["oriel.model"] = model
            tensors = await self._checked(model, version, inputs, stage)
            request = InferRequest(
                model_name=model,
                model_version=version,
                inputs=tensors,
                outputs=None if outputs is None else [RequestedOutput(name, True) for name in outputs],
            )
            try:
                body, header_length = encode_request(request)
            except BadMessage as error:
                raise ModelInputWrong(f"model '{model}': {error.message}") from error
            headers = [("content-type", "application/octet-stream"), (HEADER_LENGTH, str(header_length))]
            target = path_of(model, version) + "/infer"
            response = await self._servers.send("POST", target, headers, body, self._call, stage.context)
            self._account(response)
            if response.status != 200:
                await self._blame(model, version, inputs, response, stage)
            return decoded(model, response)

    async def _checked(self, model: str, version: str, inputs: Mapping[str, ArrayLike], stage: Stage) -> list[Tensor]:
        spec = await self._servers.spec(model, version, self._call, stage.context, stale_s=float("inf"))
        try:
            return check_inputs(spec, inputs)
        except ModelInputWrong:
            newer = await self._servers.spec(model, version, self._call, stage.context, stale_s=REFRESH_S)
            if newer is spec:
                raise
            return check_inputs(newer, inputs)

    async def _blame(
        self, model: str, version: str, inputs: Mapping[str, ArrayLike], response: HttpResponse, stage: Stage
    ) -> None:
        """Raise what the answer means; for a 400 by the newest metadata, which may name the tensor."""
        if response.status == 400:
            spec = await self._servers.spec(model, version, self._call, stage.context, stale_s=REFRESH_S)
            check_inputs(spec, inputs)
            raise ModelInputWrong(f"model '{model}' refused its inputs: {sentence(response)}")
        error = refusal(model, response)
        if isinstance(error, ModelUnavailable):
            self._servers.forget(model, version)
        raise error

    def _account(self, response: HttpResponse) -> None:
        timing, cost = response.get("server-timing"), response.get(COST_US)
        if timing:
            self._ledger.upstream.append(timing)
        if cost and cost.isascii() and cost.isdigit():
            self._ledger.cost_us += int(cost)


def path_of(model: str, version: str) -> str:
    path = f"/v2/models/{quote(model, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path


def decoded(model: str, response: HttpResponse) -> Outputs:
    length = response.get(HEADER_LENGTH)
    if length is not None and not (length.isascii() and length.isdigit()):
        raise ModelFailed(f"the answer of model '{model}' cannot be read: its header length is no number")
    try:
        answer = decode_response(response.body, None if length is None else int(length))
    except BadMessage as error:
        raise ModelFailed(f"the answer of model '{model}' cannot be read: {error.message}") from error
    arrays = {each.name: each.array for each in answer.outputs}
    return Outputs(arrays, model=answer.model_name, model_version=answer.model_version)
