"""Requests that Python models make of other models ("business logic scripting").

They run through the same dataplane as a client's, on behalf of the requests that the asking model works on: with the
latest of their deadlines, their most urgent band, and their tenant and tier where they agree. When nobody waits for any
of those any more, neither does this one. A model that is asked, directly or through others, by itself would wait for
its own instance: that is refused, and so are chains of more than MAX_CHAIN models.
"""

import logging
from collections.abc import Callable, Sequence

import msgspec

from oriel_inference.backends import Request
from oriel_inference.backends.python.frames import (
    Buffer,
    FrameError,
    read_tensors,
    tensor_parts,
)
from oriel_inference.backends.python.messages import (
    Infer,
    Inferred,
    ResultHead,
)
from oriel_inference.backends.python.outcomes import code_of
from oriel_inference.backends.python.session import PythonSession
from oriel_inference.dataplane import Completion, Dataplane
from oriel_inference.errors import BackendFailed, InferenceError, InvalidRequest
from oriel_wire.context import CallContext
from oriel_wire.errors import BadMessage
from oriel_wire.v2.messages import InferRequest, InferResponse, RequestedOutput, Tensor

__all__ = ["Scripting", "ScriptedRequest"]

_log = logging.getLogger(__name__)

MAX_CHAIN = 8
MAX_ASKED = 256


class ScriptedRequest(InferRequest, kw_only=True, gc=False):
    """chain: the models that wait for its answer, the first one first."""

    chain: tuple[str, ...] = ()


class Scripting:
    """Callable as the backend's `scripting`; `dataplane` is set before the first model loads. now: the loop's clock."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.dataplane: Dataplane | None = None

    def __call__(self, session: PythonSession, message: Infer, body: memoryview) -> None:
        """Answer `message` in time, whatever happens."""
        try:
            self._begin(session, message, body)
        except (InferenceError, BadMessage, FrameError) as error:
            _tell(session, message, _refusal(error), final=True)

    def _begin(self, session: PythonSession, message: Infer, body: memoryview) -> None:
        behalf = [each for each in session.asked_by() if each.context is not None]
        if self.dataplane is None or not behalf:
            raise InvalidRequest("other models can only be asked on behalf of a client's request")
        if len(session.asks) >= MAX_ASKED:
            raise InvalidRequest(f"more than {MAX_ASKED} requests to other models are under way")
        chain = _chain(session, message, behalf, self.dataplane)
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

        def reply(completion: Completion) -> None:
            session.asks.pop(message.id, None)
            said = completion.response if completion.error is None else _refusal(completion.error)
            _tell(session, message, said, final=True)

        def emit(response: InferResponse, consumed: Callable[[], None]) -> None:
            _tell(session, message, response, final=False)
            consumed()

        session.asks[message.id] = lambda: None  # an answer may come before there is something to leave
        try:
            leave = self.dataplane.infer(
                request,
                context,
                size_bytes=len(body),
                reply=reply,
                left=reply,
                emit=emit if message.decoupled else None,
            )
        except (InferenceError, BadMessage):
            session.asks.pop(message.id, None)
            raise
        if message.id in session.asks:
            session.asks[message.id] = leave


def _chain(session: PythonSession, message: Infer, behalf: Sequence[Request], dataplane: Dataplane) -> tuple[str, ...]:
    before = max((each.asked.chain for each in behalf if isinstance(each.asked, ScriptedRequest)), key=len, default=())
    chain = (*before, session.launch.model)
    # An ensemble waits for its parts.
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


def _refusal(error: Exception) -> ResultHead:
    if isinstance(error, InferenceError):
        return ResultHead(error=(code_of(error), error.message))
    text = error.message if isinstance(error, BadMessage) else str(error)
    return ResultHead(error=(code_of(InvalidRequest("")), text[:500]))


def _tell(session: PythonSession, message: Infer, said: InferResponse | ResultHead | None, *, final: bool) -> None:
    body: list[Buffer] = []
    try:
        if isinstance(said, InferResponse):
            heads = tensor_parts([(each.name, each.datatype, each.array) for each in said.outputs], body)
            said = ResultHead(heads, said.parameters)
        session.inferred(Inferred(message.id, said, final), body)
    except (BadMessage, FrameError) as error:
        _log.warning("model %s: the answer of %s is lost: %s", session.launch.model, message.model[:64], error)
        failed = ResultHead(error=(code_of(BackendFailed("")), "the answer of the other model cannot be passed on"))
        session.inferred(Inferred(message.id, failed, final))
