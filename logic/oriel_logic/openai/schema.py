"""Request bodies of the OpenAI API as types, and the check of their parameters.

Every field of the official request types is a field of one of these, or in IGNORED (it changes nothing here), or in
REFUSED (a caller would miss what it asks for), each with its reason. A parameter that is null or empty counts as
absent, as do the fields that clients add to a message of the assistant which they send back.
"""

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from oriel_logic.bodies.json import MAX_JSON_BYTES
from oriel_logic.errors import InputTooLarge, ParameterWrong
from oriel_wire.errors import BadMessage, json_fault
from oriel_wire.process.allowed import split_path, with_values
from oriel_wire.v2.depth import MAX_DEPTH, check_depth

MAX_CHOICES = 8
MAX_PROMPTS = 16
MAX_INPUTS = 2048
MAX_ENTRIES = 131_072  # entries of one array in a body: texts, or tokens of one text
MAX_STOPS = 4
MAX_STOP_CHARACTERS = 256
MAX_MESSAGES = 512
MAX_TOOLS = 128
MAX_MARKS = 32_768  # unescaped quotes, opening braces and brackets of a body that gets a second try
# Bounds per body, counted before it is parsed: parsing 4 MiB of lists would take the loop half a second.
MAX_NUMBERS = 327_680
MAX_QUOTES = 131_072
MAX_LISTS = 65_536
MAX_SENTENCE = 4096  # characters of an error that names a field as it was sent; of a longer one the middle is left out
FIELD = re.compile(r"field `([^`]*)`")

_STATE = "nothing is kept between calls here: send the conversation itself"
_CHOSEN_ONLY = "the engine knows the log probability of the chosen token only"
IGNORED = {
    "access_programs": "there are no such programs here",
    "include": "it names additions of hosted tools, which are not here",
    "metadata": "nothing is stored",
    "prompt_cache_key": "prefixes are found in the cache without being named",
    "prompt_cache_options": "prefixes are cached without being asked for",
    "prompt_cache_retention": "the cache keeps what was used last",
    "safety_identifier": "the key names the tenant",
    "service_tier": "the gateway has read it",
    "user": "the key names the tenant",
    "verbosity": "the models here have no such setting",
}
REFUSED = {
    "audio": "the models here read and write text",
    "background": "an answer is sent on the connection that asks for it",
    "background_options": "an answer is sent on the connection that asks for it",
    "best_of": "no answers are made beyond those that are sent",
    "context_management": _STATE,
    "conversation": _STATE,
    "echo": "the engine gives no log probabilities of a prompt",
    "function_call": "use 'tool_choice'",
    "functions": "use 'tools'",
    "image": "the models here read and write text",
    "logit_bias": "the engine cannot weigh single tokens",
    "max_tool_calls": "tools are run by the caller",
    "modalities": "the models here read and write text",
    "moderation": "there is no moderation here",
    "prediction": "the engine takes no predicted output",
    "previous_response_id": _STATE,
    "prompt": "there are no stored prompts here: send the text as 'input'",
    "store": _STATE,
    "suffix": "the models here continue texts at their end",
    "top_logprobs": _CHOSEN_ONLY,
    "truncation": "messages are never left out: send fewer",
    "web_search_options": "there is no search here",
}
_OFF: dict[str, list[Any]] = {
    "best_of": [1],
    "function_call": ["auto", "none"],
    "modalities": [["text"]],
    "truncation": ["disabled"],
}

Count = Annotated[int, Meta(ge=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Name = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
Inputs = str | Annotated[list[str | int | list[int]], Meta(min_length=1, max_length=MAX_ENTRIES)]
Stops = str | Annotated[list[str], Meta(max_length=MAX_STOPS)] | None
Choice = Literal["none", "auto", "required"]
Schema = dict[str, Any]
T = TypeVar("T")


class EmbeddingRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str
    input: Inputs
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Count | None = None


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Sampled(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    model: str
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class Generation(Sampled, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The common parameters of completions and chat. top_k is ours (and vLLM's): `extra_body={"top_k": 40}`."""

    top_k: Annotated[int, Meta(ge=0)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Count | None = None
    stop: Stops = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None


class CompletionRequest(Generation, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt: Inputs
    logprobs: int | None = None


class Part(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["text"]
    text: str


class Called(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    arguments: str = "{}"


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    function: Called
    id: str = ""
    type: Literal["function"] = "function"


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[Part], Meta(max_length=MAX_MESSAGES)] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Meta(max_length=MAX_TOOLS)] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        content = self.content or ""
        return content if isinstance(content, str) else "".join(part.text for part in content)


class Function(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    name: Name
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["function"]
    function: Function


class NamedTool(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["function"]
    function: Called


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True):
    schema: Schema = {}


class Format(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class ChatRequest(Generation, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """chat_template_kwargs is ours (and vLLM's): further values for the model's chat template."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    response_format: Format | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    store: bool | None = None  # nothing is stored
    chat_template_kwargs: dict[str, Any] | None = None


class ResponseRequest(Sampled, frozen=True, kw_only=True, forbid_unknown_fields=True):
    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    tools: Annotated[list[Schema], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice | Schema | None = None
    parallel_tool_calls: bool | None = None
    text: Schema | None = None
    reasoning: Schema | None = None


Usage = dict[str, Any]


def usage(prompt: int, completion: int, cached: int) -> Usage:
    """Return the `usage` of an answer of a language model."""
    total = prompt + completion
    tokens = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": total}
    return {**tokens, "prompt_tokens_details": {"cached_tokens": cached}}


def _decoder(kind: type[Any]) -> msgspec.json.Decoder[Any]:
    """Return the decoder of a request that knows IGNORED and REFUSED fields too."""
    own = kind.__struct_fields__
    more = [(name, Any, None) for name in (*IGNORED, *REFUSED) if name not in own]
    found = msgspec.defstruct(kind.__name__, more, bases=(kind,), frozen=True, kw_only=True, forbid_unknown_fields=True)
    return msgspec.json.Decoder(found)


_decoders: dict[type, msgspec.json.Decoder[Any]] = {
    each: _decoder(each) for each in (EmbeddingRequest, CompletionRequest, ChatRequest, ResponseRequest)
}
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_messages = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_ABSENT = frozenset((b"null", b"[]", b"{}", b'""'))
_REQUIRED = frozenset({"model", "input", "prompt", "messages", "role", "content"})
_WHOLE = re.compile(rb"(-?[0-9]{1,18})\.0{1,18}\Z")
_ECHOED = frozenset(Message.__struct_fields__) | {"function_call", "audio"}


def parse(body: bytes, kind: type[T]) -> T:
    """Parse a body. Raises ParameterWrong, which names the parameter, or InputTooLarge (4 MiB, or too many values)."""
    if len(body) > MAX_JSON_BYTES:
        raise InputTooLarge(f"JSON bodies may have at most {MAX_JSON_BYTES} bytes, this one has {len(body)}")
    if len(body) > MAX_LISTS:
        check_extent(body)
    try:
        check_depth(body)
        request = _decoded(body, kind)
    except msgspec.ValidationError as error:
        text = with_values(error, kind)
        raise wrong(text if len(text) <= MAX_SENTENCE else text[:1024] + text[-1024:]) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        fault = f"the body is not valid JSON: {json_fault(body, error)}"
        raise ParameterWrong(fault if body.strip() else "the body is empty") from error
    except (BadMessage, RecursionError) as error:
        raise ParameterWrong(f"the JSON is nested more than {MAX_DEPTH} levels deep: flatten it") from error
    check_supported(request, kind)
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
    return {
        name: msgspec.Raw(whole[1]) if (whole := _WHOLE.match(value)) is not None else raw
        for name, raw in fields.items()
        if (value := bytes(raw)) not in _ABSENT or name in _REQUIRED
    }


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


def check_supported(request: Any, kind: type[Any]) -> None:
    """Check that this server can honour every parameter. Raises ParameterWrong."""
    for name, why in REFUSED.items():
        value = None if name in kind.__struct_fields__ else getattr(request, name)
        # A value that asks for nothing: empty, or biases that are all zero.
        if not value or value in _OFF.get(name, ()) or (isinstance(value, dict) and not any(value.values())):
            continue
        if name != "best_of" or value != getattr(request, "n", None):
            raise ParameterWrong(f"'{name}' is not served: {why}", param=name)
    if isinstance(request, Generation):
        check_generation(request)


def check_generation(request: Generation) -> None:
    """Check the fields against one another. Raises ParameterWrong."""
    if request.stream_options is not None and not request.stream:
        raise ParameterWrong("'stream_options' is only for stream=true", param="stream_options")
    for stop in stops_of(request.stop):
        if not 0 < len(stop) <= MAX_STOP_CHARACTERS:
            raise ParameterWrong(f"a stop string must have 1 to {MAX_STOP_CHARACTERS} characters", param="stop")
    if isinstance(request, CompletionRequest) and request.logprobs:
        raise ParameterWrong(f"'logprobs' may be 0 here: {_CHOSEN_ONLY}", param="logprobs")
    if not isinstance(request, ChatRequest):
        return
    for index, each in enumerate(request.messages):
        if each.content is None and each.role != "assistant":
            raise wrong(f"Object missing required field `content` - at `$.messages[{index}]`")
    chosen, form = request.tool_choice, request.response_format
    names = {each.function.name for each in request.tools or ()}
    if isinstance(chosen, NamedTool) and chosen.function.name not in names:
        why = f"'tool_choice' names '{chosen.function.name}', which is not in 'tools'"
        raise ParameterWrong(why, param="tool_choice")
    if chosen == "required" and not names:
        raise ParameterWrong("'tool_choice' requires a call, and 'tools' is empty", param="tool_choice")
    if form is not None and form.type != "text" and names and chosen != "none":
        why = "'response_format' leaves no room for calls: leave it or 'tools' out"
        raise ParameterWrong(why, param="response_format")


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
