"""A strict and deterministic engine without a model, for tests: its tokens are bytes and a few control tokens.

The next token follows from the tokens before it alone, so that an answer that is interrupted and added again with its
tokens in the prompt goes on in the same way. After the control token <|answer|> the answer repeats the text between it
and the control token before it, and ends. Without <|answer|> it is lower-case letters without end, which a seed
changes. Misuse raises AssertionError, which ends the process.

Parameters of the configuration: `oriel.double.step_ms` is the time of a step, `oriel.double.guide_ms` that of each
token of a sequence with a guide, which is not obeyed. `oriel.double.context` is the most tokens.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from zlib import crc32

from oriel_inference.errors import LoadFailed
from oriel_inference.language.engine import (
    Added,
    Facts,
    Finish,
    LanguageEngine,
    Options,
    Piece,
    PromptRefused,
    Sampling,
)
from oriel_inference.language.prefixes import PrefixCache

CONTROL = ("<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|answer|>")
BEGIN, END, ANSWER = 256, 257, 261
BLOCK_TOKENS = 16
TOKEN_BYTES = 4096  # of the cache that a token takes
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message.role + '|>' + message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|answer|>{% endif %}"
)


@dataclass(slots=True)
class _Sequence:
    """ids: prompt and answer. waiting: tokens of the prompt that are not computed. made: those of the answer."""

    ids: list[int]
    waiting: int
    sampling: Sampling
    made: int = 0
    new: list[int] = field(default_factory=list)
    finish: Finish = ""


class Double(LanguageEngine):
    """The engine `double`."""

    def load(self, path: str, options: Options) -> Facts:
        settings = options.settings
        self._step_s = float(settings.get("oriel.double.step_ms", 0)) / 1e3
        self._guide_s = float(settings.get("oriel.double.guide_ms", 0)) / 1e3
        self._options = options
        self._context = int(settings.get("oriel.double.context", 8192))
        self._blocks = max(1, (options.cache_mb << 20) // (BLOCK_TOKENS * TOKEN_BYTES))
        self._cache = PrefixCache(BLOCK_TOKENS, self._blocks)
        self._sequences: dict[int, _Sequence] = {}
        with open(path, "rb") as file:
            if file.read(4) == b"bad!":
                raise LoadFailed("the file is damaged: copy it again")
        return Facts(
            context=self._context,
            vocabulary=[bytes([byte]) for byte in range(256)] + [b""] * len(CONTROL),
            control_tokens={text: BEGIN + index for index, text in enumerate(CONTROL)},
            chat_template=TEMPLATE,
            bos=CONTROL[0],
            eos=CONTROL[1],
            cache_tokens=self._blocks * BLOCK_TOKENS,
            engine="double",
        )

    def add(self, number: int, prompt: str | Sequence[int], sampling: Sampling) -> Added:
        assert number not in self._sequences, f"sequence {number} is there already"
        assert len(self._sequences) < self._options.max_running, "more sequences than max_running"
        ids = encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise PromptRefused("the prompt is empty")
        if len(ids) >= self._context:
            raise PromptRefused(f"the prompt has {len(ids)} tokens, the model takes {self._context} with the answer")
        assert all(0 <= each < BEGIN + len(CONTROL) for each in ids), "an id outside the vocabulary"
        cached = self._cache.known(ids)
        self._sequences[number] = _Sequence(ids, len(ids) - cached, sampling)
        return Added(ids, cached)

    def step(self) -> None:
        assert self._sequences, "a step without a sequence"
        assert all(not each.finish for each in self._sequences.values()), "a sequence that has ended was not read"
        left = self._options.step_tokens
        for sequence in self._sequences.values():
            taken = min(sequence.waiting, left)
            sequence.waiting -= taken
            left -= taken
            if not sequence.waiting:
                if not sequence.made:
                    self._cache.keep(sequence.ids)
                self._decode(sequence)
        guided = sum(each.made for each in self._sequences.values() if each.sampling.guide is not None)
        time.sleep(self._step_s + self._guide_s * guided)

    def _decode(self, sequence: _Sequence) -> None:
        sampling = sequence.sampling
        token = next_token(sequence.ids, sampling.seed or 0)
        if token == END and sequence.made < sampling.min_tokens:
            token = ord(".")
        sequence.ids.append(token)
        sequence.new.append(token)
        sequence.made += 1
        if (token == END and not sampling.ignore_eos) or token in sampling.stop_token_ids:
            sequence.finish = "stop"
        elif sequence.made >= sampling.max_tokens or len(sequence.ids) >= self._context:
            sequence.finish = "length"

    def read(self, number: int) -> Piece:
        sequence = self._sequences[number]
        ids, sequence.new = sequence.new, []
        if sequence.finish:
            self.cancel(number)
        logprobs = [-0.5] * len(ids) if sequence.sampling.logprobs is not None else []
        return Piece(ids, logprobs, sequence.finish)

    def cancel(self, number: int) -> None:
        sequence = self._sequences.pop(number)
        self._cache.keep(sequence.ids[: len(sequence.ids) - sequence.waiting])

    def cache_use(self) -> float:
        return min(1.0, sum(len(each.ids) for each in self._sequences.values()) / (self._blocks * BLOCK_TOKENS))


def encode(text: str) -> list[int]:
    """Return the ids of a text."""
    if (found := next((each for each in CONTROL if each in text), None)) is None:
        return list(text.encode())
    first, *others = text.split(found)
    return encode(first) + [token for each in others for token in (BEGIN + CONTROL.index(found), *encode(each))]


def next_token(ids: Sequence[int], seed: int) -> int:
    """Return the token that follows."""
    if ANSWER not in ids:
        return ord("a") + crc32(repr((seed, ids[-16:])).encode()) % 26
    at = len(ids) - 1 - ids[::-1].index(ANSWER)
    before = next((index for index in range(at - 1, -1, -1) if ids[index] >= BEGIN), -1)
    echoed = ids[before + 1 : at]
    made = len(ids) - at - 1
    return echoed[made] if made < len(echoed) else END
