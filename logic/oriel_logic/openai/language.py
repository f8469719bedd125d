"""`/v1/chat/completions`, `/v1/completions` and `/v1/responses` with a language model of an inference server.

The model is decoupled, with the tensors of Triton's vLLM back end: `text_input` or `input_ids` and
`sampling_parameters` in, `text_output` out, one answer per step; the last one's parameters say why it ended and how
many tokens it was. Chat template and control tokens are parameters of its configuration.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

import msgspec
import numpy as np

from oriel_logic.bodies.schemas import EVENTS
from oriel_logic.client.models import ArrayLike
from oriel_logic.errors import DeadlineExceeded, ModelFailed, ModelInputWrong, ModelUnavailable, ParameterWrong
from oriel_logic.loading.sources import HandlerFile
from oriel_logic.openai import schema, templates
from oriel_logic.openai.answers import Answer, Delta, encode
from oriel_logic.openai.reading import THINK, Reader
from oriel_logic.openai.responses import ResponseAnswer, chat_of
from oriel_logic.openai.served import Served, Tools
from oriel_logic.server.replies import Reply
from oriel_logic.services.serving import for_function
from oriel_wire.errors import BadMessage
from oriel_wire.v2.depth import check_depth

STAGE = "decode"
ENDS = ("stop", "length")
COMPLETION_TOKENS = 16  # default of `max_tokens` in OpenAI's completions API
KEEP_ALIVE_S = 10.0  # a comment is sent so often, because gateways and proxies end silent streams
KEEP_ALIVE = b": the next token is awaited\n\n"
MAX_TOKENS, MAX_SEED = 1 << 20, (1 << 63) - 1  # as inference servers take them
RENDER_S, RENDER_MB = 5.0, 512
RENDER = for_function(templates.render)
_SAMPLING = ("temperature", "top_p", "top_k", "seed", "frequency_penalty", "presence_penalty")


class LanguageModel(Served):
    """Serves one language model: `chat = LanguageModel(model="chat", served_as="smollm2-135m")`."""

    def problem(self) -> str:
        missing = find_spec("jinja2") is None
        return "it needs the package jinja2: pip install 'oriel-serving[embeddings]'" if missing else ""

    def __oriel_preload__(self, file: HandlerFile) -> None:
        """Import jinja2 in the fork server, so that its workers share it."""
        if not self.problem():
            templates.compiled("")

    async def complete(self, request: schema.CompletionRequest, tools: Tools) -> Reply:
        """Answer `/v1/completions`. Raises ParameterWrong, and what models raise."""
        prompts = schema.texts_or_tokens(request.prompt, "prompt", most=schema.MAX_PROMPTS)
        sampling = sampling_of(request, request.max_tokens or COMPLETION_TOKENS)
        run = Run(self, tools, request, prompts, sampling, "prompt")
        return await run.answer(Answer(request, tools.visit.call, self.served_as))

    async def converse(self, request: schema.ChatRequest, tools: Tools) -> Reply:
        """Answer `/v1/chat/completions`. Raises the same, and what workers raise."""
        run = await self._chat(request, tools, "messages")
        return await run.answer(Answer(request, tools.visit.call, self.served_as))

    async def respond(self, request: schema.ResponseRequest, tools: Tools) -> Reply:
        """Answer `/v1/responses`. Raises the same."""
        run = await self._chat(chat_of(request), tools, "input")
        return await run.answer(ResponseAnswer(request, tools.visit.call, self.served_as))

    async def _chat(self, request: schema.ChatRequest, tools: Tools, param: str) -> "Run":
        """Make the prompt of a chat. param: the name of the messages in the request."""
        known = await tools.models.parameters(self.model, version=self.version)
        template = known.get("oriel.chat_template")
        if template is None:
            raise ModelUnavailable(f"model '{self.model}' is no language model, or is not loaded", retry_after_s=1.0)
        if not template:
            raise ParameterWrong(f"'{self.served_as}' has no chat template: use /v1/completions", param="model")
        offered = [] if request.tool_choice == "none" else request.tools or []
        more = {**(request.chat_template_kwargs or {})}
        more |= {"reasoning_effort": request.reasoning_effort} if request.reasoning_effort else {}
        given = known, [as_given(each) for each in request.messages], msgspec.to_builtins(offered) or None, more
        bounds = {"run_s": RENDER_S, "memory_mb": RENDER_MB}
        try:
            prompt: str = await tools.context.work(RENDER, given, "render", **bounds)
        except ParameterWrong as error:
            raise ParameterWrong(error.message, param=param) from None
        most = request.max_completion_tokens or request.max_tokens or int(known.get("oriel.context", MAX_TOKENS))
        sampling = sampling_of(request, most)
        forced, guide = guide_of(request)
        if guide is not None:
            sampling["guide"] = {"kind": "json_schema", "text": encode(guide).decode()}
        names = frozenset(each.function.name for each in offered)
        begun = guide is None and prompt.rstrip().endswith(THINK)
        thinks = guide is None and THINK in template
        reader = partial(Reader, tools=names, forced=forced, thinks=thinks, in_thought=begun)
        guided = "tools" if forced else "text" if param == "input" else "response_format"
        return Run(self, tools, request, [prompt], sampling, param, reader, guided)


@dataclass(slots=True)
class Run:
    """The model calls of one request: each prompt is continued `n` times.

    prompts: texts, or arrays of token ids. param: their name in the request.
    sampling: the parameters as the model takes them.
    reader: makes the reader of one answer. guided: the parameter that a guide of the answer comes from.
    prompt, cached, completion: tokens so far; a prompt counts once, however many answers it has.
    """

    served: LanguageModel
    tools: Tools
    request: schema.Generation
    prompts: Sequence[str | Sequence[int]]
    sampling: dict[str, Any]
    param: str
    reader: Callable[[], Reader] = Reader
    guided: str = ""
    prompt: int = 0
    cached: int = 0
    completion: int = 0
    _waiting: asyncio.Queue[Delta | None] = field(default_factory=asyncio.Queue)

    async def answer(self, form: Answer | ResponseAnswer) -> Reply:
        if self.request.stream:
            return Reply(status=200, content_type=EVENTS, pieces=self._events(form), is_bounded=True)
        with self.tools.visit.ledger.stage(STAGE):
            async with aclosing(self._deltas()) as coming:
                deltas = [each async for each in coming if each is not None]
        return Reply(status=200, body=encode(form.whole(deltas, self._usage())))

    def _usage(self) -> schema.Usage:
        """Return the tokens so far; the request is accounted for them. A prompt counts once."""
        visit = self.tools.visit
        visit.ledger.tokens_in, visit.ledger.tokens_out = self.prompt, self.completion
        visit.tokens = visit.target, self.prompt, self.completion, self.cached
        return schema.usage(self.prompt, self.completion, self.cached)

    async def _events(self, form: Answer | ResponseAnswer) -> AsyncGenerator[bytes, None]:
        """Yield the answer as server-sent events, and comments, so that no pause of the model ends the stream."""
        with self.tools.visit.ledger.stage(STAGE):
            async with aclosing(self._deltas(form)) as deltas:
                async for delta in deltas:
                    piece = KEEP_ALIVE if delta is None else form.events(delta)
                    if piece:
                        yield piece
        yield form.closing(self._usage())

    def _deltas(self, form: Answer | ResponseAnswer | None = None) -> AsyncGenerator[Delta | None, None]:
        """Return the generator of all that the model says, of several answers as it comes.

        form: the form of the events, if the answer is streamed: tokens that wait for nothing are written at once then,
        and are not yielded.
        """
        count = len(self.prompts) * (self.request.n or 1)
        return merged([self._one(index, form) for index in range(count)], self._waiting)

    def _pass_on(self, form: Answer | ResponseAnswer, index: int, reader: Reader, token: bytes) -> bool:
        """Write a token as it comes and return True; False if others come first, or the client does not read."""
        write, text = self.tools.visit.write, str(token, "utf-8", "replace")
        if write is None or not self._waiting.empty() or not text or not reader.is_plain(text):
            return False
        return write(lambda: form.events(Delta(index, reader.feed(text))))

    async def _one(self, index: int, form: Answer | ResponseAnswer | None) -> AsyncGenerator[Delta, None]:
        served, sampling, reader, finish = self.served, self.sampling, self.reader(), ""
        place, choice = divmod(index, self.request.n or 1)
        prompt, has_logprobs = self.prompts[place], "logprobs" in sampling
        if "seed" in sampling:
            sampling = {**sampling, "seed": (sampling["seed"] + choice) & MAX_SEED}
        streams = bool(self.request.stream)
        inputs: dict[str, ArrayLike] = {"stream": [streams], "sampling_parameters": [encode(sampling)]}
        inputs |= {} if streams else {"exclude_input_in_output": [True]}
        inputs |= {"text_input": [prompt]} if isinstance(prompt, str) else {"input_ids": np.array(prompt, np.int64)}
        inputs |= {"return_logprobs": [True]} if has_logprobs else {}
        outputs = ["text_output", "logprobs"] if has_logprobs else ["text_output"]
        tap = None if form is None else partial(self._pass_on, form, index, reader)
        stream = self.tools.models.stream(served.model, inputs, outputs=outputs, version=served.version, tap=tap)
        try:
            async with aclosing(stream):
                async for answer in stream:
                    self.tools.visit.first_s = self.tools.visit.first_s or time.monotonic()
                    facts = answer.parameters
                    finish = str(facts.get("finish_reason", ""))
                    if finish:
                        self.completion += int(facts.get("completion_tokens", 0))
                        self.prompt += 0 if choice else int(facts.get("prompt_tokens", 0))
                        self.cached += 0 if choice else int(facts.get("cached_tokens", 0))
                    parts = reader.feed(text_of(answer, "text_output"), last=bool(finish))
                    logprobs = msgspec.json.decode(text_of(answer, "logprobs") or "[]") if has_logprobs else None
                    yield Delta(index, parts, logprobs, finish if finish in ENDS else "")
        except ModelInputWrong as error:
            code = "context_length_exceeded" if "the prompt has" in error.message else None
            param = self.guided if self.guided and "the guide " in error.message else self.param
            raise ParameterWrong(error.message, param=param, code=code) from error
        if finish == "deadline":
            raise DeadlineExceeded(STAGE, "the answer was cut at its deadline: allow more time or ask for fewer tokens")
        if finish not in ENDS:
            raise ModelFailed(f"model '{served.model}' ended its answer with {finish or 'no reason'}")


def text_of(answer: Mapping[str, Any], name: str) -> str:
    """Return the text of an output; "" for one that this answer does not have."""
    found = answer.get(name)
    return str(found.item(), "utf-8", "replace") if found is not None and found.size else ""


def as_given(message: Any) -> dict[str, Any]:
    """Return a message as chat templates read it: arguments of calls as objects, no field that is absent."""
    role = "system" if message.role == "developer" else message.role
    found: dict[str, Any] = {**msgspec.to_builtins(message), "role": role, "content": message.text}
    if message.tool_calls:
        for each in found["tool_calls"]:
            text = each["function"]["arguments"].encode()
            try:
                check_depth(text)
                each["function"]["arguments"] = msgspec.json.decode(text)
            except (msgspec.DecodeError, BadMessage, RecursionError):
                continue  # it stays the text that the model wrote
    return found


def guide_of(request: schema.ChatRequest) -> tuple[str, dict[str, Any] | None]:
    """Return the tool that has to be called ("*": any, "": none has to), and the JSON schema of the whole answer."""
    chosen, form = request.tool_choice, request.response_format
    schemas = {each.function.name: each.function.parameters or {"type": "object"} for each in request.tools or ()}
    if isinstance(chosen, schema.NamedTool):
        return chosen.function.name, schemas[chosen.function.name]
    if chosen == "required":
        call = {"type": "object", "required": ["name", "arguments"], "additionalProperties": False}
        called = [{"name": {"const": name}, "arguments": schema} for name, schema in schemas.items()]
        calls = [{**call, "properties": each} for each in called]
        return "*", calls[0] if len(calls) == 1 else {"anyOf": calls}
    if form is None or form.type == "text":
        return "", None
    return "", form.json_schema.schema if form.json_schema is not None else {"type": "object"}


def sampling_of(request: schema.ChatRequest | schema.CompletionRequest, most: int) -> dict[str, Any]:
    """Return the sampling parameters. most: bound on the tokens of the answer."""
    found = {name: value for name in _SAMPLING if (value := getattr(request, name)) is not None}
    if request.logprobs is not None and request.logprobs is not False:
        found["logprobs"] = 0
    return {**found, "max_tokens": min(most, MAX_TOKENS), "stop": schema.stops_of(request.stop)}


async def merged(
    streams: Sequence[AsyncGenerator[Delta, None]], queue: asyncio.Queue[Delta | None]
) -> AsyncGenerator[Delta | None, None]:
    """Yield what several generators yield as it comes, and None from time to time. The first error ends all of them.

    queue: holds what was not taken yet.
    """

    async def drain(stream: AsyncGenerator[Delta, None]) -> None:
        async with aclosing(stream):
            async for each in stream:
                queue.put_nowait(each)

    async def remind() -> None:
        while True:
            await asyncio.sleep(KEEP_ALIVE_S)
            queue.put_nowait(None)

    def note_end(ended: asyncio.Future[list[None]]) -> None:
        if not ended.cancelled():
            ended.exception()  # otherwise asyncio logs an error for each caller that leaves
        queue.put_nowait(None)

    tasks = [asyncio.create_task(drain(each)) for each in streams]
    together = asyncio.gather(*tasks)
    together.add_done_callback(note_end)
    tasks.append(asyncio.create_task(remind()))
    try:
        while (found := await queue.get()) is not None or not together.done() or not queue.empty():
            yield found
        await together
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
