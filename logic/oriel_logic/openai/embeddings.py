"""`/v1/embeddings`: tokenizes texts (in a worker), runs the model, and returns one normalised vector per text."""

import asyncio
import logging
from base64 import b64encode
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from oriel_logic.client.models import Outputs
from oriel_logic.errors import HandlerFailed, ModelFailed, ParameterWrong
from oriel_logic.loading.sources import HandlerFile
from oriel_logic.openai import tokenizer as tokenizers
from oriel_logic.openai.pooling import Floats, Pooling, padded, plan, pooled, shortened
from oriel_logic.openai.schema import MAX_INPUTS, EmbeddingRequest, texts_or_tokens
from oriel_logic.openai.served import Served, Tools
from oriel_logic.server.replies import Reply

_log = logging.getLogger(__name__)
MAX_TOTAL_TOKENS = 300_000
MAX_TOGETHER = 4
SMALL_ELEMENTS = 1 << 16  # pooled in place: under 0.1 ms
SMALL_NUMBERS = 1 << 15  # written in place: under 4 ms
Ids = NDArray[np.int64]
# The other inputs that a model may have, made from ids and mask, both [rows, tokens].
MADE: dict[str, Callable[[Ids, Ids], Ids]] = {
    "input_ids": lambda ids, mask: ids,
    "attention_mask": lambda ids, mask: mask,
    "token_type_ids": lambda ids, mask: np.zeros_like(ids),
    "position_ids": lambda ids, mask: np.tile(np.arange(ids.shape[1]), (len(ids), 1)),
}


class Embeddings(Served):
    """Serves one embedding model:

            minilm = Embeddings(model="minilm", tokenizer="minilm/tokenizer.json", served_as="all-MiniLM-L6-v2")

    max_tokens: the most tokens of one input, special tokens included; longer ones are refused, or cut if `truncate`.
    tokenizer: a `tokenizer.json`, relative to the handler file.
    inputs: the model's inputs, of input_ids, attention_mask, token_type_ids and position_ids, INT64 [rows, tokens].
    output: its token vectors [rows, tokens, width], or [rows, width] if the model pools; "" if it has only one output.
    max_rows: its `max_batch_size`; more inputs are several calls, up to 4 at a time.
    """

    def __init__(
        self,
        *,
        model: str,
        tokenizer: str | Path,
        served_as: str = "",
        version: str = "",
        max_tokens: int = 512,
        truncate: bool = False,
        pooling: Pooling = "mean",
        normalise: bool = True,
        inputs: Sequence[str] = ("input_ids", "attention_mask", "token_type_ids"),
        output: str = "",
        max_rows: int = 32,
        max_batch_tokens: int = 8192,
    ) -> None:
        super().__init__(model=model, served_as=served_as, version=version)
        self.tokenizer = Path(tokenizer)
        unknown = set(inputs) - set(MADE)
        if unknown or "input_ids" not in inputs:
            raise ValueError(
                f"inputs has {', '.join(inputs)}: it must have input_ids, and only names of {', '.join(MADE)}"
            )
        if pooling not in ("mean", "cls", "last"):
            raise ValueError(f"pooling must be mean, cls or last, not {pooling!r}")
        self.max_tokens = max_tokens
        self.truncate = truncate
        self.pooling: Pooling = pooling
        self.normalise = normalise
        self.inputs = tuple(inputs)
        self.output = output
        self.max_rows = max_rows
        self.max_batch_tokens = max_batch_tokens

    def locate(self, folder: Path) -> None:
        self.tokenizer = (folder / self.tokenizer).absolute()

    def __oriel_preload__(self, file: HandlerFile) -> None:
        """Read the tokenizer in the fork server, so that its workers share it.

        A tokenizer that cannot be read is reported where the model is served.
        """
        self.locate(file.folder or Path())
        if not self.problem():
            try:
                tokenizers.loaded(str(self.tokenizer))
            except Exception:  # the library raises plain Exception for a file that it cannot read
                _log.warning("openai: the tokenizer of '%s' cannot be read", self.served_as, exc_info=True)

    def problem(self) -> str:
        return tokenizers.missing(self.tokenizer)

    async def encode(self, tools: Tools, inputs: Sequence[Any]) -> list[Any]:
        """Tokenize each input, as INT32. Raises ParameterWrong for ids that are not tokens."""
        longest = self.max_tokens if self.truncate else 0
        ids, lengths = await tools.context.run(tokenizers.encode, str(self.tokenizer), inputs, longest)
        return np.split(ids, np.cumsum(lengths)[:-1])

    async def answer(self, request: EmbeddingRequest, tools: Tools) -> Reply:
        """Answer a request. Raises ParameterWrong, and what workers and models raise. Cancelled: calls under way are
        closed.
        """
        inputs = texts_or_tokens(request.input, "input", most=MAX_INPUTS)
        rows = await self.encode(tools, inputs)
        total = tools.visit.ledger.tokens_in = self._checked(rows)
        tools.visit.tokens = tools.visit.target, total, None, None
        vectors = await self._vectors(rows, tools)
        if request.dimensions is not None and request.dimensions > vectors.shape[1]:
            raise ParameterWrong(
                f"this model's vectors have {vectors.shape[1]} dimensions, not {request.dimensions}", param="dimensions"
            )
        vectors = shortened(vectors, request.dimensions, normalise=self.normalise)
        facts = (vectors, self.served_as, total, request.encoding_format)
        if request.encoding_format == "float" and vectors.size > SMALL_NUMBERS:
            return Reply(status=200, body=await tools.context.run(written, *facts))
        return Reply(status=200, body=written(*facts))

    def _checked(self, rows: Sequence[NDArray[np.int32]]) -> int:
        """Return the number of tokens. Raises ParameterWrong for an input with none or too many, or too many in all."""
        for index, row in enumerate(rows):
            if not len(row):
                raise ParameterWrong(f"input {index} has no tokens: there is nothing to embed", param="input")
            if len(row) > self.max_tokens:
                raise ParameterWrong(
                    f"this model's maximum context length is {self.max_tokens} tokens, input {index} has {len(row)}: "
                    "shorten it or cut it into several",
                    param="input",
                    code="context_length_exceeded",
                )
        total = sum(map(len, rows))
        if total > MAX_TOTAL_TOKENS:
            raise ParameterWrong(
                f"a request may have at most {MAX_TOTAL_TOKENS} tokens, this one has {total}: send several",
                param="input",
            )
        return total

    async def _vectors(self, rows: Sequence[NDArray[np.int32]], tools: Tools) -> Floats:
        """Return one vector per row, in order."""
        found: list[Floats] = [np.empty(0, np.float32)] * len(rows)
        slots = asyncio.Semaphore(MAX_TOGETHER)

        async def run(batch: Sequence[int]) -> None:
            async with slots:
                ids, mask = padded([rows[index] for index in batch])
                for index, vector in zip(batch, await self._batch(ids, mask, tools), strict=True):
                    found[index] = vector

        lengths = [len(row) for row in rows]
        batches = list(plan(lengths, max_rows=self.max_rows, max_tokens=self.max_batch_tokens))
        if len(batches) == 1:
            await run(batches[0])
        else:
            async with asyncio.TaskGroup() as group:
                for batch in batches:
                    group.create_task(run(batch))
        return np.stack(found)

    async def _batch(self, ids: Ids, mask: Ids, tools: Tools) -> Floats:
        wanted = [self.output] if self.output else None
        given = {name: MADE[name](ids, mask) for name in self.inputs}
        outputs = await tools.models.infer(self.model, given, outputs=wanted, version=self.version)
        hidden = self._hidden(outputs)
        try:
            if hidden.size <= SMALL_ELEMENTS:
                return pooled(hidden, mask, self.pooling)
            # In a thread: numpy releases the interpreter lock, and the array is in this process already.
            return await asyncio.to_thread(pooled, hidden, mask, self.pooling)
        except ValueError as error:
            raise ModelFailed(f"model '{self.model}' did not return an embedding: {error}") from error

    def _hidden(self, outputs: Outputs) -> NDArray[Any]:
        if self.output or len(outputs) == 1:
            return outputs[self.output or next(iter(outputs))]
        raise HandlerFailed(f"model '{self.model}' has several outputs, {', '.join(outputs)}: say which with output=")


def written(vectors: Floats, model: str, tokens: int, encoding: Literal["float", "base64"]) -> bytes:
    """Write the answer's body. base64: little-endian FP32, as the official clients read it."""
    entries = vectors.astype("<f4", copy=False)
    encoded = [b64encode(row.tobytes()).decode() for row in entries] if encoding == "base64" else entries.tolist()
    data = [{"object": "embedding", "index": index, "embedding": each} for index, each in enumerate(encoded)]
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return msgspec.json.encode({"object": "list", "data": data, "model": model, "usage": usage})
