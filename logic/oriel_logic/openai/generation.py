"""The decode loop: prefill once, then one step per token for all choices of a prompt together."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oriel_logic.errors import ModelFailed
from oriel_logic.openai.decoder import Infer, TokenModel
from oriel_logic.openai.sequence import Delta
from oriel_logic.openai.sequence import Sequence as Generated

SMALL_LOGITS = 1 << 15  # drawn in place: under 1 ms


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
        return [choice.take(row) for choice, row in zip(running, logits, strict=True)]

    try:
        # A large vocabulary takes milliseconds to sort: in a thread, where numpy releases the interpreter lock.
        return draw() if logits.size <= SMALL_LOGITS else await asyncio.to_thread(draw)
    except ValueError as error:
        raise ModelFailed(f"model '{model}': {error}") from error
