"""The child's side: its two sockets, its requests, and which of them waits for what.

The main thread reads `work` and runs the model; the control thread reads `control`. Any thread may send. When the
server is gone, this process ends with everything it has started.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from weakref import WeakValueDictionary

from oriel_inference.backends.python.frames import AHEAD, decode, encode
from oriel_inference.backends.python.messages import (
    Cancel,
    Credit,
    Inferred,
    Message,
    RequestHead,
    Respond,
    ResultHead,
    Say,
)
from oriel_inference.backends.python.pb_errors import TritonModelException, printed
from oriel_wire.process import messages
from oriel_wire.process.messages import Assembler, Buffer
from oriel_wire.process.output import WINDOW_S, LogLimit

Inbox = Callable[[Inferred, memoryview], None]


class Pending:
    """State that a request shares with its response sender: its time limit, whether the caller waits, and what may be
    sent.

    It is deleted with the last of the two; a decoupled request that has no final response by then gets one.
    """

    def __init__(self, runtime: "Runtime", head: RequestHead, *, decoupled: bool) -> None:
        self.runtime = runtime
        self.head = head
        self.decoupled = decoupled
        self.final = False
        self.again = False  # the model wants to execute it once more
        self.reply: tuple[ResultHead, list[Buffer]] | None = None  # used unless the model is decoupled
        self._left = False
        self._deadline = head.deadline
        self._credit = AHEAD
        self._changed = threading.Condition() if decoupled else None

    def remaining_s(self) -> float:
        return self._deadline - time.monotonic()

    def cancelled(self) -> bool:
        return self._left or self.remaining_s() <= 0.0

    def caller_left(self) -> None:
        self._left = True
        self.grant(0)

    def grant(self, count: int) -> None:
        if self._changed is not None:
            with self._changed:
                self._credit += count
                self._changed.notify_all()

    def respond(self, result: ResultHead | None, body: list[Buffer], *, final: bool) -> None:
        """Send one response; waits while AHEAD of them are unread. A response whose caller has left is dropped."""
        if self.final:
            raise ValueError("the final response of this request has been sent")
        self.final = final
        if self._changed is None:
            if result is not None:
                self.reply = (result, body)
            return
        if result is not None:
            with self._changed:
                self._changed.wait_for(lambda: self._credit > 0 or self._left)
                self._credit -= 1
            if self._left:
                result, body = None, []
            else:
                self._deadline = max(self._deadline, min(self.head.ends, time.monotonic() + self.head.idle_s))
        if result is not None or final:
            self.runtime.send(Respond(self.head.id, result, final), body)

    def __del__(self) -> None:
        if self.decoupled and not self.final:
            # Not sent from here: this may run in any thread, even in the middle of a send of this thread.
            self.runtime.abandoned.put(Respond(self.head.id, None, True))


class Runtime:
    """The connection to the server. work, control: this side of the sockets."""

    def __init__(self, work: socket.socket, control: socket.socket) -> None:
        self._work = work
        self._control = control
        self._assembler = Assembler()
        self._frames: list[tuple[Message, memoryview]] = []
        self._sending = threading.Lock()
        self._saying = threading.RLock()  # reentrant: an object that is collected meanwhile may log something too
        self._limit = LogLimit()
        self._batch: dict[int, Pending] = {}  # in progress, unless the model is decoupled
        self._open: WeakValueDictionary[int, Pending] = WeakValueDictionary()  # in progress, if the model is decoupled
        self._left: set[int] = set()
        self._newest = -1
        self._table = threading.Lock()
        self._inboxes: dict[int, Inbox] = {}
        self._asks = 0
        self.max_body_bytes = 1 << 30
        self.executing = False
        self.iterative = False  # requests may be executed more than once
        self.abandoned: SimpleQueue[Message] = SimpleQueue()
        threading.Thread(target=self._listen, name="oriel-control", daemon=True).start()
        threading.Thread(target=self._bury, name="oriel-abandoned", daemon=True).start()

    def next(self) -> tuple[Message, memoryview]:
        """Return the next message of work; for the main thread."""
        if not self._frames:
            self._frames.extend(reversed(_read(self._work, self._assembler)))
        return self._frames.pop()

    def send(self, message: Message, body: Sequence[Buffer] = ()) -> None:
        """Send a message from any thread. Raises FrameError for one that is too large. If the server is gone, the
        process ends.
        """
        pieces = encode(message, body, max_body_bytes=self.max_body_bytes)
        with self._sending:
            try:
                messages.send(self._work, pieces)
            except OSError:
                _end()

    def say(self, level: int, text: str) -> None:
        """Send a line to the server's log. Lines beyond the share of this process are counted, and the count is
        reported.
        """
        text = printed(text)[:8000]
        with self._saying:
            had = self._limit.left_out
            wanted = self._limit.allows(level, text, time.monotonic())
        if wanted:
            self.send(Say(level, text))
        elif not had:
            later = threading.Timer(WINDOW_S, self.say_left_out)
            later.daemon = True
            with contextlib.suppress(RuntimeError):  # this process ends
                later.start()

    def say_left_out(self) -> None:
        """Report how many lines were left out since the last report."""
        with self._saying:
            counted = self._limit.counted()
        for level, text in counted:
            self.send(Say(level, text))

    def open(self, heads: Sequence[RequestHead], *, decoupled: bool) -> list[Pending]:
        """Register a batch that has just arrived."""
        batch = {head.id: Pending(self, head, decoupled=decoupled) for head in heads}
        with self._table:
            self._newest = max(self._newest, *batch)
            if decoupled:
                self._open.update(batch)
            else:
                self._batch = batch
            overtaken = self._left.intersection(batch)
            self._left -= overtaken
        for request in overtaken:
            batch[request].caller_left()
        return list(batch.values())

    def number(self) -> int:
        """Return a number that this process has not used yet."""
        with self._table:
            self._asks += 1
            return self._asks

    def result(self, make: Callable[[int], Message], body: Sequence[Buffer] = ()) -> ResultHead:
        """Ask the server something, and wait for its answer. Raises TritonModelException for an error."""
        answers: SimpleQueue[ResultHead | None] = SimpleQueue()
        self.ask(make, body, lambda message, _: answers.put(message.result))
        head = answers.get() or ResultHead()
        if head.error is not None:
            raise TritonModelException(head.error[1])
        return head

    def ask(self, make: Callable[[int], Message], body: Sequence[Buffer], inbox: Inbox) -> int:
        """Send a request to another model, or a question. inbox: receives the responses on the control thread; the last
        one has `final`.
        """
        number = self.number()
        self._inboxes[number] = inbox
        try:
            self.send(make(number), body)
        except Exception:
            del self._inboxes[number]
            raise
        return number

    def _listen(self) -> None:
        assembler = Assembler()
        while True:
            for message, body in _read(self._control, assembler):
                match message:
                    case Cancel():
                        self._cancel(message.request)
                    case Credit():
                        pending = self._open.get(message.request)
                        if pending is not None:
                            pending.grant(message.count)
                            del pending
                    case Inferred():
                        inbox = self._inboxes.pop(message.id) if message.final else self._inboxes[message.id]
                        inbox(message, body)
            message = body = None  # type: ignore[assignment]

    def _cancel(self, request: int) -> None:
        with self._table:
            pending = self._batch.get(request) or self._open.get(request)
            if pending is None and request > self._newest:
                self._left.add(request)  # the cancellation overtook the request itself
        if pending is not None:
            pending.caller_left()

    def _bury(self) -> None:
        while True:
            self.send(self.abandoned.get())


_current: Runtime | None = None


def connect(runtime: Runtime) -> None:
    """Set the runtime of this process, before the model is imported."""
    global _current
    _current = runtime


def current() -> Runtime:
    """Return the runtime of this process. Raises TritonModelException outside one."""
    if _current is None:
        raise TritonModelException("only the code of a model that the server runs can do this")
    return _current


def _read(link: socket.socket, assembler: Assembler) -> list[tuple[Message, memoryview]]:
    """Read at least one frame."""
    try:
        while not (frames := messages.receive(link, assembler)):
            pass
    except OSError:
        _end()
    return [(decode(head), body) for head, body in frames]


def _end() -> None:
    """Kill everything that was started here, because the server is gone."""
    os.killpg(0, signal.SIGKILL)
