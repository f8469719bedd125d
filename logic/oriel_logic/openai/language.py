"""`/v1/completions` and `/v1/chat/completions`: tokenizes the prompt (in a worker), decodes, and streams the text."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from oriel_logic.errors import DeadlineExceeded, HandlerFailed, ParameterWrong
from oriel_logic.openai import answers, chat, tokenizer
from oriel_logic.openai.answers import DONE, EVENT_STREAM, event
from oriel_logic.openai.decoder import TokenModel, generate, token_model
from oriel_logic.openai.detokenize import Vocabulary
from oriel_logic.openai.sampling import Sampling
from oriel_logic.openai.schema import (
    MAX_PROMPTS,
    ChatRequest,
    CompletionRequest,
    Generation,
    Usage,
    stops_of,
    texts_or_tokens,
)
from oriel_logic.openai.sequence import Delta
from oriel_logic.openai.sequence import Sequence as Generated
from oriel_logic.openai.served import Served, Tools
from oriel_logic.server.failures import failed
from oriel_logic.server.replies import Reply, facts_of

_log = logging.getLogger(__name__)
STAGE = "decode"
COMPLETION_TOKENS = 16  # default of `max_tokens` in OpenAI's completions API
Ids = NDArray[Any]


class LanguageModel(Served):
    """Serves one language model whose ONNX export leaves its attention cache to the caller (decoder.py):

            tiny = LanguageModel(model="tiny", tokenizer="tiny/tokenizer.json", ends=["<|im_end|>"], max_context=2048)

    ends: control tokens that end an answer.
    max_context: tokens of prompt and answer together.
    max_answer: tokens of one answer at most, and of a chat that sets no number.
    chat_template: "chatml", a Jinja file beside the handler file, or "" for a model without /v1/chat/completions.
    start: the template's `bos_token`.
    """

    def __init__(
        self,
        *,
        model: str,
        tokenizer: str | Path,
        ends: Sequence[str],
        max_context: int,
        served_as: str = "",
        version: str = "",
        max_answer: int = 1024,
        chat_template: str = chat.CHATML,
        start: str = "",
    ) -> None:
        super().__init__(model=model, tokenizer=tokenizer, served_as=served_as, version=version)
        self.ends = tuple(ends)
        self.max_context = max_context
        self.max_answer = max_answer
        self.chat_template = chat_template
        self.start = start
        self._vocabulary: Vocabulary | None = None

    def locate(self, folder: Path) -> None:
        super().locate(folder)
        if self.chat_template not in ("", chat.CHATML):
            self.chat_template = str((folder / self.chat_template).absolute())

    def problem(self) -> str:
        problem = super().problem() or chat.missing(self.chat_template)
        if not problem and self.ends:
            problem = tokenizer.without_control(self.tokenizer, self.ends)
        return problem

    async def complete(self, request: CompletionRequest, tools: Tools) -> Reply:
        """Answer `/v1/completions`. Raises ParameterWrong, and what workers and models raise."""
        given = texts_or_tokens(request.prompt, "prompt", most=MAX_PROMPTS)
        prompts = await self.encode(tools, given, "prompt")
        answer = answers.Answer(answers.COMPLETION, tools.visit.call.request_id, self.served_as, int(time.time()))
        return await self._answer(request, prompts, request.max_tokens or COMPLETION_TOKENS, "prompt", answer, tools)

    async def converse(self, request: ChatRequest, tools: Tools) -> Reply:
        """Answer `/v1/chat/completions`. Raises the same."""
        if not self.chat_template:
            raise ParameterWrong(f"'{self.served_as}' is not a model for chat: use /v1/completions", param="model")
        chat_messages = [{"role": each.role, "content": each.text} for each in request.messages]
        found = await tools.context.run(
            chat.encode_chat, str(self.tokenizer), self.chat_template, self.start, chat_messages
        )
        if found.problem:
            raise ParameterWrong(found.problem, param="messages")
        answer = answers.Answer(answers.CHAT, tools.visit.call.request_id, self.served_as, int(time.time()))
        most = request.max_completion_tokens or request.max_tokens
        return await self._answer(request, [found.ids], most, "messages", answer, tools)

    async def _answer(
        self,
        request: Generation,
        prompts: Sequence[Ids],
        most: int | None,
        param: str,
        answer: answers.Answer,
        tools: Tools,
    ) -> Reply:
        vocabulary = await self._known(tools)
        count = request.n or 1
        run = Run(
            model=token_model(await tools.models.metadata(self.model, version=self.version), self.version),
            prompts=prompts,
            choices=[
                [
                    self._choice(request, index * count + choice, choice, vocabulary, self._room(prompt, most, param))
                    for choice in range(count)
                ]
                for index, prompt in enumerate(prompts)
            ],
            tools=tools,
        )
        if request.stream:
            answer.tells_usage = request.stream_options is not None and bool(request.stream_options.include_usage)
            return Reply(status=200, content_type=EVENT_STREAM, pieces=run.events(answer))
        texts = await run.texts()
        finishes = [choice.finish for each in run.choices for choice in each]
        return Reply(status=200, body=answers.written(answer.whole(texts, finishes, run.usage())))

    def _room(self, prompt: Ids, most: int | None, param: str) -> int:
        """Return the number of tokens that the answer to this prompt may have. Raises ParameterWrong if it does not
        fit.
        """
        left = self.max_context - len(prompt)
        if not len(prompt):
            raise ParameterWrong(f"'{param}' has no tokens: there is nothing to continue", param=param)
        if left < (most or 1):
            raise ParameterWrong(
                f"this model's maximum context length is {self.max_context} tokens; you asked for "
                f"{len(prompt) + (most or 1)} ({len(prompt)} in the {param}, {most or 1} in the completion): "
                "shorten one of them",
                param=param,
                code="context_length_exceeded",
            )
        if most is not None and most > self.max_answer:
            raise ParameterWrong(f"an answer may have {self.max_answer} tokens here, not {most}", param="max_tokens")
        return most or min(left, self.max_answer)

    def _choice(self, request: Generation, index: int, choice: int, vocabulary: Vocabulary, most: int) -> Generated:
        sampling = Sampling(
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            top_k=request.top_k or 0,
            seed=request.seed,
            frequency_penalty=request.frequency_penalty or 0.0,
            presence_penalty=request.presence_penalty or 0.0,
            bias={int(token): bias for token, bias in (request.logit_bias or {}).items()},
        )
        return Generated(
            index,
            vocabulary,
            sampling,
            stops=stops_of(request.stop),
            ends={vocabulary.named[each] for each in self.ends},
            most=most,
            choice=choice,
        )

    async def _known(self, tools: Tools) -> Vocabulary:
        """Get the vocabulary from a worker, once. Raises HandlerFailed if `ends` names a text that is not a control
        token.
        """
        if self._vocabulary is None:
            found = await tools.context.run(tokenizer.vocabulary, str(self.tokenizer))
            unknown = [each for each in self.ends if each not in found.named]
            if unknown:
                raise HandlerFailed(f"the tokenizer of '{self.served_as}' has no control token {', '.join(unknown)}")
            self._vocabulary = found
        return self._vocabulary


class Run:
    """The generation of one request. choices: for each prompt, the choices that continue it."""

    def __init__(
        self, *, model: TokenModel, prompts: Sequence[Ids], choices: Sequence[Sequence[Generated]], tools: Tools
    ) -> None:
        self.choices = choices
        self._model = model
        self._prompts = prompts
        self._tools = tools

    def usage(self) -> Usage:
        """Return the tokens so far; the request is accounted for them."""
        prompt = sum(map(len, self._prompts))
        answer = sum(choice.count for each in self.choices for choice in each)
        ledger = self._tools.visit.ledger
        ledger.tokens_in, ledger.tokens_out = prompt, answer
        self._tools.visit.tokens = self._tools.visit.target, prompt, answer
        return Usage(prompt_tokens=prompt, completion_tokens=answer, total_tokens=prompt + answer)

    async def texts(self) -> list[str]:
        """Return the texts of all choices, prompts in parallel. Cancelled: no further step is made."""
        texts = [""] * sum(map(len, self.choices))

        async def collect(prompt: int) -> None:
            async with aclosing(self._deltas(prompt)) as steps:
                async for deltas in steps:
                    for delta in deltas:
                        texts[delta.index] += delta.text

        with self._tools.visit.ledger.stage(STAGE):
            if len(self.choices) == 1:
                await collect(0)
            else:
                async with asyncio.TaskGroup() as group:
                    for prompt in range(len(self.choices)):
                        group.create_task(collect(prompt))
        return texts

    async def events(self, answer: answers.Answer) -> AsyncGenerator[bytes, None]:
        """Yield the answer as server-sent events, one prompt after another.

        An error before the first event is raised; a later one is the last event, and `[DONE]` is not sent.
        """
        begun = False
        try:
            with self._tools.visit.ledger.stage(STAGE):
                for prompt in range(len(self.choices)):
                    async with aclosing(self._deltas(prompt)) as steps:
                        opened = False
                        async for deltas in steps:
                            chunks = [chunk for delta in deltas for chunk in answer.chunks(delta)]
                            if not opened:
                                opening = [answer.opening(delta.index) for delta in deltas]
                                chunks = [each for each in opening if each is not None] + chunks
                                opened = True
                            if chunks:
                                begun = True
                                yield b"".join([event(each) for each in chunks])
                                self._tools.go_on()
            usage = self.usage()
            yield (event(answer.last(usage)) if answer.tells_usage else b"") + DONE
        except Exception as error:
            meant = failed(error)
            if not begun:
                raise meant from meant.__cause__  # not from itself: only the collector would free that
            # The stream has begun, so the error cannot be a status any more.
            if meant.__cause__ is error:
                _log.error("request %s: stream failed", self._tools.visit.call.request_id, exc_info=error)
            self._tools.visit.outcome = meant.outcome
            yield event(facts_of(meant, self._tools.visit.call.request_id))
        finally:
            self.usage()

    async def _deltas(self, prompt: int) -> AsyncGenerator[list[Delta], None]:
        tools = self._tools
        steps = generate(
            self._model, self._prompts[prompt], self.choices[prompt], first=tools.models.infer, steps=tools.steps
        )
        try:
            async with aclosing(steps):
                async for deltas in steps:
                    yield deltas
        except DeadlineExceeded as error:
            raise DeadlineExceeded(STAGE) from error
