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
from oriel_wire.h1 import RequestHead
from oriel_wire.near_names import did_you_mean

JUDGED_BYTES = 4 * 1024 * 1024  # the most bytes of a JSON body
MAX_QUOTES = 65_536  # the most unescaped quotes in a JSON body; a text or a key has two
MAX_BRACKETS = 65_536  # the most opening brackets and braces in a JSON body
MAX_DEPTH = 64  # the most levels of lists and objects in a JSON body
MAX_PARTS = 256  # the most parts of a form
STATE_BYTES = 8 * 1024 * 1024  # the most bytes of a body of `/v1/responses` whose state is judged
_STATE = frozenset({"previous_response_id", "conversation", "prompt"})  # members that name what is stored
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
_as_list = msgspec.json.Decoder(list[msgspec.Raw]).decode
_as_any = msgspec.json.Decoder().decode


class _List(msgspec.Struct):
    data: list[msgspec.Raw]


def judge_head(head: RequestHead, form: str) -> None:
    """Refuse a head whose body might be read in another way. form: see `Target.names`. Raises Refused."""
    sent = head.sent_on()
    for name, value in sent:
        if "model" in name:
            raise _refused(f"the header field {name[:64]} may name a model: this key's are named in the body only")
        if name == "content-encoding" and value.strip().lower() not in ("", "identity"):
            raise Refused(Outcome.ENCODING_UNSUPPORTED, "send the body without a content encoding: its model is read")
    if form in ("list", "entry"):
        if head.content_length or head.chunked:
            raise _refused("this path takes no body")
        return
    if "model" in head.query.lower() or "%" in head.query:
        raise _refused("the query may name a model: this key's are named in the body only")
    kinds = [value for name, value in sent if name == "content-type"]
    if form == "json":
        if len(kinds) != 1 or _JSON_TYPE.match(kinds[0]) is None:
            raise Refused(Outcome.ENCODING_UNSUPPORTED, "send the body as application/json: its model is read")
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


def without_state(body: bytes) -> bytes | None:
    """Check that a body of `/v1/responses` names nothing that an earlier call, perhaps another tenant's, has stored.

    Returns the body to send in its place, None for this one: members that are null are left out, because readers differ
    in what one that is there twice means. Raises Refused.
    """
    if len(body) > STATE_BYTES:
        raise Refused(Outcome.TOO_LARGE, f"a body of this path has at most {STATE_BYTES} bytes here")
    try:
        fields = _as_object(body)
        items = _as_list(fields["input"]) if bytes(fields.get("input", b""))[:1] == b"[" else []
        references = [each for each in items if _is_reference(each)]
    except (ValueError, RecursionError):
        message = "the body is not one JSON object in UTF-8" if body else "the body is empty"
        raise Refused(Outcome.INVALID_REQUEST, message) from None
    found = {name for name in fields if name.casefold() in _STATE}
    named = [name for name in found if bytes(fields[name]) != b"null"]
    if named or references:
        name = min(named, default="input")
        message = f"'{name}' names what is stored on a server that others use too: send the content itself"
        raise Refused(Outcome.INVALID_REQUEST, message, more={"param": name, "code": "stored_state"})
    return msgspec.json.encode({name: raw for name, raw in fields.items() if name not in found}) if found else None


def _is_reference(item: msgspec.Raw) -> bool:
    if b"item_reference" not in (data := bytes(item)) and b"\\u" not in data:
        return False
    value = _as_any(item)
    return isinstance(value, dict) and value.get("type") == "item_reference"


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


def _object(body: bytes | msgspec.Raw) -> dict[str, msgspec.Raw]:
    """Return the fields of a JSON object that has at most one `model`. Raises Refused."""
    data = bytes(body)
    if len(data) > JUDGED_BYTES:
        raise _too_large()
    try:
        if not data.isascii():
            data.decode("utf-8")
        _check_extent(data)
        fields = _as_object(data)
    except (ValueError, RecursionError):
        raise _refused("the body is not one JSON object in UTF-8" if data else "the body is empty") from None
    for name in fields:
        if name != "model" and any(map(name.casefold().__contains__, _NAMES_MODELS)):
            raise _refused(f"the field {name[:64]!r} may name a model: this key names one, in `model`")
    # Each key `model` is this object's or lies within one of its values; a decoder keeps the last of equal keys.
    if len(_KEY.findall(data)) != ("model" in fields) + sum(len(_KEY.findall(raw)) for raw in fields.values()):
        raise _refused("the field `model` is there more than once")
    return fields


def _check_extent(data: bytes) -> None:
    """Raise Refused for JSON with too many texts or lists, and ValueError if it is nested deeper than MAX_DEPTH.

    Parsers differ in how deep they go.
    Exact for valid JSON. It needs no numpy, unlike `oriel_wire.v2.depth`, which takes larger texts.
    """
    # Left to right a run of backslashes pairs up from its start: what remains before a quote escapes it.
    plain = data.replace(b"\\\\", b"").replace(b'\\"', b"") if b"\\" in data else data
    opened = data.count(b"[") + data.count(b"{")
    if plain.count(b'"') > MAX_QUOTES or opened > MAX_BRACKETS:
        raise _too_large()
    if opened <= MAX_DEPTH:
        return
    rest = b"".join(plain.split(b'"')[::2]).translate(_LISTS, _NO_BRACKETS)
    for _ in range(MAX_DEPTH):  # each time all innermost lists go
        rest = rest.replace(b"[]", b"")
    if rest:
        raise ValueError


def _judge_tools(raw: msgspec.Raw, tenant: Tenant) -> None:
    """Check tools that run on a model of their own (`image_generation`) and name it."""
    try:
        tools = _as_list(raw)
    except (ValueError, RecursionError):
        raise _refused("`tools` is not a list") from None
    for tool in tools:
        if (named := _object(tool).get("model")) is not None:
            _check(_text(named), tenant)


def _text(raw: msgspec.Raw) -> str:
    name = _as_any(raw)
    if not isinstance(name, str) or not name:
        raise _refused("`model` has to be a name")
    return name


def _named_in_form(body: bytes, boundary: bytes) -> str | None:
    named: list[bytes] = []
    for name, is_file, more, data in _parts(body, boundary):
        if name == "model":
            if is_file or not all(_plain_text(line) for line in more):
                raise _refused("the part `model` has to be a plain text")
            named.append(data)
        elif any(map(name.casefold().__contains__, _NAMES_MODELS)):
            raise _refused(f"the part {name[:64]!r} may name a model: this key names one, in `model`")
    if len(named) > 1:
        raise _refused("the part `model` is there more than once")
    return named[0].decode("latin-1") if named else None


def _plain_text(line: str) -> bool:
    name, _, value = line.partition(":")
    return name.lower() == "content-type" and value.strip().lower() in ("text/plain", "text/plain; charset=utf-8")


def _parts(body: bytes, boundary: bytes) -> Iterator[tuple[str, bool, list[str], bytes]]:
    """Return of each form part its name, whether it is a file, other lines of its head, and its data. Raises
    Refused.
    """
    mark = b"--" + boundary
    wrong = _refused("the body is not a plain multipart/form-data")
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


def _too_large() -> Refused:
    message = f"of this key's calls the body is read for its model: at most {JUDGED_BYTES} bytes of JSON, with"
    bounds = f"{MAX_QUOTES // 2} keys and texts and {MAX_BRACKETS} lists and objects"
    return Refused(Outcome.TOO_LARGE, f"{message} at most {bounds}")
