"""The v2 inference client: binary tensors over HTTP/1.1, one deadline, endpoint with the fewest outstanding calls
first.

Metadata is fetched once per model and version. If inputs do not fit it, it is fetched again (at most once a second)
before an error is raised, because the model may have been replaced meanwhile.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, NamedTuple

from oriel_logic.client.codec import Encoded, ModelCodec, infer_request, outputs_of, path_of, scan_body
from oriel_logic.client.endpoints import Endpoints
from oriel_logic.client.model_streams import STAGE as STREAM
from oriel_logic.client.model_streams import StreamServers
from oriel_logic.client.models import Array, ArrayLike, ModelSpec, Outputs
from oriel_logic.client.tensors import check_inputs, parse_metadata, parse_parameters
from oriel_logic.client.upstream_errors import (
    MAYBE_ELSEWHERE,
    check_ticket,
    is_elsewhere,
    is_restarting,
    refusal,
    retry_after_s,
    sentence,
)
from oriel_logic.errors import DeadlineExceeded, ModelFailed, ModelInputWrong, ModelUnavailable, ModelUnreachable
from oriel_logic.observe.stages import HopFacts, Ledger, Stage
from oriel_wire.context import CallContext, Hop
from oriel_wire.engine.client import HttpClient, HttpResponse
from oriel_wire.errors import UpstreamBroken, UpstreamTimedOut, UpstreamUnreachable, UpstreamUnread
from oriel_wire.observe.trace import TraceContext

STAGE = "infer"
SCAN = "scan"
REFRESH_S = 1.0
CONFIG_S = 2.0  # the parameters of a model's configuration are at most so old
MAX_FACTS = 1024
FOREVER = float("inf")
CONFIG = "/config"
Key = tuple[str, str, str]  # model, version, and CONFIG for the parameters of its configuration or "" for its codec


class Ask(NamedTuple):
    """A request to an inference server. headers: lines with their CRLF. waits: it waits for servers that restart."""

    method: str
    target: str
    headers: str = ""
    body: Sequence[bytes | memoryview] = ()
    waits: bool = True


class InferenceServers:
    """The inference servers of this logic server: one object for all requests; `bind` makes the view of one request.

    through_gateway: the endpoints are gateways, which are called by the ticket of each request.
    """

    def __init__(
        self,
        endpoints: Endpoints[HttpClient],
        streams: StreamServers,
        *,
        clock: Callable[[], float] = time.monotonic,
        through_gateway: bool = False,
    ) -> None:
        self._endpoints = endpoints
        self._through_gateway = through_gateway
        self.streams = streams
        self._clock = clock
        self._facts: dict[Key, tuple[float, Any]] = {}
        self._fetching: dict[Key, asyncio.Lock] = {}

    def bind(self, call: CallContext, ledger: Ledger) -> "BoundModels":
        return BoundModels(self, call, ledger)

    def hop(self, call: CallContext) -> Hop:
        """Return the header lines for the model calls of one request. Raises ModelFailed for one without a ticket."""
        if self._through_gateway:
            check_ticket(call)
        return Hop(call, through_gateway=self._through_gateway)

    async def close(self) -> None:
        await self._endpoints.close()
        await self.streams.close()

    def known(self, key: Key, stale_s: float) -> Any:
        """Return the codec of a model, or its parameters, if they are at most `stale_s` old; otherwise None."""
        found = self._facts.get(key)
        return found[1] if found is not None and self._clock() - found[0] <= stale_s else None

    async def fetch(self, key: Key, call: CallContext, hop: Hop, trace: TraceContext, *, stale_s: float) -> Any:
        """Return the same, fetched if they are older. Calls of one model share one fetch.

        Through a gateway each call fetches for itself: the gateway counts and orders those that wait for a server.
        """
        model, version, part = key
        lock = asyncio.Lock() if self._through_gateway else self._fetching.setdefault(key, asyncio.Lock())
        try:
            async with asyncio.timeout(call.deadline - self._clock()), lock:
                known = self.known(key, stale_s)
                if known is not None:
                    return known
                response = await self.send(model, Ask("GET", path_of(model, version) + part), call, hop, trace)
                if response.status != 200:
                    self._facts.pop(key, None)
                    raise refusal(model, response)
                if part == CONFIG:
                    found: Any = parse_parameters(model, response.body)
                else:
                    found = ModelCodec(parse_metadata(model, response.body), version)
                if len(self._facts) >= MAX_FACTS:
                    self._facts.clear()
                self._facts[key] = (self._clock(), found)
                return found
        except TimeoutError as error:
            raise DeadlineExceeded(STAGE) from error
        finally:
            if not lock.locked():
                self._fetching.pop(key, None)

    def forget(self, model: str, version: str) -> None:
        self._facts.pop((model, version, ""), None)

    async def send(
        self, model: str, ask: Ask, call: CallContext, hop: Hop, trace: TraceContext, stage: Stage | None = None
    ) -> HttpResponse:
        """Make one exchange about `model`. stage: gets the facts of the hop.

        Another endpoint is tried only if the previous one received nothing or does not have the model, and all again
        while they restart; if none has it in time, the first answer counts.
        Raises ModelUnreachable, ModelFailed or DeadlineExceeded.
        """
        refused: HttpResponse | None = None
        attempts, resent = self._endpoints.attempts(model, call.deadline if ask.waits else 0.0), -1
        async for endpoint in attempts:
            resent += 1
            lines = ask.headers + hop.lines(self._clock(), trace)
            endpoint.outstanding += 1
            try:
                response = await endpoint.client.request(
                    ask.method, ask.target, lines, ask.body, deadline=call.deadline
                )
                self._endpoints.have_answered = True
                if endpoint.failures:
                    self._endpoints.mark_up(endpoint)
                if stage is not None:
                    stage.hop = HopFacts(*endpoint.address, ask.method, ask.target, response.status, resent)
                if response.status not in MAYBE_ELSEWHERE or not is_elsewhere(response):
                    return response
                self._endpoints.mark_lacking(endpoint, model)
                refused = refused or response
                if is_restarting(response):
                    attempts.try_again(retry_after_s(response))
            except UpstreamUnreachable:
                self._endpoints.mark_down(endpoint)
                attempts.try_again()
            except UpstreamUnread:
                attempts.try_again()
            except UpstreamTimedOut as error:
                raise DeadlineExceeded(STAGE) from error
            except UpstreamBroken as error:
                raise ModelFailed("the inference server closed the connection before it answered") from error
            finally:
                endpoint.outstanding -= 1
                if stage is not None and stage.hop is None:
                    stage.hop = HopFacts(*endpoint.address, ask.method, ask.target, 0, resent)
        if refused is not None:
            return refused
        raise ModelUnreachable("no inference server can be reached: try again later", retry_after_s=1.0)


class BoundModels:
    """The `Models` of one request. Every call is a stage `infer` of the request."""

    def __init__(self, servers: InferenceServers, call: CallContext, ledger: Ledger) -> None:
        self._servers = servers
        self._call = call
        self._ledger = ledger
        self._hop: Hop | None = None

    def rebind(self, call: CallContext) -> None:
        """Give later calls another deadline, because a stream goes on."""
        self._call = call
        self._hop = None

    async def infer(
        self, model: str, inputs: Mapping[str, ArrayLike], *, outputs: Sequence[str] | None = None, version: str = ""
    ) -> Outputs:
        with self._ledger.stage(STAGE, kind="client") as stage:
            stage.attributes["oriel.model"] = model
            codec: ModelCodec | None = self._servers.known((model, version, ""), FOREVER)
            if codec is None:
                codec = await self._codec(model, version, stage, stale_s=FOREVER)
            try:
                encoded = codec.encode(inputs, outputs)
            except ModelInputWrong as error:
                codec = await self._newer(codec, model, version, stage, error)
                encoded = codec.encode(inputs, outputs)
            response = await self._answered(codec, encoded, stage)
            if response.status != 200:
                await self._blame(model, version, inputs, response, stage)
            return codec.decode(response)

    async def scan(
        self,
        model: str,
        inputs: Mapping[str, ArrayLike],
        *,
        state: Mapping[str, Array] | None = None,
        outputs: Sequence[str] | None = None,
        version: str = "",
    ) -> Outputs:
        with self._ledger.stage(SCAN, kind="client") as stage:
            stage.attributes["oriel.model"] = model
            codec = await self._codec(model, version, stage, stale_s=FOREVER)
            try:
                encoded = scan_body(codec.spec, inputs, state, outputs, version)
            except ModelInputWrong as error:
                codec = await self._newer(codec, model, version, stage, error)
                encoded = scan_body(codec.spec, inputs, state, outputs, version)
            response = await self._answered(codec, encoded, stage)
            if response.status != 200:
                await self._blame(model, version, {}, response, stage)
            return codec.decode(response)

    async def _answered(self, codec: ModelCodec, encoded: Encoded, stage: Stage) -> HttpResponse:
        """Send an encoded call, and note what it cost."""
        response = await self._servers.send(
            codec.spec.name,
            Ask("POST", codec.infer_path, encoded.headers, encoded.body),
            self._call,
            self._hop_of(),
            stage.context,
            stage,
        )
        if response.server_timing:
            self._ledger.timed(response.server_timing)
        self._ledger.reported(response.cost_us, response.used)
        return response

    async def stream(
        self,
        model: str,
        inputs: Mapping[str, ArrayLike],
        *,
        outputs: Sequence[str] | None = None,
        version: str = "",
        tap: Callable[[bytes], bool] | None = None,
    ) -> AsyncGenerator[Outputs]:
        with self._ledger.stage(STREAM, kind="client") as stage:
            stage.attributes["oriel.model"] = model
            codec = await self._codec(model, version, stage, stale_s=FOREVER)
            try:
                request = infer_request(codec.spec, inputs, outputs, version)
            except ModelInputWrong as error:
                codec = await self._newer(codec, model, version, stage, error)
                request = infer_request(codec.spec, inputs, outputs, version)
            answers = await self._servers.streams.begin(request, self._call, stage, self._ledger)
            if tap is not None:
                answers.offer_texts(tap)
            try:
                while (answer := await answers.next()) is not None:
                    yield outputs_of(answer)
            finally:
                answers.close()

    async def ready(self, model: str, *, version: str = "") -> bool:
        with self._ledger.stage("ready", kind="client") as stage:
            target = path_of(model, version) + "/ready"
            response = await self._servers.send(
                model, Ask("GET", target, waits=False), self._call, self._hop_of(), stage.context, stage
            )
            return response.status == 200

    async def metadata(self, model: str, *, version: str = "") -> ModelSpec:
        codec: ModelCodec = await self._fact((model, version, ""), REFRESH_S)
        return codec.spec

    async def parameters(self, model: str, *, version: str = "") -> Mapping[str, str]:
        """Return the parameters of the model's configuration, at most CONFIG_S old. Raises as `infer`."""
        found: Mapping[str, str] = await self._fact((model, version, CONFIG), CONFIG_S)
        return found

    async def _fact(self, key: Key, stale_s: float) -> Any:
        known = self._servers.known(key, stale_s)
        if known is not None:
            return known
        with self._ledger.stage("metadata", kind="client") as stage:
            return await self._servers.fetch(key, self._call, self._hop_of(), stage.context, stale_s=stale_s)

    def _hop_of(self) -> Hop:
        hop = self._hop
        if hop is None:
            hop = self._hop = self._servers.hop(self._call)
        return hop

    async def _codec(self, model: str, version: str, stage: Stage, *, stale_s: float) -> ModelCodec:
        key = model, version, ""
        known: ModelCodec | None = self._servers.known(key, stale_s)
        if known is None:
            known = await self._servers.fetch(key, self._call, self._hop_of(), stage.context, stale_s=stale_s)
        return known

    async def _newer(
        self, codec: ModelCodec, model: str, version: str, stage: Stage, error: ModelInputWrong
    ) -> ModelCodec:
        """Return a codec with newer metadata; raise `error` if the metadata has not changed."""
        newer = await self._codec(model, version, stage, stale_s=REFRESH_S)
        if newer is codec:
            raise error
        return newer

    async def _blame(
        self, model: str, version: str, inputs: Mapping[str, ArrayLike], response: HttpResponse, stage: Stage
    ) -> None:
        """Raise the error that the answer stands for; for a 400 check the inputs by the newest metadata, which may
        name the tensor.
        """
        if response.status == 400:
            newest = await self._codec(model, version, stage, stale_s=REFRESH_S)
            if inputs:
                check_inputs(newest.spec, inputs)
            raise ModelInputWrong(f"model '{model}' refused its inputs: {sentence(response)}")
        error = refusal(model, response)
        if isinstance(error, ModelUnavailable):
            self._servers.forget(model, version)
        raise error
