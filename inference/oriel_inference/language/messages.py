"""The messages between the server and the process of a language model, as frames of `oriel_wire.process.messages`."""

import msgspec

from oriel_inference.backends.python.frames import decode_with
from oriel_inference.language.engine import Facts, Finish, Options, Sampling


class Load(msgspec.Struct, array_like=True, tag=1):
    """The first message to a child. engine: its name, a key of `child.ENGINES`."""

    engine: str
    path: str
    options: Options


class Loaded(msgspec.Struct, array_like=True, tag=2):
    """The model is loaded."""

    facts: Facts


class Failed(msgspec.Struct, array_like=True, tag=3):
    """The model cannot be loaded; the child ends. reason: a sentence for the operator."""

    reason: str


class Add(msgspec.Struct, array_like=True, tag=4):
    """Begin a sequence. number: chosen by the server, never used twice for one process."""

    number: int
    prompt: str | list[int]
    sampling: Sampling


class Cancel(msgspec.Struct, array_like=True, tag=5):
    """End a sequence. A report that was sent before may still name it; none that is sent later does."""

    number: int


class Progress(msgspec.Struct, array_like=True):
    """The news of one sequence.

    ids: its new tokens. logprobs: one for each of them, if they were requested.
    finish: "" while it goes on.
    prompt_tokens, cached_tokens: of its prompt, in its first report only; 0 in later ones.
    prompt: the ids of a prompt that was text, in the first report only.
    refused: why it was not begun, or cannot go on; nothing else is set then, and no report follows.
    """

    number: int
    ids: list[int] = []
    logprobs: list[float] = []
    finish: Finish = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt: list[int] = []
    refused: str = ""


class StepReport(msgspec.Struct, array_like=True, tag=7):
    """The result of one step.

    seconds: the time of the step alone; 0 if there was none, because all was refused or cancelled.
    prompt_tokens: tokens of prompts that were computed in it, as far as is known.
    cache_use: share of the cache's blocks in use, from 0 to 1.
    progress: the sequences with news, in the order in which they were added.
    """

    seconds: float
    prompt_tokens: int
    cache_use: float
    progress: list[Progress]


Command = Load | Add | Cancel
Report = Loaded | Failed | StepReport

_commands: "msgspec.msgpack.Decoder[Command]" = msgspec.msgpack.Decoder(Command)
_reports: "msgspec.msgpack.Decoder[Report]" = msgspec.msgpack.Decoder(Report)


def read_command(head: memoryview) -> Command:
    """Return a message of the server. Raises FrameError."""
    return decode_with(_commands, head)


def read_report(head: memoryview) -> Report:
    """Return a message of the child. Raises FrameError."""
    return decode_with(_reports, head)
