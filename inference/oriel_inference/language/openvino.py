"""openvino-genai as an engine: its ContinuousBatchingPipeline, which leaves the step loop to its caller.

It reads a GGUF file, or the folder that `optimum-cli export openvino` writes. Nothing of a folder is executed as
Python, and its chat template is only text here.

The pipeline compiles the guide of a sequence in the step that makes its first token, so guides begin one at a time. One
that cannot be compiled fails the step of all sequences, after which they are all cancelled and begun again: those
without a guide go on behind their tokens, those with one make the same tokens once more, because their guide has to
follow them from the first.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import openvino_genai as genai
from openvino import Tensor

from oriel_inference.errors import LoadFailed
from oriel_inference.language.engine import (
    WARM_UP,
    Added,
    Facts,
    Finish,
    LanguageEngine,
    Options,
    Piece,
    PromptRefused,
    Sampling,
)
from oriel_inference.language.gguf import context_of
from oriel_inference.language.prefixes import PrefixCache
from oriel_inference.language.vocabulary import token_bytes

BLOCK_TOKENS = 32  # of the CPU plugin
COLD = 0.01  # below this temperature the most likely token is taken, as in vLLM: the engine divides by it
_FINISHES: dict[Any, Finish] = {
    genai.GenerationFinishReason.STOP: "stop",
    genai.GenerationFinishReason.LENGTH: "length",
}


@dataclass(slots=True)
class _Sequence:
    """A sequence of the pipeline.

    ids: prompt and answer so far. least, most: how many of them there may be at its end.
    config, handle: the pipeline's own; no handle while it waits for another guide.
    again: tokens that it has still to make once more.
    refused: why it ended before its time.
    """

    ids: list[int]
    prompt_tokens: int
    least: int
    most: int
    config: Any
    guided: bool
    handle: Any = None
    again: int = 0
    refused: str = ""

    @property
    def is_new(self) -> bool:
        """Return whether it has no token yet."""
        return len(self.ids) == self.prompt_tokens


class OpenVinoGenAi(LanguageEngine):
    """The engine `openvino-genai`, on the CPU."""

    def load(self, path: str, options: Options) -> Facts:
        file = Path(path)
        folder = file.parent if file.suffix == ".xml" else file
        self._context = _context_of(file)  # before the engine reads the file: it may crash on one that is cut off
        scheduling = genai.SchedulerConfig()
        scheduling.cache_size = -(-options.cache_mb // 1024)  # whole GiB
        scheduling.max_num_seqs = options.max_running
        scheduling.max_num_batched_tokens = options.step_tokens + options.max_running
        scheduling.dynamic_split_fuse = True
        scheduling.enable_prefix_caching = True
        properties = {"INFERENCE_NUM_THREADS": options.threads}
        self._pipeline: Any = genai.ContinuousBatchingPipeline(folder, scheduling, "CPU", properties)
        self._tokenizer: Any = self._pipeline.get_tokenizer()
        defaults = self._pipeline.get_config()
        self._ends = sorted({*defaults.stop_token_ids, defaults.eos_token_id} - {-1})
        self._next_id = 0
        self._sequences: dict[int, _Sequence] = {}
        vocabulary, control = token_bytes(self._tokenizer)
        self._vocabulary_size = len(vocabulary)
        self._longest_token = max(map(len, [*vocabulary, *control]))
        # The tokenizer cuts longer texts off without a word.
        self._most_encoded = self._tokenizer.encode(" x" * (self._context + 1)).input_ids.shape[1]
        self._blocks = self._warm_up()
        self._cache = PrefixCache(BLOCK_TOKENS, self._blocks)
        return Facts(
            context=self._context,
            vocabulary=vocabulary,
            control_tokens={text.decode(errors="replace"): number for text, number in control.items()},
            chat_template=self._tokenizer.get_original_chat_template(),
            bos=self._tokenizer.get_bos_token(),
            eos=self._tokenizer.get_eos_token(),
            cache_tokens=self._blocks * BLOCK_TOKENS,
            engine="openvino-genai",
        )

    def _warm_up(self) -> int:
        """Make one token with a guide, so that no call waits for what is done once; return the blocks of the cache."""
        sequence = _Sequence([0], 1, 1, 3, _config(WARM_UP), guided=True)
        self._begin(sequence)
        self._pipeline.step()
        used = float(self._pipeline.get_metrics().cache_usage)
        sequence.handle.cancel()
        return round(100 / used) if used else 1

    def add(self, number: int, prompt: str | Sequence[int], sampling: Sampling) -> Added:
        ids = self._encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise PromptRefused("the prompt is empty")
        if not 0 <= min(ids) <= max(ids) < self._vocabulary_size:
            raise PromptRefused(f"the prompt has ids outside the vocabulary, which has {self._vocabulary_size}")
        room = min(self._context, self._blocks * BLOCK_TOKENS) - len(ids)
        if room < 1:
            raise PromptRefused(f"the prompt has {len(ids)} tokens, the model takes {self._context} with the answer")
        config = _config(sampling)
        config.stop_token_ids = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._ends)}
        least, most = (len(ids) + min(each, room) for each in (sampling.min_tokens, sampling.max_tokens))
        sequence = _Sequence(ids, len(ids), least, most, config, guided=sampling.guide is not None)
        if not sequence.guided:
            try:
                self._begin(sequence)
            except RuntimeError as error:
                raise PromptRefused(f"the engine refuses it: {_last_line(error)}") from error
        self._sequences[number] = sequence
        return Added(ids[:], self._cache.known(ids))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = []
        if len(text) <= self._context * self._longest_token:
            ids = self._tokenizer.encode(text).input_ids.data[0].tolist()
        if not text or 0 < len(ids) < self._most_encoded:
            # A chat template writes the token of the beginning itself.
            begin, start = self._tokenizer.get_bos_token_id(), self._tokenizer.get_bos_token()
            return ids[1:] if ids[:2] == [begin] * 2 and text.startswith(start) else ids
        most = min(self._context, self._most_encoded)
        raise PromptRefused(
            f"the prompt has {len(text)} characters, which are more than the {most} tokens of the model"
        )

    def _begin(self, sequence: _Sequence) -> None:
        """Give a sequence to the pipeline: all that is known of it as its prompt, or the prompt alone if a guide has to
        follow its tokens from the first.
        """
        self._next_id += 1
        begin = sequence.prompt_tokens if sequence.guided else len(sequence.ids)
        sequence.again = len(sequence.ids) - begin
        sequence.config.max_new_tokens = sequence.most - begin
        sequence.config.min_new_tokens = min(max(0, sequence.least - begin), sequence.most - begin)
        tensor = Tensor(np.array([sequence.ids[:begin]], np.int64))
        sequence.handle = self._pipeline.add_request(self._next_id, tensor, sequence.config)

    def step(self) -> None:
        new = [each for each in self._sequences.values() if each.guided and each.is_new and not each.refused]
        try:
            if new and new[0].handle is None:
                self._begin(new[0])
            self._pipeline.step()
        except RuntimeError as error:
            if not new:
                raise
            new[0].refused = f"the guide cannot be used: {_last_line(error)}"
            self._begin_again()

    def _begin_again(self) -> None:
        begun = [each for each in self._sequences.values() if each.handle is not None]
        for each in begun:
            each.handle.cancel()
        self._pipeline.step()  # forgets them
        for each in begun:
            if not each.refused:
                self._begin(each)

    def read(self, number: int) -> Piece:
        sequence = self._sequences[number]
        ids, logprobs, finish = _take(sequence.handle)
        if repeated := min(sequence.again, len(ids)):
            at = len(sequence.ids) - sequence.again
            if ids[:repeated] != sequence.ids[at : at + repeated]:
                sequence.refused = "the guide of another call has failed, send this one again"
            sequence.again -= repeated
            ids, logprobs = ids[repeated:], logprobs[repeated:]
        if sequence.refused:
            self.cancel(number)
            raise PromptRefused(sequence.refused)
        if ids and sequence.is_new:
            self._cache.keep(sequence.ids)
        sequence.ids += ids
        if finish:
            self._forget(number)
        return Piece(ids, logprobs if sequence.config.logprobs else (), finish)

    def cancel(self, number: int) -> None:
        if (handle := self._sequences[number].handle) is not None:
            handle.cancel()
        self._forget(number)

    def _forget(self, number: int) -> None:
        sequence = self._sequences.pop(number)
        if not sequence.is_new:
            self._cache.keep(sequence.ids)

    def cache_use(self) -> float:
        held = sum(-(-len(each.ids) // BLOCK_TOKENS) for each in self._sequences.values())
        return min(1.0, held / self._blocks)


def _context_of(file: Path) -> int:
    if file.suffix != ".xml":
        return context_of(file)
    found = msgspec.json.decode((file.parent / "config.json").read_bytes(), type=dict[str, object])
    inner = found.get("text_config", found)
    context = inner.get("max_position_embeddings") if isinstance(inner, dict) else None
    if not isinstance(context, int) or context < 2:
        raise LoadFailed("config.json names no max_position_embeddings: export the model with optimum-cli again")
    return context


def _config(sampling: Sampling) -> Any:
    config = genai.GenerationConfig()
    copied = ["presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos"]
    config.do_sample = sampling.temperature >= COLD
    if config.do_sample:
        copied += ["temperature", "top_p", "min_p", *(["top_k"] if sampling.top_k > 0 else [])]
        config.rng_seed = random.getrandbits(31) if sampling.seed is None else sampling.seed
    for name in copied:
        setattr(config, name, getattr(sampling, name))
    config.logprobs = 0 if sampling.logprobs is None else 1
    if sampling.guide is not None:
        field = "structural_tags_config" if sampling.guide.kind == "structural_tag" else sampling.guide.kind
        config.structured_output_config = genai.StructuredOutputConfig(**{field: sampling.guide.text})
    return config


def _take(handle: Any) -> tuple[list[int], list[float], Finish]:
    """Return new ids, their log probabilities, and how the sequence has ended, if it has."""
    ids: list[int] = []
    logprobs: list[float] = []
    finish: Finish = ""
    if handle is not None:
        while handle.can_read():
            for output in handle.read().values():
                ids += output.generated_ids
                logprobs += output.generated_log_probs
                finish = _FINISHES.get(output.finish_reason, finish)
        if not finish and handle.get_status() == genai.GenerationStatus.IGNORED:
            finish = "length"  # the cache holds no more of it
    return ids, logprobs, finish


def _last_line(error: Exception) -> str:
    """Return the last line of an engine's error, without the place in its own sources."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    last = lines[-1] if lines else type(error).__name__
    return (last.partition(".cc:")[2].partition(" ")[2] or last)[:300]
