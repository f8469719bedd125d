"""One request that a Python model makes of another model, and the responses on their way to it. Everything on the loop.

The other model goes on when the asking one has taken a response. What is not taken lies in the asking process, at most
AHEAD_BYTES of it and at least one response, and here; the other model's own bound on responses that are not consumed
holds for both together.
"""

import logging
from collections import deque
from collections.abc import Callable

from oriel_inference.backends.python.frames import Buffer, FrameError, tensor_parts
from oriel_inference.backends.python.messages import Infer, Inferred, ResultHead
from oriel_inference.backends.python.outcomes import code_of
from oriel_inference.backends.python.session import PythonSession
from oriel_inference.errors import BackendFailed, InferenceError
from oriel_wire.errors import BadMessage
from oriel_wire.v2.messages import InferResponse

__all__ = ["Asked", "refusal"]

_log = logging.getLogger(__name__)

AHEAD_BYTES = 16 << 20

_LOST = "the answer of the other model cannot be passed on"


class Asked:
    """give_up: what ends the request, once there is something to end."""

    def __init__(self, session: PythonSession, message: Infer) -> None:
        self._session = session
        self._message = message
        self._unsent: deque[tuple[ResultHead, list[Buffer], int, Callable[[], None]]] = deque()
        self._sent: deque[tuple[int, Callable[[], None]]] = deque()
        self._sent_bytes = 0
        self._last: tuple[ResultHead | None, list[Buffer]] | None = None
        self.over = False
        self.give_up: Callable[[], None] = lambda: None

    def emit(self, response: InferResponse, consumed: Callable[[], None], last: bool) -> None:
        """One response of several; the end is said by `end`. Raises BackendFailed if it cannot be passed on."""
        if self.over:
            return
        head, body = _encoded(response)
        self._unsent.append((head, body, sum(map(len, body)), consumed))
        self._push()

    def end(self, said: InferResponse | InferenceError | None) -> None:
        """Nothing follows. An error is said before what is still here."""
        if isinstance(said, InferResponse):
            try:
                self._last = _encoded(said)
            except BackendFailed as lost:
                said = lost
        elif said is None:
            self._last = None, []
        if isinstance(said, InferenceError):
            self._unsent.clear()
            self._last = refusal(said.message, code_of(said)), []
        self._push()

    def taken(self, count: int) -> None:
        """The asking model has taken so many responses."""
        for _ in range(min(count, len(self._sent))):
            size, consumed = self._sent.popleft()
            self._sent_bytes -= size
            consumed()
        self._push()

    def leave(self) -> None:
        """Nobody wants more."""
        self._unsent.clear()
        self.give_up()
        self._push()

    def _push(self) -> None:
        while self._unsent and not self.over:
            head, body, size, consumed = self._unsent[0]
            if self._sent and self._sent_bytes + size > AHEAD_BYTES:
                return
            self._unsent.popleft()
            self._sent.append((size, consumed))
            self._sent_bytes += size
            self._tell(head, body, final=False)
        if self._last is not None and not self.over:
            self._tell(*self._last, final=True)

    def _tell(self, result: ResultHead | None, body: list[Buffer], *, final: bool) -> None:
        lost = False
        try:
            self._session.inferred(Inferred(self._message.id, result, final), body)
        except FrameError as error:
            _log.warning(
                "model %s: the answer of %s is lost: %s", self._session.launch.model, self._message.model[:64], error
            )
            lost = True
            self._session.inferred(Inferred(self._message.id, refusal(_LOST, code_of(BackendFailed(""))), True))
        if final or lost:
            self.over = True
            self._session.asks.pop(self._message.id, None)
        if lost:
            self.give_up()


def refusal(text: str, code: int) -> ResultHead:
    """An answer that is an error."""
    return ResultHead(error=(code, text[:500]))


def _encoded(response: InferResponse) -> tuple[ResultHead, list[Buffer]]:
    body: list[Buffer] = []
    try:
        heads = tensor_parts([(each.name, each.datatype, each.array) for each in response.outputs], body)
    except BadMessage as error:
        raise BackendFailed(_LOST) from error
    return ResultHead(heads, response.parameters), body
