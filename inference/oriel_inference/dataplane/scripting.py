"""Requests of Python models to other models ("business logic scripting").

They run through the same dataplane as client requests, on behalf of the requests that the calling model works on: with
the latest of their deadlines, their most urgent band, and their tenant and tier where these agree. A step of a sequence
runs on behalf of the requests with its id, because a sequence has one tenant. When all those callers have left, the
model call ends, too. A model that calls itself, directly or through others, would wait for its own instance: that is
refused, and so are chains of more than MAX_CHAIN models.
"""

import logging
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from oriel_inference.backends import Request
from oriel_inference.backends.python.frames import read_tensors, tensor_parts
from oriel_inference.backends.python.messages import Infer, Inferred, Manage, ResultHead
from oriel_inference.backends.python.outcomes import code_of
from oriel_inference.backends.python.session import PythonSession
from oriel_inference.dataplane.dataplane import Completion, Dataplane
from oriel_inference.errors import BackendFailed, InferenceError, InvalidRequest, NotLoaded
from oriel_inference.sequences.flags import ID
from oriel_wire.context import CallContext
from oriel_wire.errors import BadMessage
from oriel_wire.process.messages import Buffer, FrameError
from oriel_wire.v2.messages import InferRequest, InferResponse, ParameterValue, RequestedOutput, Tensor

_log = logging.getLogger(__name__)

MAX_CHAIN = 8
MAX_CALLS = 256
AHEAD_BYTES = 16 << 20
_LOST = "the answer of the other model cannot be passed on"


class ScriptedRequest(InferRequest, kw_only=True, gc=False):
    """A request of a model. chain: the models that wait for its answer, the first one first."""

    chain: tuple[str, ...] = ()


class Scripting:
    """Runs model calls; passed to the Python backend as `scripting`. `dataplane` and `wait`, which is `Demand.wait`,
    and `manage`, which loads and unloads models, are set before the first model loads.
    now: the loop's clock.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.dataplane: Dataplane | None = None
        self.wait: Callable[..., Callable[[], None]] | None = None
        self.manage: Callable[[PythonSession, Manage, memoryview], None] | None = None

    def __call__(self, session: PythonSession, message: Infer | Manage, body: memoryview) -> None:
        """Start the model call of `message`, or answer with an error; never raises a refusal."""
        if isinstance(message, Manage):
            if self.manage is not None:
                self.manage(session, message, body)
            return
        try:
            self._begin(session, message, body)
        except InferenceError as error:
            session.inferred(Inferred(message.id, refusal(error.message, code_of(error)), True))
        except (BadMessage, FrameError) as error:
            text = error.message if isinstance(error, BadMessage) else str(error)
            session.inferred(Inferred(message.id, refusal(text, code_of(InvalidRequest(""))), True))

    def _begin(self, session: PythonSession, message: Infer, body: memoryview) -> None:
        behalf: Sequence[Request] = [each for each in session.waiting_requests() if each.context is not None]
        if sequence := message.parameters.get(ID):
            behalf = of_sequence(behalf, sequence)
        if self.dataplane is None or not behalf:
            raise InvalidRequest("other models can only be called on behalf of a client's request")
        if len(session.model_calls) >= MAX_CALLS:
            raise InvalidRequest(f"more than {MAX_CALLS} requests to other models are in progress")
        dataplane = self.dataplane
        chain = _chain(session, message, behalf, dataplane)
        parts, _ = read_tensors(message.inputs, body)
        request = ScriptedRequest(
            model_name=message.model,
            model_version=message.version,
            id=message.request_id,
            parameters=message.parameters,
            inputs=[Tensor(name, datatype, array.shape, array) for name, datatype, array in parts],
            outputs=[RequestedOutput(name) for name in message.outputs] or None,
            chain=chain,
        )
        context = _context(behalf)
        if message.timeout_us > 0:
            ends = self._now() + message.timeout_us / 1e6
            context = msgspec.structs.replace(context, deadline=min(context.deadline, ends))

        call = session.model_calls[message.id] = ModelCall(session, message)

        def reply(completion: Completion) -> None:
            call.finish(completion.error or completion.response)

        def start() -> None:
            call.give_up = dataplane.infer(
                request,
                context,
                size_bytes=len(body),
                reply=reply,
                on_caller_left=reply,
                emit=call.emit if message.decoupled else None,
            )

        def resume() -> None:
            try:
                _chain(session, message, behalf, dataplane)  # an ensemble's parts are known only now
                start()
            except (InferenceError, BadMessage) as refusal:
                call.finish(refusal if isinstance(refusal, InferenceError) else InvalidRequest(refusal.message))

        try:
            try:
                start()
            except NotLoaded:
                if self.wait is None:
                    raise
                call.give_up = self.wait(
                    message.model, context, size_bytes=len(body), resume=resume, refuse=call.finish
                )
        except (InferenceError, BadMessage):
            session.model_calls.pop(message.id, None)
            raise


def of_sequence(behalf: Sequence[Request], sequence: ParameterValue) -> Sequence[Request]:
    """Return the requests with the id of a sequence, or all if there are none. Raises InvalidRequest if they have
    several tenants.
    """
    found = []
    for each in behalf:
        own = each.client_request.parameters.get(ID) if each.client_request is not None else None
        if own == sequence or (isinstance(own, int) and own % (1 << 64) == sequence):  # see `read_flags`
            found.append(each)
    if len({each.context.tenant for each in found if each.context is not None}) > 1:
        raise InvalidRequest(f"several tenants use sequence {str(sequence)[:128]}: use an id that nobody else uses")
    return found or behalf


def _chain(session: PythonSession, message: Infer, behalf: Sequence[Request], dataplane: Dataplane) -> tuple[str, ...]:
    before = max(
        (each.client_request.chain for each in behalf if isinstance(each.client_request, ScriptedRequest)),
        key=len,
        default=(),
    )
    chain = (*before, session.launch.model)
    # An ensemble waits for the models of its steps.
    for model in (message.model, *sorted(dataplane.parts(message.model, message.version))):
        if model in chain:
            raise InvalidRequest(f"model {model[:64]!r} would wait for itself ({' -> '.join(chain)[:200]})")
    if len(chain) >= MAX_CHAIN:
        raise InvalidRequest(f"more than {MAX_CHAIN} models wait for one another ({' -> '.join(chain)[:200]})")
    return chain


def _context(behalf: Sequence[Request]) -> CallContext:
    contexts = [each.context for each in behalf if each.context is not None]
    first = min(contexts, key=lambda each: each.band)
    return msgspec.structs.replace(
        first,
        deadline=max(each.deadline for each in behalf),
        tenant=first.tenant if all(each.tenant == first.tenant for each in contexts) else "",
        tier=first.tier if all(each.tier == first.tier for each in contexts) else "",
    )


class ModelCall:
    """One request that a Python model makes to another model, and the responses on their way back. Used on the loop.

    The other model continues when the calling model has taken a response. Responses that are not taken lie in the
    calling process, at most `ahead_bytes` of them and at least one, and here; the other model's own bound on unconsumed
    responses counts both.

    give_up: ends the request; set once the request has begun.
    """

    def __init__(self, session: PythonSession, message: Infer, *, ahead_bytes: int = AHEAD_BYTES) -> None:
        self._session = session
        self._message = message
        self._ahead_bytes = ahead_bytes
        self._unsent: deque[tuple[ResultHead, list[Buffer], int, Callable[[], None]]] = deque()
        self._sent: deque[tuple[int, Callable[[], None]]] = deque()
        self._sent_bytes = 0
        self._last: tuple[ResultHead | None, list[Buffer]] | None = None
        self.over = False
        self.give_up: Callable[[], None] = lambda: None

    def emit(self, response: InferResponse, consumed: Callable[[], None], last: bool) -> None:
        """Pass one response of several on; `finish` follows the last. Raises BackendFailed if that fails."""
        if self.over:
            return
        head, body = _encoded(response)
        self._unsent.append((head, body, sum(map(len, body)), consumed))
        self._push()

    def finish(self, result: InferResponse | InferenceError | None) -> None:
        """End the responses. An error is sent before the responses that are still here."""
        if isinstance(result, InferResponse):
            try:
                self._last = _encoded(result)
            except BackendFailed as lost:
                result = lost
        elif result is None:
            self._last = None, []
        if isinstance(result, InferenceError):
            self._unsent.clear()
            self._last = refusal(result.message, code_of(result)), []
        self._push()

    def taken(self, count: int) -> None:
        """Record that the calling model has taken `count` responses."""
        for _ in range(min(count, len(self._sent))):
            size, consumed = self._sent.popleft()
            self._sent_bytes -= size
            consumed()
        self._push()

    def caller_left(self) -> None:
        """Cancel the request: the calling model has stopped reading."""
        self._unsent.clear()
        self.give_up()
        self._push()

    def _push(self) -> None:
        while self._unsent and not self.over:
            head, body, size, consumed = self._unsent[0]
            if self._sent and self._sent_bytes + size > self._ahead_bytes:
                return
            self._unsent.popleft()
            self._sent.append((size, consumed))
            self._sent_bytes += size
            self._send(head, body, final=False)
        if self._last is not None and not self.over:
            self._send(*self._last, final=True)

    def _send(self, result: ResultHead | None, body: list[Buffer], *, final: bool) -> None:
        lost = False
        try:
            self._session.inferred(Inferred(self._message.id, result, final), body)
        except FrameError as error:
            _log.warning(
                "model %s: the answer of model %s could not be passed to it: %s",
                self._session.launch.model,
                self._message.model[:64],
                error,
            )
            lost = True
            self._session.inferred(Inferred(self._message.id, refusal(_LOST, code_of(BackendFailed(""))), True))
        if final or lost:
            self.over = True
            self._session.model_calls.pop(self._message.id, None)
        if lost:
            self.give_up()


def refusal(text: str, code: int) -> ResultHead:
    """Return a result that is an error."""
    return ResultHead(error=(code, text[:500]))


def _encoded(response: InferResponse) -> tuple[ResultHead, list[Buffer]]:
    body: list[Buffer] = []
    try:
        heads = tensor_parts([(each.name, each.datatype, each.array) for each in response.outputs], body)
    except BadMessage as error:
        raise BackendFailed(_LOST) from error
    return ResultHead(heads, response.parameters), body
