"""One answer of a language model: the call that wants it, its tokens so far, and the responses that they make.

The names of the tensors, and what they mean, are those of Triton's vLLM back end.
"""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from oriel_inference.backends import Outputs
from oriel_inference.batching.call import Call, Decoding
from oriel_inference.batching.statistics import Responses
from oriel_inference.errors import InvalidRequest
from oriel_inference.language.engine import Facts, Sampling
from oriel_inference.language.messages import Progress
from oriel_inference.language.sampling import read_sampling
from oriel_inference.language.text import GeneratedText
from oriel_policies.waiting.flows import Ticket
from oriel_wire.v2.messages import Array, ParameterValue

MAX_S = 600.0  # a stream whose caller sets no bound
BYTES_PER_TOKEN = 4  # of a text that is not encoded yet
MAX_BYTES_PER_TOKEN, MAX_TEXT_BYTES = 32, 8 << 20  # longer texts are not even encoded
_FLAGS = ("finish_reason", "logprobs", "num_input_tokens", "num_output_tokens")  # outputs by a flag return_<name>
NEXT_SEED = 0x9E3779B97F4A7C15  # odd, so that each position has a seed of its own


class Generation:
    """An answer in progress.

    deadline: the time by which a stream has its first token, later its end, or by which a whole answer is ready.
    token_s: wanted seconds per token of a stream; 0.0 for none.
    most, least: bounds of its number of tokens.
    is_bound: a resume would change the answer, because the engine forgets a grammar or counts of tokens.
    ids: its tokens. finish: why it has ended, "" before.
    prompt_tokens: an estimate until the first report. cached_tokens: of the prompt, in the engine's cache.
    device_ns: device time that it is charged for.

    Written by the order: ticket and turn (its places in the queue, now and before its turn), used and cost (tokens of
    its turn, without and with those of its prompt), is_shielded, first_s (the time of its first token), and pauses,
    paused_at and paused_s (how often, since when and how long it was paused).
    Written by the scheduler: number (its name in the engine), unread (responses that its reader has not taken),
    responses and lap_s (statistics of its responses, and the time of the last one).
    """

    def __init__(self, call: Call, facts: Facts, responses: Responses) -> None:
        """Read what a call asks for. Raises InvalidRequest."""
        inputs, (request, context) = call.inputs, call.source or (None, None)
        self.call, self.band, self.tenant = call, call.ticket.band, call.ticket.tenant
        self.deadline = call.ticket.deadline
        self.responses, self.lap_s = responses, call.arrived_s
        given = _bytes(inputs, "sampling_parameters")
        self.sampling = sampling = read_sampling((request.parameters if request else {}) if given is None else given)
        self._prompt = prompt = _prompt(inputs, facts)
        is_text = isinstance(prompt, str)
        self.prompt_tokens = max(1, len(prompt) // BYTES_PER_TOKEN) if is_text else len(prompt)
        if self.prompt_tokens >= facts.context:
            self.prompt_tokens = 1  # the engine refuses it, which takes no time
        self.most = min(sampling.max_tokens, facts.context)
        self.least = self.most if sampling.ignore_eos else sampling.min_tokens
        self.is_bound = bool(sampling.guide or sampling.presence_penalty or sampling.frequency_penalty)
        self.is_stream = _flag(inputs, "stream")
        self.token_s = context.token_s if context is not None and self.is_stream else 0.0
        self.stream_ends_s = call.arrived_s + ((context.stream_s if context is not None else 0.0) or MAX_S)
        shows_prompt = not _flag(inputs, "exclude_input_in_output", self.is_stream)
        if shows_prompt and self.is_stream:
            raise InvalidRequest("When streaming, `exclude_input_in_output` = False is not allowed.")
        named = (request.outputs if request is not None else None) or ()
        self._wanted = {"text_output", *(each.name for each in named)}
        self._wanted |= {each for each in _FLAGS if _flag(inputs, f"return_{each}")}
        if not is_text:
            self._wanted.add("output_ids")
        self._vocabulary = facts.vocabulary
        self._text = GeneratedText(facts.vocabulary, sampling.stop, least=sampling.min_tokens)
        self._new_text = ""
        if shows_prompt and isinstance(prompt, str):
            self._new_text = prompt
        elif shows_prompt:
            self._new_text = b"".join([facts.vocabulary[int(each)] for each in prompt]).decode("utf-8", "replace")
        self._sent_ids = self.cached_tokens = self.device_ns = self.unread = 0
        self._logprobs: list[float] = []
        self.ids: list[int] = []
        self.finish = ""
        self.number = 0
        self.ticket: Ticket | None = None
        self.turn: Ticket | None = None
        self.used = self.cost = self.pauses = 0
        self.is_shielded = self.is_counted = False
        self.first_s = self.paused_at = self.paused_s = 0.0

    @property
    def has_begun(self) -> bool:
        """Return whether it has a token."""
        return bool(self.ids)

    @property
    def tokens(self) -> int:
        """Return the tokens that it keeps in the cache while it runs."""
        return self.prompt_tokens + len(self.ids)

    def rest(self) -> tuple[str | Sequence[int], Sampling]:
        """Return the prompt and the sampling of what is left of it. A part that begins later has a seed made of the
        first one and its position.
        """
        made, sampling = len(self.ids), replace(self.sampling, stop=())
        if not made:
            return self._prompt, sampling
        assert not isinstance(self._prompt, str), "the first report has the ids of a text"
        if sampling.seed is not None:
            sampling = replace(sampling, seed=(sampling.seed + made * NEXT_SEED) % (1 << 63))
        least = max(0, sampling.min_tokens - made)
        return [*self._prompt, *self.ids], replace(sampling, max_tokens=self.most - made, min_tokens=least)

    def take(self, progress: Progress, now: float) -> int:
        """Add news of the engine, and return how many of the tokens belong to it: none follow a stop string."""
        if progress.prompt_tokens and not self.is_counted:
            self.is_counted, self.prompt_tokens = True, progress.prompt_tokens
            self.cached_tokens = progress.cached_tokens
            self._prompt = progress.prompt or self._prompt
        before = len(self.ids)
        for token in progress.ids:
            self.ids.append(token)
            self._new_text += self._text.feed(token)
            if self._text.stopped:
                break
        made = len(self.ids) - before
        self._logprobs += progress.logprobs[:made]
        if made and not before and self.is_stream:
            self.deadline = self.stream_ends_s
        self.finish = "stop" if self._text.stopped else progress.finish
        if self.finish:
            self.end(self.finish, now)
        return made

    def end(self, finish: str, now: float) -> None:
        """Note why it has ended; the text that was held back belongs to it."""
        self._new_text += self._text.flush()
        self.finish = "stop" if self._text.stopped else finish
        self.resumed(now)

    def resumed(self, now: float) -> None:
        """Note that it has a slot, or has ended: a pause is over."""
        if not self.call.started_s:
            self.call.started_s, self.deadline = now, self.call.deadline
        if self.paused_at:
            self.paused_s += now - self.paused_at
            self.paused_at = 0.0

    def decoding(self) -> Decoding:
        """Return how it was made."""
        first_s = self.first_s - self.call.arrived_s if self.first_s else 0.0
        return Decoding(first_s, self.pauses, self.paused_s, self.prompt_tokens, len(self.ids))

    # Responses --------------------------------------------------------------------------------------------------

    @property
    def has_news(self) -> bool:
        """Return whether a response would show something new."""
        shows_ids = not self._wanted.isdisjoint(("output_ids", "logprobs"))
        return bool(self._new_text) or (shows_ids and self._sent_ids < len(self.ids))

    def response(self, outputs: Sequence[str]) -> Outputs:
        """Return a response with all that is new. outputs: the names of the model's outputs, in their order."""
        ids, text, values = self.ids[self._sent_ids :], self._new_text, self._logprobs
        self._sent_ids, self._new_text, self._logprobs = len(self.ids), "", []
        pieces = [self._vocabulary[each] if each < len(self._vocabulary) else b"" for each in ids]
        logprobs = [
            {"id": token, "logprob": value, "bytes": list(piece)}
            for token, value, piece in zip(ids, values, pieces, strict=False)
        ]
        made = {
            "text_output": np.array([text.encode()], object),
            "output_ids": np.array(ids, np.int64),
            "finish_reason": np.array([(self.finish or "None").encode()], object),
            "logprobs": np.array([msgspec.json.encode(logprobs)], object),
            "num_input_tokens": np.array([self.prompt_tokens], np.uint32),
            "num_output_tokens": np.array([len(ids)], np.uint32),
        }
        ended: Mapping[str, ParameterValue] = {
            "finish_reason": self.finish,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": len(self.ids),
            "cached_tokens": self.cached_tokens,
            "paused": self.pauses,
            "paused_ms": round(self.paused_s * 1e3, 3),
        }
        arrays = [made.get(name) if name in self._wanted else None for name in outputs]
        return Outputs(arrays, ended if self.finish else None, last=bool(self.finish))


def _prompt(inputs: Mapping[str, Array], facts: Facts) -> str | list[int]:
    """Return the prompt, within what the model can take at all."""
    text, ids = _bytes(inputs, "text_input"), inputs.get("input_ids")
    if (text is None) == (ids is None):
        raise InvalidRequest("give exactly one of the inputs 'text_input' and 'input_ids'")
    if ids is not None:
        if not 0 < len(ids) < facts.context:
            raise InvalidRequest(f"input_ids has {len(ids)} tokens, this model takes 1 to {facts.context - 1}")
        if ids.min() < 0 or ids.max() >= len(facts.vocabulary):
            raise InvalidRequest(f"input_ids must be ids of the vocabulary, from 0 to {len(facts.vocabulary) - 1}")
        return [int(each) for each in ids]
    assert text is not None
    if len(text) > (most := min(facts.context * MAX_BYTES_PER_TOKEN, MAX_TEXT_BYTES)):
        raise InvalidRequest(f"text_input has {len(text)} bytes, of the {most} that this model takes at most")
    try:
        return text.decode()
    except UnicodeDecodeError:
        raise InvalidRequest("text_input must be UTF-8 text") from None


def _flag(inputs: Mapping[str, Array], name: str, default: bool = False) -> bool:
    return bool(inputs[name][0]) if name in inputs else default


def _bytes(inputs: Mapping[str, Array], name: str) -> bytes | None:
    if name not in inputs:
        return None
    value = inputs[name][0]
    return value if isinstance(value, bytes) else bytes(value)
