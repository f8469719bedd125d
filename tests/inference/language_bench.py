"""A language model in virtual time: the scheduler, and the double of an engine behind a decoder without a process."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from oriel_inference.backends import Outputs
from oriel_inference.batching.call import Answer, Call
from oriel_inference.batching.cores import Cores
from oriel_inference.batching.machine import Machine
from oriel_inference.batching.statistics import Statistics
from oriel_inference.clock import VirtualClock
from oriel_inference.errors import InferenceError
from oriel_inference.language.double import BEGIN, Double, next_token
from oriel_inference.language.engine import Options, PromptRefused, Sampling
from oriel_inference.language.messages import Progress, StepReport
from oriel_inference.language.scheduler import LanguageScheduler
from oriel_inference.model import ModelSpec, TensorSpec
from oriel_wire.context import CallContext
from oriel_wire.observe.trace import new_trace
from oriel_wire.v2.messages import InferRequest, RequestedOutput

from .manual_workers import ManualWorkers

OUTPUTS = ("text_output", "output_ids", "finish_reason", "logprobs", "num_input_tokens", "num_output_tokens")
SPEC = ModelSpec(
    name="chat",
    version=1,
    platform="",
    backend="language",
    max_batch_size=0,
    inputs=(),
    outputs=tuple(TensorSpec(name=name, datatype="BYTES", dims=(1,)) for name in OUTPUTS),
    bounds=None,
    decoupled=True,
)


class VirtualDecoder:
    """A decoder whose child steps in virtual time. As the real one, it begins the next step before the report of the
    last one is read, and takes commands only between two steps.

    fixed_s, sequence_s, prompt_s: time of a step, of each sequence in it, and of each prompt token.
    sizes: sequences of each step.
    """

    def __init__(
        self, clock: VirtualClock, options: Options, *, fixed_s: float, sequence_s: float, prompt_s: float
    ) -> None:
        self.fixed_s, self.sequence_s, self.prompt_s = fixed_s, sequence_s, prompt_s
        self._clock, self._options = clock, options
        self.is_ready, self.retry_s = True, 0.0
        self.on_step = self.on_end = self.on_ready = lambda *_: None
        self.sizes: list[int] = []
        self._start()

    def _start(self) -> None:
        self._engine = Double()
        self.facts = self._engine.load("/dev/null", self._options)
        self._prompts: dict[int, int] = {}
        self._commands: list[tuple[int, object, Sampling | None]] = []
        self._life = object()
        self._steps = False

    def add(self, number: int, prompt: str | Sequence[int], sampling: Sampling) -> None:
        assert self.is_ready
        self._send((number, prompt, sampling))

    def cancel(self, number: int) -> None:
        self._send((number, None, None))

    def _send(self, command: tuple[int, object, Sampling | None]) -> None:
        self._commands.append(command)
        if not self._steps:
            self._steps = True
            self._clock.call_soon(self._begin)

    def die(self) -> None:
        """End the process, and start the next one when `restart` is called."""
        self._start()
        self.is_ready = False
        self.on_end("signal 9")

    def restart(self) -> None:
        self.is_ready = True
        self.on_ready()

    def _begin(self) -> None:
        """Take the commands, and begin a step if anything runs."""
        news: dict[int, Progress] = {}
        commands, self._commands = self._commands, []
        for number, prompt, sampling in commands:
            if sampling is None:
                news.pop(number, None)
                if self._prompts.pop(number, None) is not None:
                    self._engine.cancel(number)
                continue
            try:
                added = self._engine.add(number, prompt, sampling)
            except PromptRefused as refused:
                news[number] = Progress(number, refused=refused.text)
                continue
            self._prompts[number] = len(added.ids) - added.cached
            ids = list(added.ids) if isinstance(prompt, str) else []
            news[number] = Progress(number, prompt_tokens=len(added.ids), cached_tokens=added.cached, prompt=ids)
        self._steps = bool(self._prompts)
        if not self._steps:
            if news:
                self.on_step(StepReport(0.0, 0, 0.0, list(news.values())))
            return
        left = self._options.step_tokens
        for number, waiting in self._prompts.items():
            taken = min(waiting, left)
            self._prompts[number] -= taken
            left -= taken
        computed, life = self._options.step_tokens - left, self._life
        seconds = self.fixed_s + self.sequence_s * len(self._prompts) + self.prompt_s * computed
        self.sizes.append(len(self._prompts))
        self._clock.call_at(self._clock.now() + seconds, lambda: self._end(life, news, seconds, computed))

    def _end(self, life: object, news: dict[int, Progress], seconds: float, computed: int) -> None:
        if life is not self._life:
            return
        self._engine.step()
        for number in list(self._prompts):
            piece = self._engine.read(number)
            if piece.ids:
                found = news.setdefault(number, Progress(number))
                found.ids, found.logprobs, found.finish = list(piece.ids), list(piece.logprobs), piece.finish
            if piece.finish:
                del self._prompts[number]
        report = StepReport(seconds, computed, self._engine.cache_use(), list(news.values()))
        if self._prompts or self._commands:
            self._begin()
        else:
            self._steps = False
        self.on_step(report)


@dataclass(eq=False)
class Asked:
    """A call and what came back. times: of its responses. result: the reply."""

    call: Call
    prompt: Sequence[int]
    sampling: Sampling
    responses: list[Outputs] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    unread: list[object] = field(default_factory=list)
    replies: list[Answer | InferenceError] = field(default_factory=list)
    left: bool = False

    @property
    def text(self) -> str:
        return b"".join(each[0][0] for each in self.responses).decode()

    @property
    def ids(self) -> list[int]:
        return [int(token) for each in self.responses if each[1] is not None for token in each[1]]

    @property
    def result(self) -> Answer | InferenceError:
        assert len(self.replies) == 1, f"{len(self.replies)} replies"
        return self.replies[0]

    @property
    def ending(self) -> dict[str, object]:
        """The parameters of the last response."""
        return self.responses[-1].parameters

    @property
    def undisturbed(self) -> list[int]:
        """The tokens of the answer if nothing interrupts it."""
        ids = list(self.prompt)
        for _ in range(self.sampling.max_tokens):
            ids.append(next_token(ids, 0))
            if ids[-1] == BEGIN + 1:
                break
        return ids[len(self.prompt) :]


class LanguageBench:
    """A language model with calls in virtual time."""

    def __init__(
        self,
        *,
        fixed_s: float = 0.008,
        sequence_s: float = 0.001,
        prompt_s: float = 0.0001,
        max_items: int = 1000,
        **options: int,
    ) -> None:
        self.clock = VirtualClock()
        opts = Options(**{"max_running": 4, "step_tokens": 256, **options})  # type: ignore[arg-type]
        self.decoder = VirtualDecoder(self.clock, opts, fixed_s=fixed_s, sequence_s=sequence_s, prompt_s=prompt_s)
        self.machine = Machine(clock=self.clock, cores=Cores(4), workers=ManualWorkers(), max_items=max_items)
        self.statistics = Statistics()
        self.served = LanguageScheduler(SPEC, self.decoder, opts, self.machine, self.statistics)
        self.asked: list[Asked] = []

    def ask(
        self,
        prompt: str | Sequence[int] = "a prompt",
        *,
        band: int = 0,
        tenant: str = "t",
        timeout_s: float = 60.0,
        stream: bool = True,
        token_s: float = 0.0,
        stream_s: float = 0.0,
        reads: bool = True,
        outputs: Sequence[str] | None = None,
        inputs: dict[str, object] | None = None,
        **sampling: object,
    ) -> Asked:
        """Submit a call. reads: its reader takes responses at once."""
        now = self.clock.now()
        ids = list(prompt.encode()) if isinstance(prompt, str) else list(prompt)
        chosen = Sampling(**{"max_tokens": 40, **sampling})
        context = CallContext(
            request_id="r",
            deadline=now + timeout_s,
            tier="gold" if not band else "bronze",
            band=band,
            tenant=tenant,
            models=(),
            trace=new_trace(False),
            token_s=token_s,
            stream_s=stream_s,
        )
        request = InferRequest(model_name="chat", parameters=dict(sampling))
        request.parameters["max_tokens"] = chosen.max_tokens
        request.outputs = None if outputs is None else [RequestedOutput(name) for name in outputs]
        given = {"input_ids": np.array(ids, np.int64), "stream": np.array([stream])} if inputs is None else inputs
        call = Call(
            inputs=given,
            rows=1,
            signature=None,
            arrived_s=now,
            deadline=context.deadline,
            reply=lambda _: None,
            band=band,
            tenant=tenant,
            source=(request, context),
            usage=self.served.accounts.of(context),
        )
        asked = Asked(call, ids, chosen)

        def emit(outputs: Outputs, consumed: object) -> None:
            asked.responses.append(outputs)
            asked.times.append(self.clock.now())
            if reads:
                consumed()
            else:
                asked.unread.append(consumed)

        call.emit, call.reply = emit, asked.replies.append
        self.asked.append(asked)
        self.served.submit(call)
        return asked

    def leave(self, asked: Asked) -> None:
        asked.left = self.served.caller_left(asked.call)

    def run(self, seconds: float) -> None:
        self.clock.advance(seconds)

    def settle(self, most_s: float = 600.0) -> None:
        """Run until every call has ended."""
        ends = self.clock.now() + most_s
        while any(not (each.replies or each.left) for each in self.asked):
            assert self.clock.now() < ends, "calls did not end"
            self.clock.advance(0.1)

    def warm(self) -> None:
        """Teach it the times of its steps and answers."""
        for count in (1, 2, 4, 4, 4, 4, 4, 4):
            for _ in range(count):
                self.ask(f"{len(self.asked)} warm up " * 4, max_tokens=30)
            self.settle()
