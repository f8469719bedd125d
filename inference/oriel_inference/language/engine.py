"""The interface of an engine of language models: what the step loop of a model's process needs of it.

An engine holds sequences, each under a number that its caller chooses. One `step` computes the next token of every
sequence whose prompt is done, and a piece of the prompts that are not. A sequence that is cancelled and added again
with its tokens as part of its prompt goes on as if nothing had happened, and cheaply if its blocks are still cached.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_STOP_IDS = 256
MAX_TOKENS = 1 << 20

Finish = Literal["", "stop", "length"]
GuideKind = Literal["json_schema", "regex", "grammar", "structural_tag"]
_Count = Annotated[int, Meta(ge=0, le=MAX_TOKENS)]
_Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]
_Id = Annotated[int, Meta(ge=0, lt=1 << 31)]


class PromptRefused(Exception):
    """The engine does not take a sequence. `text`: the sentence for its sender."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


class Guide(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A grammar that the answer obeys. text: the JSON schema, the regular expression, the EBNF grammar, or the
    structural tag as JSON.
    """

    kind: GuideKind
    text: str


class Sampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The rules by which the tokens of one answer are chosen; names, meanings and defaults are those of vLLM.

    max_tokens, min_tokens: tokens of the answer.
    temperature: 0 takes the most likely token.
    top_k: 0 for all tokens.
    stop: texts that end the answer and are no part of it. The server finds them in the text; an engine need not.
    stop_token_ids: further ids that end the answer, beside those of the model, which ignore_eos leaves out.
    logprobs: None for no log probabilities, 0 or 1 for that of each chosen token.
    """

    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] = 16
    min_tokens: _Count = 0
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] = 0
    min_p: Annotated[float, Meta(ge=0.0, lt=1.0)] = 0.0
    presence_penalty: _Penalty = 0.0
    frequency_penalty: _Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(ge=0.01, le=10.0)] = 1.0
    seed: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)] | None = None
    stop: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)], ...], Meta(max_length=MAX_STOPS)
    ] = ()
    stop_token_ids: Annotated[tuple[_Id, ...], Meta(max_length=MAX_STOP_IDS)] = ()
    ignore_eos: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=1)] | None = None
    guide: Guide | None = None


WARM_UP = Sampling(max_tokens=2, guide=Guide("regex", "a"))  # of the token that an engine makes at its start


class Options(msgspec.Struct, frozen=True):
    """The values with which an engine loads a model.

    threads: threads that compute.
    cache_mb: MiB of the cache of keys and values.
    max_running: most sequences at a time.
    step_tokens: most prompt tokens of one step; longer prompts are computed in pieces.
    settings: the engine's own parameters of the configuration.
    """

    threads: int = 1
    cache_mb: int = 1024
    max_running: int = 16
    step_tokens: int = 64
    settings: Mapping[str, str] = {}


class Facts(msgspec.Struct, frozen=True):
    """The facts about a loaded model.

    context: most tokens of prompt and answer together.
    vocabulary: the bytes of each id; b"" for control tokens.
    control_tokens: text -> id.
    chat_template: a Jinja template; "" if the model has none.
    bos, eos: texts of the tokens of begin and end; "" if there are none.
    cache_tokens: most tokens in its cache.
    """

    context: int
    vocabulary: list[bytes]
    control_tokens: dict[str, int]
    chat_template: str
    bos: str
    eos: str
    cache_tokens: int
    engine: str


class Piece(msgspec.Struct, frozen=True):
    """The new tokens of one sequence.

    logprobs: one for each id, or none.
    finish: "" while the sequence goes on. Once it has ended, the engine has forgotten it.
    """

    ids: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    finish: Finish = ""


class Added(msgspec.Struct, frozen=True):
    """An accepted sequence. ids: its prompt. cached: tokens of it that need no computing, as far as is known."""

    ids: Sequence[int]
    cached: int = 0


class LanguageEngine(ABC):
    """An engine with one model. One thread uses it. Errors that are none of the documented ones end the process."""

    @abstractmethod
    def load(self, path: str, options: Options) -> Facts:
        """Load the model file, or the folder, at `path`. Raises LoadFailed."""

    @abstractmethod
    def add(self, number: int, prompt: str | Sequence[int], sampling: Sampling) -> Added:
        """Begin a sequence. Raises PromptRefused.

        prompt: text, in which control tokens count as such, or ids.
        """

    @abstractmethod
    def step(self) -> None:
        """Compute one step of all sequences; there is at least one. Blocks."""

    @abstractmethod
    def read(self, number: int) -> Piece:
        """Return the tokens of a sequence since the last call.

        Raises PromptRefused for a sequence that cannot go on, such as one whose guide cannot be compiled; the engine
        has forgotten it then.
        """

    @abstractmethod
    def cancel(self, number: int) -> None:
        """Forget a sequence that has not ended. Its blocks stay cached as long as nothing else needs them."""

    @abstractmethod
    def cache_use(self) -> float:
        """Return the share of the cache's blocks that sequences hold, from 0 to 1."""
