"""The process of a language model: `python -m oriel_inference.language.child SERVER WORK CONTROL`.

Between two steps it does nothing but take the commands that have come, read the new tokens, and send one report. It
never waits for the server while sequences run. Errors of the engine end the process, which the server notices.
"""

import gc
import math
import os
import resource
import select
import socket
import sys
import time
import traceback
from contextlib import suppress
from importlib import import_module

from oriel_inference.backends import without_folders
from oriel_inference.backends.python.frames import encode
from oriel_inference.errors import LoadFailed
from oriel_inference.language import messages
from oriel_inference.language.engine import LanguageEngine, PromptRefused
from oriel_inference.language.messages import Progress, StepReport
from oriel_wire.process.messages import Assembler, receive, send
from oriel_wire.process.served import offer_to_oom_killer
from oriel_wire.process.start import end_with_parent

SLOW_S, SLOW_TIMES, SLOW_STEPS = 0.2, 5.0, 3
TOO_SLOW = "the guide makes each token slower than the one before: send one with fewer ways to match the same text"
MISSING = "language models need the package openvino-genai: pip install 'oriel-serving[language]'"


# name of an engine -> its module and class
ENGINES = {
    "openvino-genai": "oriel_inference.language.openvino:OpenVinoGenAi",
    "double": "oriel_inference.language.double:Double",
}


def make_engine(name: str) -> LanguageEngine:
    """Return the engine that configurations call `name`. Raises LoadFailed if its package is missing."""
    module, _, attribute = ENGINES[name].partition(":")
    try:
        engine: LanguageEngine = getattr(import_module(module), attribute)()
    except ImportError as error:
        raise LoadFailed(f"{MISSING} ({error})") from error
    return engine


def main() -> None:
    """Load a model and run its sequences until the server is gone."""
    server, work, control = (int(each) for each in sys.argv[1:4])
    end_with_parent(server)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    offer_to_oom_killer()
    for descriptor in (work, control):
        os.set_inheritable(descriptor, False)
    connection = _Connection(socket.socket(fileno=work))
    with suppress(ConnectionError):  # the server is gone
        (load,) = connection.take(wait=True)
        assert isinstance(load, messages.Load)
        try:
            engine = make_engine(load.engine)
            facts = engine.load(load.path, load.options)
        except Exception as error:
            # The readers of model files have no common base class for their exceptions.
            reason = error.reason if isinstance(error, LoadFailed) else f"{type(error).__name__}: {error}"
            connection.send(messages.Failed(without_folders(reason)[:400]))
            return
        gc.collect()
        gc.freeze()
        connection.send(messages.Loaded(facts))
        try:
            _StepLoop(engine, connection, load.options.step_tokens).run()
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # before the server sees the end of the socket, and would kill what is already ending


class _Connection:
    """The socket to the server."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._assembler = Assembler(max_body_bytes=0)
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def take(self, *, wait: bool) -> list[messages.Command]:
        """Return the commands that have come. wait: wait for the first one. Raises ConnectionError."""
        found: list[messages.Command] = []
        while self._poll.poll(None if wait and not found else 0):
            found += [messages.read_command(head) for head, _ in receive(self._socket, self._assembler)]
        return found

    def send(self, report: messages.Report) -> None:
        send(self._socket, encode(report))


class _StepLoop:
    """The sequences of an engine. Their numbers and what is left of their prompts, in the order of arrival."""

    def __init__(self, engine: LanguageEngine, connection: _Connection, step_tokens: int) -> None:
        self._engine = engine
        self._connection = connection
        self._step_tokens = step_tokens
        self._prompts: dict[int, int] = {}  # number -> tokens of its prompt still to be computed, as far as is known
        self._new: set[int] = set()  # those without a token
        self._guided: list[int] = []  # those with a guide
        self._usual_s = math.inf  # of steps in which nothing begins
        self._slow_steps = 0  # in a row

    def run(self) -> None:
        engine, connection, prompts = self._engine, self._connection, self._prompts
        while True:
            news: dict[int, Progress] = {}
            commands = connection.take(wait=not prompts)
            for command in commands:
                match command:
                    case messages.Add():
                        news[command.number] = self._add(command)
                    case messages.Cancel():
                        news.pop(command.number, None)
                        if command.number in prompts:
                            engine.cancel(self._forget(command.number))
            seconds, computed = 0.0, 0
            if prompts:
                is_plain = not self._new
                computed = self._compute_prompts()
                began = time.perf_counter()
                engine.step()
                seconds = time.perf_counter() - began
                self._read(news)
                if is_plain and self._is_slow(seconds) and self._guided:
                    number = self._forget(self._guided[-1])
                    engine.cancel(number)
                    news[number] = Progress(number, refused=TOO_SLOW)
            if commands or seconds:  # each command has a report behind it
                connection.send(StepReport(seconds, computed, engine.cache_use(), list(news.values())))

    def _add(self, command: messages.Add) -> Progress:
        number, prompt = command.number, command.prompt
        try:
            added = self._engine.add(number, prompt, command.sampling)
        except PromptRefused as refused:
            return Progress(number, refused=refused.text)
        self._prompts[number] = len(added.ids) - added.cached
        self._new.add(number)
        if command.sampling.guide is not None:
            self._guided.append(number)
        ids = list(added.ids) if isinstance(prompt, str) else []
        return Progress(number, prompt_tokens=len(added.ids), cached_tokens=added.cached, prompt=ids)

    def _compute_prompts(self) -> int:
        """Return how many prompt tokens the next step computes: in the order of arrival, up to the bound of a step."""
        left = self._step_tokens
        for number, waiting in self._prompts.items():
            taken = min(waiting, left)
            self._prompts[number] = waiting - taken
            left -= taken
        return self._step_tokens - left

    def _read(self, news: dict[int, Progress]) -> None:
        for number in list(self._prompts):
            try:
                piece = self._engine.read(number)
            except PromptRefused as refused:
                news[self._forget(number)] = Progress(number, refused=refused.text)
                continue
            if not (piece.ids or piece.finish):
                continue
            progress = news.setdefault(number, Progress(number))
            progress.ids, progress.logprobs, progress.finish = list(piece.ids), list(piece.logprobs), piece.finish
            self._prompts[number] = 0
            self._new.discard(number)
            if piece.finish:
                self._forget(number)

    def _is_slow(self, seconds: float) -> bool:
        """Return whether SLOW_STEPS in a row took SLOW_S, and SLOW_TIMES what steps take in which nothing begins: some
        guides make each token slower than the one before, and everybody's tokens wait for them.
        """
        self._usual_s = min(seconds, self._usual_s * 1.001)
        self._slow_steps = self._slow_steps + 1 if seconds > max(SLOW_S, SLOW_TIMES * self._usual_s) else 0
        return self._slow_steps >= SLOW_STEPS

    def _forget(self, number: int) -> int:
        del self._prompts[number]
        self._new.discard(number)
        self._guided = [each for each in self._guided if each != number]
        return number


if __name__ == "__main__":
    main()
