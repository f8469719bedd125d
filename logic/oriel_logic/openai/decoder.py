"""Decodes with a language model whose attention cache is kept by the caller: one call per token, with the cache.

The names are those of Hugging Face's ONNX exports (Optimum, `text-generation-with-past`): inputs `input_ids`,
`attention_mask` and optionally `position_ids`, INT64, and `past_key_values.<layer>.key` / `.value` [rows, heads, tokens
so far, width]; outputs `logits` [rows, tokens, vocabulary] (the last token's are used) and `present.<layer>.key` /
`.value`, which are the next call's past. The first call has a past of no tokens. `generate` is the decode loop.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oriel_logic.client.models import ModelSpec, Outputs
from oriel_logic.errors import HandlerFailed, ModelFailed
from oriel_logic.openai.sequence import Delta
from oriel_logic.openai.sequence import Sequence as Generated
from oriel_wire.v2.datatypes import DATATYPES

SMALL_LOGITS = 1 << 15  # drawn in place: under 1 ms
PAST, PRESENT = "past_key_values.", "present."
Infer = Callable[..., Awaitable[Outputs]]  # as `Models.infer`


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One cache tensor. shape: [1, heads, 0, width], for a past of no tokens."""

    past: str
    present: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


class Cache:
    """The attention cache. `tokens` so far, the same for all rows. Single writer: the decode loop."""

    __slots__ = ("arrays", "tokens")

    def __init__(self, arrays: dict[str, NDArray[Any]], tokens: int) -> None:
        self.arrays = arrays
        self.tokens = tokens

    def select(self, rows: Sequence[int]) -> None:
        """Keep these rows, in this order; a row may be repeated."""
        self.arrays = {name: array[list(rows)] for name, array in self.arrays.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenModel:
    """Runs one model step by step. positions, mask: True if the model has these inputs."""

    model: str
    version: str
    layers: tuple[Layer, ...]
    positions: bool
    mask: bool

    async def begin(self, infer: Infer, prompt: NDArray[Any]) -> tuple[NDArray[Any], Cache]:
        """Run the whole prompt at once ("prefill"); return the logits [1, vocabulary] of the next token, and the cache.

        prompt: token ids, at least one.
        """
        cache = Cache({each.past: np.zeros(each.shape, dtype=each.dtype) for each in self.layers}, 0)
        return await self.step(infer, prompt[np.newaxis].astype(np.int64), cache), cache

    async def step(self, infer: Infer, tokens: NDArray[np.int64], cache: Cache) -> NDArray[Any]:
        """Return the logits [rows, vocabulary] after `tokens` [rows, new], which are added to the cache.

        Raises what `infer` raises; the cache is unchanged then.
        """
        rows, new = tokens.shape
        seen = cache.tokens + new
        inputs: dict[str, NDArray[Any]] = {"input_ids": tokens, **cache.arrays}
        if self.mask:
            inputs["attention_mask"] = np.ones((rows, seen), dtype=np.int64)
        if self.positions:
            inputs["position_ids"] = np.tile(np.arange(cache.tokens, seen, dtype=np.int64), (rows, 1))
        outputs = await infer(self.model, inputs, version=self.version)
        cache.arrays = {each.past: self._present(outputs, each, rows, seen) for each in self.layers}
        cache.tokens = seen
        logits = outputs["logits"]
        if logits.ndim != 3 or logits.shape[0] != rows or not logits.shape[1]:
            raise ModelFailed(f"model '{self.model}' gave logits of shape {list(logits.shape)} for {rows} rows")
        return logits[:, -1]

    def _present(self, outputs: Outputs, layer: Layer, rows: int, seen: int) -> NDArray[Any]:
        array = outputs[layer.present]
        expected = (rows, layer.shape[1], seen, layer.shape[3])
        if array.shape != expected:
            raise ModelFailed(
                f"model '{self.model}' gave '{layer.present}' of shape {list(array.shape)}, not {list(expected)}"
            )
        return array


def token_model(spec: ModelSpec, version: str = "") -> TokenModel:
    """Make a TokenModel from the model's metadata. Raises HandlerFailed if it has no cache as described above."""
    pasts = [name for name in spec.inputs if name.startswith(PAST)]
    if "input_ids" not in spec.inputs or "logits" not in spec.outputs or not pasts:
        raise HandlerFailed(
            f"model '{spec.name}' cannot be decoded step by step: it needs inputs 'input_ids' and "
            f"'{PAST}<layer>.key' and outputs 'logits' and '{PRESENT}<layer>.key'"
        )
    return TokenModel(
        model=spec.name,
        version=version,
        layers=tuple(layer(spec, name, spec.outputs) for name in pasts),
        positions="position_ids" in spec.inputs,
        mask="attention_mask" in spec.inputs,
    )


def layer(spec: ModelSpec, past: str, outputs: Mapping[str, Any]) -> Layer:
    present = PRESENT + past.removeprefix(PAST)
    tensor = spec.inputs[past]
    shape = tensor.shape
    if present not in outputs or len(shape) != 4 or shape[1] < 1 or shape[3] < 1 or tensor.datatype not in DATATYPES:
        raise HandlerFailed(
            f"model '{spec.name}': '{past}' must be [rows, heads, tokens, width] with fixed heads and width, and come "
            f"back as '{present}'"
        )
    return Layer(
        past=past, present=present, shape=(1, shape[1], 0, shape[3]), dtype=np.dtype(DATATYPES[tensor.datatype].dtype)
    )


async def generate(
    model: TokenModel, prompt: NDArray[Any], choices: Sequence[Generated], *, first: Infer, steps: Infer
) -> AsyncGenerator[list[Delta], None]:
    """Yield the text that each step adds to each choice that has not ended, until all have.

    first: makes the call of the prefill; steps: makes the others.
    Raises what models raise, DeadlineExceeded included. Closed between two steps it makes no further call; cancelled in
    one, the inference server sees that the caller left.
    """
    logits, cache = await model.begin(first, prompt)
    running = list(choices)
    cache.select([0] * len(running))
    logits = np.repeat(logits, len(running), axis=0)
    while True:
        yield await drawn(model.model, running, logits)
        going = [row for row, choice in enumerate(running) if choice.finish is None]
        if not going:
            return
        if len(going) < len(running):
            running = [running[row] for row in going]
            cache.select(going)
        tokens = np.array([[choice.token] for choice in running], dtype=np.int64)
        logits = await model.step(steps, tokens, cache)


async def drawn(model: str, running: Sequence[Generated], logits: NDArray[Any]) -> list[Delta]:
    def draw() -> list[Delta]:
        return [choice.draw(row) for choice, row in zip(running, logits, strict=True)]

    try:
        # A large vocabulary takes milliseconds to sort: in a thread, where numpy releases the interpreter lock.
        return draw() if logits.size <= SMALL_LOGITS else await asyncio.to_thread(draw)
    except ValueError as error:
        raise ModelFailed(f"model '{model}': {error}") from error
