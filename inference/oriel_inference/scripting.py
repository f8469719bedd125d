"""Requests that Python models make of other models ("business logic scripting").

They run through the same dataplane as a client's, on behalf of the requests that the asking model works on: with the
latest of their deadlines, their most urgent band, and their tenant and tier where they agree. When nobody waits for any
of those any more, neither does this one. A model that is asked, directly or through others, by itself would wait for
its own instance: that is refused, and so are chains of more than MAX_CHAIN models.
"""

from collections.abc import Callable, Sequence

import msgspec

from oriel_inference.asked import Asked, refusal
from oriel_inference.backends import Request
from oriel_inference.backends.python.frames import (
    FrameError,
    read_tensors,
)
from oriel_inference.backends.python.messages import (
    Infer,
    Inferred,
)
from oriel_inference.backends.python.outcomes import code_of
from oriel_inference.backends.python.session import PythonSession
from oriel_inference.dataplane import Completion, Dataplane
from oriel_inference.errors import InferenceError, InvalidRequest
from oriel_wire.context import CallContext
from oriel_wire.errors import BadMessage
from oriel_wire.v2.messages import InferRequest, RequestedOutput, Tensor

__all__ = ["Scripting", "ScriptedRequest"]

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
        except InferenceError as error:
            session.inferred(Inferred(message.id, refusal(error.message, code_of(error)), True))
        except (BadMessage, FrameError) as error:
            text = error.message if isinstance(error, BadMessage) else str(error)
            session.inferred(Inferred(message.id, refusal(text, code_of(InvalidRequest(""))), True))

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

        asked = session.asks[message.id] = Asked(session, message)

        def reply(completion: Completion) -> None:
            asked.end(completion.error or completion.response)

        try:
            asked.give_up = self.dataplane.infer(
                request,
                context,
                size_bytes=len(body),
                reply=reply,
                left=reply,
                emit=asked.emit if message.decoupled else None,
            )
        except (InferenceError, BadMessage):
            session.asks.pop(message.id, None)
            raise


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
