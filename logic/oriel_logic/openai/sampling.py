"""Draws the next token from one row of logits, by `temperature`, `top_k`, `top_p`, penalties and biases."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Row = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """The sampling parameters of a request. temperature 0: always the likeliest. top_k 0 and top_p 1: no cut.

    seed: None for a random one.
    bias: token -> number that is added to its logit.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    bias: Mapping[int, float] = field(default_factory=dict)


class Sampler:
    """Draws the tokens of one sequence. The same seed, choice and logits give the same tokens."""

    def __init__(self, sampling: Sampling, *, choice: int = 0) -> None:
        """Prepare to draw. choice: the number of the sequence in its request; each draws independently."""
        self._sampling = sampling
        seed = None if sampling.seed is None else (sampling.seed % 2**63, choice)
        self._random = np.random.default_rng(seed)
        self._drawn: dict[int, int] = {}

    def draw(self, logits: NDArray[Any]) -> int:
        """Draw the next token. logits: [vocabulary], any float type; NaN counts as impossible.

        Raises ValueError if no token is possible.
        """
        row = np.array(logits, dtype=np.float64)
        row[np.isnan(row)] = -np.inf
        self._weigh(row)
        if not np.isfinite(row.max(initial=-np.inf)):
            raise ValueError("the model gave no token a finite logit")
        token = int(row.argmax()) if self._sampling.temperature == 0 else self._random_of(row)
        self._drawn[token] = self._drawn.get(token, 0) + 1
        return token

    def _weigh(self, row: Row) -> None:
        """Apply `logit_bias`, then the penalties as OpenAI documents them: by count, and once for any occurrence."""
        sampling = self._sampling
        for token, bias in sampling.bias.items():
            if 0 <= token < row.size:
                row[token] += bias
        if (sampling.frequency_penalty or sampling.presence_penalty) and self._drawn:
            tokens = np.fromiter(self._drawn, dtype=np.intp)
            counts = np.fromiter(self._drawn.values(), dtype=np.float64)
            row[tokens] -= counts * sampling.frequency_penalty + sampling.presence_penalty

    def _random_of(self, row: Row) -> int:
        tokens, chances = candidates(row, self._sampling)
        return int(tokens[int(self._random.choice(tokens.size, p=chances))])


def candidates(row: Row, sampling: Sampling) -> tuple[NDArray[np.intp], Row]:
    """Return the possible tokens and their probabilities, which sum to 1; likeliest first if `top_p` cuts.

    `top_k` keeps the k likeliest, then `top_p` the fewest whose probabilities reach it ("nucleus sampling", Holtzman et
    al. 2020). At least one token stays.
    row: [vocabulary], at least one finite logit.
    """
    kept = np.flatnonzero(row > -np.inf)
    if 0 < sampling.top_k < kept.size:
        kept = kept[np.argpartition(-row[kept], sampling.top_k - 1)[: sampling.top_k]]
    with np.errstate(over="ignore", under="ignore"):
        scaled = (row[kept] - row[kept].max()) / sampling.temperature
        chances = np.exp(scaled)
    chances /= chances.sum()
    if sampling.top_p < 1:
        # All tokens below this probability sum to less than 1 - top_p, so the rest reaches top_p: only that is sorted.
        likely = chances >= (1 - sampling.top_p) / chances.size
        kept, chances = kept[likely], chances[likely]
        order = np.argsort(-chances, kind="stable")
        kept, chances = kept[order], chances[order]
        count = int(np.searchsorted(np.cumsum(chances), sampling.top_p)) + 1
        kept, chances = kept[:count], chances[:count]
        chances = chances / chances.sum()
    return kept, chances
