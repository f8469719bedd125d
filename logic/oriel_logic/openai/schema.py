"""Request bodies of the OpenAI API as types, and the check of their parameters.

Parameters that this server cannot honour are refused by name, as that API does; those that change nothing here (the end
user's name, storage) are parsed and dropped. A parameter that is null or empty counts as absent, as do the fields that
clients add to a message of the assistant which they send back.
"""

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from oriel_logic.bodies.json import MAX_JSON_BYTES
from oriel_logic.errors import InputTooLarge, ParameterWrong
from oriel_wire.errors import json_fault
from oriel_wire.process.allowed import split_path, with_values

MAX_CHOICES = 8
MAX_PROMPTS = 16
MAX_INPUTS = 2048
MAX_ENTRIES = 131_072  # entries of one array in a body: texts, or tokens of one text
MAX_STOPS = 4
MAX_STOP_CHARACTERS = 256
MAX_MESSAGES = 512
MAX_BIASES = 300
MAX_MARKS = 32_768  # unescaped quotes, opening braces and brackets of a body that gets a second try
# Bounds per body, counted before it is parsed: parsing 4 MiB of lists would take the loop half a second.
MAX_NUMBERS = 327_680
MAX_QUOTES = 131_072
MAX_LISTS = 65_536
MAX_SENTENCE = 4096  # characters of an error that names a field as it was sent; of a longer one the middle is left out
FIELD = re.compile(r"field `([^`]*)`")

Count = Annotated[int, Meta(ge=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Inputs = str | Annotated[list[str | int | list[int]], Meta(min_length=1, max_length=MAX_ENTRIES)]
Stops = str | Annotated[list[str], Meta(max_length=MAX_STOPS)] | None
T = TypeVar("T")


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str
    input: Inputs
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Count | None = None
    user: str | None = None


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Generation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The common parameters of completions and chat. top_k is ours (and vLLM's): `extra_body={"top_k": 40}`."""

    model: str
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Count | None = None
    stop: Stops = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_BIASES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    # Parsed and dropped.
    user: str | None = None


class CompletionRequest(Generation, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt: Inputs
    # Refused unless they have the value that means "off".
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None


class Part(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["text"]
    text: str


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[Part], Meta(max_length=MAX_MESSAGES)] | None = None
    name: str | None = None
    refusal: str | None = None

    @property
    def text(self) -> str:
        content = self.content or ""
        return content if isinstance(content, str) else "".join(part.text for part in content)


class ChatRequest(Generation, frozen=True, kw_only=True, forbid_unknown_fields=True):
    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    # Parsed and dropped.
    metadata: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    # Refused unless they have the value that means "off".
    logprobs: bool | None = None
    modalities: list[str] | None = None
    response_format: dict[str, Any] | None = None
    tools: list[Any] | None = None


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts. Embeddings have no completion_tokens."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int | UnsetType = UNSET


_decoders: dict[type, msgspec.json.Decoder[Any]] = {
    each: msgspec.json.Decoder(each) for each in (EmbeddingRequest, CompletionRequest, ChatRequest)
}
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_messages = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_ABSENT = frozenset((b"null", b"[]", b"{}", b'""'))
_REQUIRED = frozenset({"model", "input", "prompt", "messages", "role", "content"})
_WHOLE = re.compile(rb"(-?[0-9]{1,18})\.0{1,18}\Z")
_ECHOED = frozenset(Message.__struct_fields__) | {"tool_calls", "function_call", "audio"}


def parse(body: bytes, kind: type[T]) -> T:
    """Parse a body. Raises ParameterWrong, which names the parameter, or InputTooLarge (4 MiB, or too many values)."""
    if len(body) > MAX_JSON_BYTES:
        raise InputTooLarge(f"JSON bodies may have at most {MAX_JSON_BYTES} bytes, this one has {len(body)}")
    if len(body) > MAX_LISTS:
        check_extent(body)
    try:
        request = _decoded(body, kind)
    except msgspec.ValidationError as error:
        text = with_values(error, kind)
        raise wrong(text if len(text) <= MAX_SENTENCE else text[:1024] + text[-1024:]) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        fault = f"the body is not valid JSON: {json_fault(body, error)}"
        raise ParameterWrong(fault if body.strip() else "the body is empty") from error
    except RecursionError as error:
        raise ParameterWrong("the JSON is nested too deep: flatten it") from error
    if isinstance(request, Generation):
        check_supported(request)
    return request


def check_extent(body: bytes) -> None:
    """Raise InputTooLarge for a body with more numbers, texts or lists than the loop has time for."""
    # A text begins with a quote that no backslash precedes.
    fits = body.count(b'"') - body.count(b'\\"') <= MAX_QUOTES
    if fits and (body.count(b",") > MAX_NUMBERS or body.count(b"[") + body.count(b"{") > MAX_LISTS):
        # Left to right a run of backslashes pairs up from its start: what remains before a quote escapes it.
        plain = body.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in body else body
        rest = b"".join(plain.split(b'"')[::2])
        fits = rest.count(b",") <= MAX_NUMBERS and rest.count(b"[") + rest.count(b"{") <= MAX_LISTS
    if not fits:
        bounds = f"{MAX_NUMBERS} numbers, {MAX_QUOTES} quotes of texts and {MAX_LISTS} lists and objects"
        raise InputTooLarge(f"a body may have {bounds} altogether, this one has more: send several requests")


def _decoded(body: bytes, kind: type[T]) -> T:
    """Decode a body; one that is not strictly right gets a second try without what counts as absent."""
    decoder: msgspec.json.Decoder[T] = _decoders[kind]
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        if len(str(error)) > MAX_SENTENCE:
            raise
        if body.count(b'"') - body.count(b'\\"') + body.count(b"{") + body.count(b"[") > MAX_MARKS:
            raise
        try:
            fields = _present(_fields.decode(body))
            if "messages" in fields:
                messages = [_kept(each) for each in _messages.decode(fields["messages"])]
                fields["messages"] = msgspec.Raw(msgspec.json.encode(messages))
        except msgspec.ValidationError:
            raise error from None
        return decoder.decode(msgspec.json.encode(fields))


def _present(fields: dict[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
    """Return the fields that have a value, or need one; a whole number may be written as 2.0."""
    found = {}
    for name, raw in fields.items():
        value = bytes(raw)
        if value not in _ABSENT or name in _REQUIRED:
            whole = _WHOLE.match(value)
            found[name] = raw if whole is None else msgspec.Raw(whole[1])
    return found


def _kept(message: dict[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
    """Return what counts of a message; of the assistant's own, only what this API defines."""
    found = _present(message)
    if bytes(found.get("role", b"")) == b'"assistant"':
        return {name: raw for name, raw in found.items() if name in _ECHOED}
    return found


def wrong(text: str) -> ParameterWrong:
    """Convert msgspec's error: the parameter is its path, or the missing or unknown field."""
    sentence, path = split_path(text)
    where = path[1:].removeprefix(".")
    field = FIELD.search(sentence)
    if field is not None:
        where = f"{where}.{field[1]}" if where else field[1]
        if "unknown field" in sentence:
            return ParameterWrong(f"this server has no parameter '{where}'", param=where, code="unknown_parameter")
        return ParameterWrong(f"the parameter '{where}' is missing", param=where, code="missing_required_parameter")
    return ParameterWrong(f"the parameter '{where}' is wrong: {sentence}" if where else sentence, param=where or None)


def check_supported(request: Generation) -> None:
    """Check that this server can honour every parameter. Raises ParameterWrong."""
    requested: dict[str, bool] = {}
    if isinstance(request, CompletionRequest):
        requested = {
            "best_of": request.best_of not in (None, 1, request.n),
            "echo": bool(request.echo),
            "logprobs": request.logprobs is not None,
            "suffix": bool(request.suffix),
        }
    elif isinstance(request, ChatRequest):
        requested = {
            "logprobs": bool(request.logprobs),
            "modalities": request.modalities not in (None, [], ["text"]),
            "response_format": request.response_format not in (None, {}, {"type": "text"}),
            "tools": bool(request.tools),
        }
        for index, each in enumerate(request.messages):
            if each.content is None and each.role != "assistant":
                raise wrong(f"Object missing required field `content` - at `$.messages[{index}]`")
    for name, is_requested in requested.items():
        if is_requested:
            raise ParameterWrong(f"'{name}' is not supported by this server: leave it out", param=name)
    if request.stream_options is not None and not request.stream:
        raise ParameterWrong("'stream_options' is only for stream=true", param="stream_options")
    for stop in stops_of(request.stop):
        if not 0 < len(stop) <= MAX_STOP_CHARACTERS:
            raise ParameterWrong(f"a stop string must have 1 to {MAX_STOP_CHARACTERS} characters", param="stop")
    for token in request.logit_bias or ():
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise ParameterWrong(f"'{token[:32]}' is not a token id", param="logit_bias")


def stops_of(stop: str | list[str] | None) -> list[str]:
    return [stop] if stop and isinstance(stop, str) else list(stop or ())


def texts_or_tokens(value: str | list[Any], param: str, *, most: int) -> list[str] | list[list[int]]:
    """Check `input` and `prompt`: one text, several, one array of token ids, or several.

    Raises ParameterWrong for a mix, for an empty one and for more than `most`.
    """
    several: list[Any] = [value] if isinstance(value, str) else value
    kinds = {type(each) for each in several}
    if kinds == {int}:
        several, kinds = [several], {list}
    if len(kinds) != 1:
        raise ParameterWrong(f"'{param}' must be a text, a list of texts, or arrays of token ids", param=param)
    if len(several) > most:
        raise ParameterWrong(f"'{param}' has {len(several)} entries, at most {most} are taken", param=param)
    if not all(several):
        raise ParameterWrong(f"'{param}' has an empty entry: there is nothing to work on", param=param)
    return several
