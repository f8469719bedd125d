"""Check the models that requests of the OpenAI API name, for tenants that may not use all models. Pure.

Servers of others serve whatever model a body names, so the tenant's list has to hold here. A body that can be read in
two ways is refused: it has to have exactly one `model`, at one place, that every parser finds there.

JSON: one object in UTF-8, at most 64 levels deep, without a second key `model` in any letter case (Go's parser ignores
the case), and without another field whose name means models: `models`, `fallbacks`, `lora_path`, `adapter_id`.
Form: `multipart/form-data` without anything before, between or after its parts, each with one plain
`Content-Disposition`.

A field of the head or of the query that is named after a model is refused as well, and so is a content encoding. A name
that the tenant may not use gets the answer of one that does not exist.
"""

import re
from collections.abc import Iterator

import msgspec

from oriel_gateway.errors import Outcome, Refused
from oriel_policies.documents import Tenant
from oriel_wire.h1.request import RequestHead
from oriel_wire.near_names import did_you_mean

JUDGED_BYTES = 4 * 1024 * 1024  # the most bytes of a JSON body
MAX_QUOTES = 65_536  # the most unescaped quotes in a JSON body; a text or a key has two
MAX_BRACKETS = 65_536  # the most opening brackets and braces in a JSON body
MAX_DEPTH = 64  # the most levels of lists and objects in a JSON body
TOOLS_BYTES = 1024 * 1024  # the most bytes of the tools in a JSON body
MAX_FIELD = 256  # the most characters of a field's name
MAX_PARTS = 256  # the most parts of a form
STATE_BYTES = 8 * 1024 * 1024  # the most bytes of a body of `/v1/responses` whose state is judged
_STATE = frozenset({"previous_response_id", "conversation", "prompt"})  # members that name what is stored
_LABELS = frozenset({"id", "type", "status", "role", "object"})  # members of an item that are not its content
_EMPTY = (b"null", b'""', b"[]", b"{}")
_PART_HEAD_BYTES = 4096
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}(?:/[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}){0,3}\Z")
_NAMES_MODELS = ("model", "lora", "adapter", "fallback")
_JSON_TYPE = re.compile(r'application/json[ \t]*(?:;[ \t]*charset="?utf-8"?)?\Z', re.IGNORECASE)
_FORM_TYPE = re.compile(r"""multipart/form-data[ \t]*;[ \t]*boundary=("?)([A-Za-z0-9_-]{1,70})\1\Z""", re.I)
_DISPOSITION = re.compile(
    r'form-data; ?name="([^"\\%]*)"(; ?filename="[^"\\]*")?(; ?filename\*=[A-Za-z0-9\'%._-]*)?\Z', re.IGNORECASE
)
# This matches the key `model` in any spelling that JSON has for it, at any place.
_KEY = re.compile(
    rb'"(?:m|\\u00[46]d)(?:o|\\u00[46]f)(?:d|\\u00[46]4)(?:e|\\u00[46]5)(?:l|\\u00[46]c)"[ \t\r\n]*:', re.IGNORECASE
)
_LISTS = bytes.maketrans(b"{}", b"[]")
_NO_BRACKETS = bytes(code for code in range(256) if code not in b"[]{}")
_as_object = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_as_objects = msgspec.json.Decoder(list[dict[str, msgspec.Raw]]).decode
_as_text = msgspec.json.Decoder(str).decode
_as_any = msgspec.json.Decoder().decode


class _List(msgspec.Struct):
    data: list[msgspec.Raw]


def judge_head(head: RequestHead, form: str) -> None:
    """Refuse a head whose body might be read in another way. form: the kind of body, see `Target.names`. Raises
    Refused.
    """
    sent = head.sent_on()
    for name, value in sent:
        if "model" in name:
            raise _refused(
                f"header field {name[:64]} may name a model: with this key, a model is named in the body only"
            )
        if name == "content-encoding" and value.strip().lower() not in ("", "identity"):
            raise Refused(
                Outcome.ENCODING_UNSUPPORTED, "send the body without a content encoding: the model is read from it"
            )
    if form in ("list", "entry"):
        if head.content_length or head.chunked:
            raise _refused("this path takes no body")
        return
    if "model" in head.query.lower() or "%" in head.query:
        raise _refused("the query may name a model: with this key, a model is named in the body only")
    kinds = [value for name, value in sent if name == "content-type"]
    if form == "json":
        if len(kinds) != 1 or _JSON_TYPE.match(kinds[0]) is None:
            raise Refused(Outcome.ENCODING_UNSUPPORTED, "send the body as application/json: the model is read from it")
        if (head.content_length or 0) > JUDGED_BYTES:
            raise _too_large()
    elif len(kinds) != 1 or _FORM_TYPE.match(kinds[0]) is None:
        raise Refused(Outcome.ENCODING_UNSUPPORTED, "send the body as multipart/form-data with a plain boundary")


def judge_body(head: RequestHead, form: str, body: bytes, tenant: Tenant) -> str:
    """Return the single model that every reader finds in a body, if the tenant may use it. Raises Refused."""
    if form == "json":
        fields = _object(body)
        raw = fields.get("model")
        name = _text(raw) if raw is not None else None
        tools = fields.get("tools")
        if tools is not None and bytes(tools) != b"null":
            _judge_tools(tools, tenant)
    else:
        kind = next(value for name, value in head.sent_on() if name == "content-type")
        match = _FORM_TYPE.match(kind)
        assert match is not None
        name = _named_in_form(body, match[2].encode())
    if name is None:
        raise _refused("name the model in the field `model`: this key may not use every model")
    _check(name, tenant)
    return name


def without_state(body: bytes, *, judged: bool) -> bytes:
    """Return a body of `/v1/responses` as it is sent on: it names nothing that an earlier call, perhaps another
    tenant's, has stored.

    Readers differ in the letter case of names and in the meaning of members that are there twice. So names that are one
    in small letters are refused, only the last of equal members is sent on, and none that is null and names what is
    stored. judged: `judge_body` has taken it. Raises Refused.
    """
    if len(body) > STATE_BYTES:
        raise _too_large(STATE_BYTES)
    stored: list[str] = []
    sent: dict[str, object] = {}
    try:
        if not judged:
            _plain(body)
        fields = _as_object(body)
        for spelled, (name, raw) in zip(fields, _caseless(fields).items(), strict=True):
            if name in _STATE:
                stored += [spelled] if bytes(raw) != b"null" else []
            elif name == "input" and bytes(raw)[:1] in b"[{":
                sent[spelled] = items = _as_objects(raw)
                stored += [spelled] if any(map(_is_reference, items)) else []
            else:
                sent[spelled] = raw
    except (ValueError, RecursionError):
        message = "the body is not a JSON object in UTF-8 whose `input` is a text or a list of objects"
        raise Refused(Outcome.INVALID_REQUEST, message if body else "the body is empty") from None
    if stored:
        message = f"'{stored[0]}' names what is stored on a server that others use too: send the content itself"
        raise Refused(Outcome.INVALID_REQUEST, message, more={"param": stored[0], "code": "stored_state"})
    return msgspec.json.encode(sent)


def _caseless(fields: dict[str, msgspec.Raw]) -> dict[str, msgspec.Raw]:
    """Return the members of an object by their names in small letters. Raises Refused if two names are one then."""
    caseless = {name.casefold(): raw for name, raw in fields.items()}
    if len(caseless) != len(fields):
        raise Refused(Outcome.INVALID_REQUEST, "two members of one object differ in the case of letters only")
    return caseless


def _is_reference(fields: dict[str, msgspec.Raw]) -> bool:
    """Return whether an item of a request refers to a stored item: by its type, or by an id without content."""
    item = _caseless(fields)
    kind = _as_text(item["type"]).casefold() if bytes(item.get("type", b""))[:1] == b'"' else ""
    if kind == "item_reference" or "id" not in item or bytes(item["id"]) == b"null":
        return kind == "item_reference"
    filled = {name for name, raw in item.items() if bytes(raw).translate(None, b" \t\r\n") not in _EMPTY}
    return not filled - _LABELS or (not kind and "content" not in filled)


def naming_another(body: bytes, model: str) -> bytes | None:
    """Return a JSON body that names `model` in place of its own; None if every reader would not find that one."""
    try:
        fields = _object(body)
        if "model" not in fields:
            return None
        _text(fields["model"])
    except Refused:
        return None
    return msgspec.json.encode({**fields, "model": model})


def unknown_model(name: str, tenant: Tenant) -> Refused:
    """Build the refusal for a model that is absent for this key, whether it exists or not; see `targets.absent`."""
    near = did_you_mean(name, (each for each in tenant.models if "*" not in each))
    more = {"param": "model", "code": "model_not_found"}
    return Refused(Outcome.NOT_FOUND, f"there is no model {name[:128]!r} here for this key{near}", more=more)


def filtered(answer: bytes, tenant: Tenant, *, entry: bool) -> bytes | None:
    """Return a server's list of models, or one entry of it, without the models that the tenant may not use.

    Returns None if nothing is left. Raises ValueError or RecursionError if the data is no such answer.
    """
    if entry:
        return _seen(msgspec.Raw(answer), tenant)
    models = [one for raw in msgspec.json.decode(answer, type=_List).data if (one := _seen(raw, tenant)) is not None]
    return b'{"object":"list","data":[' + b",".join(models) + b"]}"


def _seen(raw: msgspec.Raw, tenant: Tenant) -> bytes | None:
    fields = _as_object(raw)
    name = _as_any(fields.get("id", b"null"))
    if not isinstance(name, str) or not _may_use(name, tenant):
        return None
    for of in ("root", "parent"):  # the models that it was made of count as well
        if of in fields and not (isinstance(base := _as_any(fields[of]), str) and _may_use(base, tenant)):
            del fields[of]
    return msgspec.json.encode(fields)


def _object(body: bytes) -> dict[str, msgspec.Raw]:
    """Return the fields of a JSON object that has at most one `model`. Raises Refused."""
    if len(body) > JUDGED_BYTES:
        raise _too_large()
    try:
        if not body.isascii():
            body.decode("utf-8")
        _check_depth(plain := _plain(body))
        fields = _as_object(body)
        _check_names(plain, [fields if plain is body else _as_object(plain)])
    except (ValueError, RecursionError):
        raise _refused("the body is not one JSON object in UTF-8" if body else "the body is empty") from None
    return fields


def _check_names(text: bytes, objects: list[dict[str, msgspec.Raw]]) -> None:
    """Refuse objects that have `model` more than once, or other fields named after models.

    text: their JSON without escaped quotes and backslashes: with them a search takes too long.
    """
    names = [name for fields in objects for name in fields if name != "model"]
    long = [name for name in names if len(name) > MAX_FIELD]
    if long or any(map("\n".join(names).casefold().__contains__, _NAMES_MODELS)):
        named = long or [name for name in names if any(map(name.casefold().__contains__, _NAMES_MODELS))]
        name = next(iter(named), "")
        raise _refused(f"the field {name[:64]!r} may name a model: with this key, only `model` names it")
    # Each key `model` is an object's own or lies within one of its values; a decoder keeps the last of equal keys.
    own, values = sum(["model" in each for each in objects]), [raw for each in objects for raw in each.values()]
    if len(_KEY.findall(text)) != own + len(_KEY.findall(b",".join(values))):
        raise _refused("the field `model` is given more than once")


def _plain(data: bytes) -> bytes:
    """Return a JSON text without escaped quotes and backslashes. Raises Refused if it has too many texts or lists."""
    # Left to right a run of backslashes pairs up from its start: what remains before a quote escapes it.
    escapes = b"\\" in data and len(data) <= JUDGED_BYTES  # in a larger text each quote counts, because this takes time
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"") if escapes else data
    if plain.count(b'"') > MAX_QUOTES or data.count(b"[") + data.count(b"{") > MAX_BRACKETS:
        raise _too_large()
    return plain


def _check_depth(plain: bytes) -> None:
    """Raise ValueError if a text without escapes is nested deeper than MAX_DEPTH: parsers differ in how deep they go.

    Exact for valid JSON. It needs no numpy, unlike `oriel_wire.v2.depth`, which takes larger texts.
    """
    if plain.count(b"[") + plain.count(b"{") <= MAX_DEPTH:
        return
    rest = b"".join(plain.split(b'"')[::2]).translate(_LISTS, _NO_BRACKETS)
    for _ in range(MAX_DEPTH):  # each time all innermost lists go
        rest = rest.replace(b"[]", b"")
    if rest:
        raise ValueError


def _judge_tools(raw: msgspec.Raw, tenant: Tenant) -> None:
    """Check tools that run on a model of their own (`image_generation`) and name it."""
    if len(data := bytes(raw)) > TOOLS_BYTES:
        raise Refused(Outcome.TOO_LARGE, f"with this key, `tools` may have at most {TOOLS_BYTES} bytes")
    try:
        tools, plain = _as_objects(data), _plain(data)
        _check_names(plain, tools if plain is data else _as_objects(plain))
    except (ValueError, RecursionError):
        raise _refused("`tools` is not a list of objects") from None
    for tool in tools:
        if "model" in tool:
            _check(_text(tool["model"]), tenant)


def _text(raw: msgspec.Raw) -> str:
    try:
        if name := _as_text(raw):
            return name
    except (msgspec.DecodeError, UnicodeDecodeError):
        pass
    raise _refused("`model` has to be a name")


def _named_in_form(body: bytes, boundary: bytes) -> str | None:
    named: list[bytes] = []
    for name, is_file, more, data in _parts(body, boundary):
        if name == "model":
            if is_file or not all(_plain_text(line) for line in more):
                raise _refused("the part `model` has to be a plain text")
            named.append(data)
        elif any(map(name.casefold().__contains__, _NAMES_MODELS)):
            raise _refused(f"the part {name[:64]!r} may name a model: with this key, only `model` names it")
    if len(named) > 1:
        raise _refused("the part `model` is given more than once")
    return named[0].decode("latin-1") if named else None


def _plain_text(line: str) -> bool:
    name, _, value = line.partition(":")
    return name.lower() == "content-type" and value.strip().lower() in ("text/plain", "text/plain; charset=utf-8")


def _parts(body: bytes, boundary: bytes) -> Iterator[tuple[str, bool, list[str], bytes]]:
    """Return of each form part its name, whether it is a file, other lines of its head, and its data. Raises
    Refused.
    """
    mark = b"--" + boundary
    wrong = _refused("the body is not multipart/form-data in its simplest form")
    if not body.startswith(mark):
        raise wrong
    at, marks = len(mark), 1
    while not body.startswith(b"--", at):
        stop = body.find(b"\r\n" + mark, at)
        start = body.find(b"\r\n\r\n", at, at + _PART_HEAD_BYTES)
        if not body.startswith(b"\r\n", at) or start < 0 or stop < start + 4 or marks > MAX_PARTS:
            raise wrong
        lines = body[at + 2 : start].decode("latin-1").split("\r\n")
        about = [line for line in lines if line.lower().startswith("content-disposition:")]
        others = [line for line in lines if line not in about]
        match = _DISPOSITION.match(about[0].partition(":")[2].strip()) if len(about) == 1 else None
        if match is None or any(line[:1] in (" ", "\t") or "\r" in line or "\n" in line for line in lines):
            raise wrong
        yield match[1], match[2] is not None or match[3] is not None, others, body[start + 4 : stop]
        at, marks = stop + 2 + len(mark), marks + 1
    # Some readers end lines with LF alone: they would find parts where others see data.
    if body[at + 2 :] not in (b"", b"\r\n") or body.count(mark) != marks:
        raise wrong


def _may_use(name: str, tenant: Tenant) -> bool:
    return _MODEL_NAME.match(name) is not None and tenant.may_use_model(name)


def _check(name: str, tenant: Tenant) -> None:
    if not _may_use(name, tenant):
        raise unknown_model(name, tenant)


def _refused(message: str) -> Refused:
    return Refused(Outcome.INVALID_REQUEST, message, more={"param": "model"})


def _too_large(most: int = JUDGED_BYTES) -> Refused:
    """Build the refusal of a JSON body. most: the most bytes that it may have."""
    bounds = f"at most {MAX_QUOTES // 2} keys and texts and {MAX_BRACKETS} lists and objects"
    message = f"the body is read for its model or for what is stored: at most {most} bytes of JSON, with {bounds}"
    return Refused(Outcome.TOO_LARGE, message)
