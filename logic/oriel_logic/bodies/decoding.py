"""Turns a request into the inputs of a handler, by the media type of its body and the types of the signature.

`Reader` prepares once all that depends only on the signature. `inputs` costs CPU in proportion to the body: it runs
where the stage runs, or in a worker for large bodies and pictures of `async def` stages.
"""

import collections.abc
import typing
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from oriel_logic.bodies import lines, multipart, npy, tensors
from oriel_logic.bodies.json import decode, invalid
from oriel_logic.bodies.messages import Request
from oriel_logic.bodies.schemas import JSON, MEDIA_IN, MULTIPART, fields_type, lead_input, reads_json, schemas_of
from oriel_logic.bodies.signature import MISSING, Form, Parameter, Signature, without_none
from oriel_logic.bodies.upload import Upload
from oriel_logic.bodies.values import begin, converted, from_bytes
from oriel_logic.errors import MediaUnsupported, Refused

HEAVY_BYTES = 64 << 10
MAX_QUERY_FIELDS = 64
URLENCODED = "application/x-www-form-urlencoded"
# The media types that clients send by default; curl's --data sends the second one.
UNSAID = ("", URLENCODED, "application/octet-stream")
CHEAP = frozenset({"application/octet-stream", "application/x-npy"})  # read as views
STARTS = (
    (Form.IMAGE, (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")),
    (Form.AUDIO, (b"RIFF",)),
    (Form.ARRAY, (npy.MAGIC,)),
)
LISTS = (
    list,
    tuple,
    set,
    frozenset,
    collections.abc.Sequence,
    collections.abc.MutableSequence,
    collections.abc.Collection,
    collections.abc.Set,
    collections.abc.MutableSet,
)
ALIASES = {
    "audio/x-wav": "audio/wav",
    "audio/wave": "audio/wav",
    "audio/vnd.wave": "audio/wav",
    "image/jpg": "image/jpeg",
    "application/npy": "application/x-npy",
    "application/jsonl": "application/x-ndjson",
    "application/jsonlines": "application/x-ndjson",
    "application/ndjson": "application/x-ndjson",
}


class Reader:
    """Reads the requests of one signature."""

    def __init__(self, signature: Signature) -> None:
        self._inputs = signature.inputs
        self._stream = signature.streams_in
        self._is_whole = signature.body == "whole"
        self._lead = lead_input(signature)
        self._is_v2 = any(each.form is Form.TENSORS for each in signature.inputs)
        self._names = tuple(each.name for each in self._inputs)
        self._type = fields_type(signature)
        self._reads_json = reads_json(signature)
        self._decoder = msgspec.json.Decoder(self._type, dec_hook=converted)
        self._item = None
        if self._stream is not None and self._stream.form is Form.LINES:
            self._item = msgspec.json.Decoder(self._stream.type, dec_hook=converted)
        self._needs_a_body = self._is_whole or any(each.default is MISSING for each in self._inputs)
        self._forms = {} if self._is_whole else {each.name: each.form for each in self._inputs}
        self._is_costly = "contentMediaType" in str(schemas_of(signature, "x"))
        self._lists = list_names(signature)

    def is_heavy(self, request: Request) -> bool:
        """Return whether this body takes so long to read that a worker should read it instead of the event loop."""
        if self._is_costly:
            return bool(request.body)
        return len(request.body) > HEAVY_BYTES and request.content_type not in CHEAP

    def inputs(self, request: Request) -> tuple[Any, ...]:
        """Read the inputs, in the order of the signature. Raises Refused, MediaUnsupported, InputTooLarge."""
        if not self._inputs:
            return ()
        if self._is_costly:
            begin()
        media = self._media(request)
        if media == JSON and self._reads_json:
            self._refuse_if_empty(request)
            if request.query:
                self._refuse_in_query(request.query)
            body = request.body or b"{}"
            value = decode(body, self._decoder)
            return (value,) if self._is_whole else self._ordered(value)
        if media == MULTIPART and not self._is_v2:
            parts = multipart.parse(request.body, request.headers.get("content-type", ""))
            return self._from_fields(multipart.fields_of(parts, lists=self._lists))
        if media == URLENCODED and not self._is_v2:
            return self._from_fields(pairs(request.text()))
        if self._is_v2 and media in (JSON, "application/octet-stream"):
            return self._from_lead(tensors.decode(request.body, request.headers), request)
        lead = self._lead
        if lead is not None and self._takes(lead, media):
            if lead.form in (Form.IMAGE, Form.AUDIO, Form.ARRAY):  # a text and bytes may be empty
                self._refuse_if_empty(request)
            value = request.text() if lead.form is Form.TEXT else from_bytes(lead.form, request.body)
            return self._from_lead(value, request)
        raise self._unsupported(request)

    def _refuse_if_empty(self, request: Request) -> None:
        if not request.body and self._needs_a_body:
            raise Refused(f"the body is empty: send {self._kinds()}")

    def streamed(self, request: Request, pieces: AsyncIterator[bytes], limit_bytes: int) -> AsyncIterator[Any]:
        """Yield the values of an input stream that is the whole body. Raises MediaUnsupported."""
        media = self._media(request)
        if self._item is None or media not in MEDIA_IN[Form.LINES]:
            raise self._unsupported(request)
        item = self._item

        def one(text: bytes) -> Any:
            begin()
            return decode(text, item)

        return lines.items(pieces, one, events=media == "text/event-stream", limit_bytes=limit_bytes)

    async def open(self, request: Request, pieces: AsyncIterator[bytes], limit_bytes: int) -> tuple[Any, ...]:
        """Read the inputs of a signature that has a stream; all other inputs are read before the stream is.

        Raises what `inputs` raises.
        """
        stream = self._stream
        assert stream is not None
        if stream.form is Form.LINES:
            return self._from_lead(self.streamed(request, pieces, limit_bytes), request)
        if request.content_type == MULTIPART:
            kind = request.headers.get("content-type", "")
            before, upload = await multipart.open_upload(pieces, kind, stream.name, limit_bytes=limit_bytes)
            values = self._convert(multipart.fields_of(before, lists=self._lists))
            return self._ordered(values, {stream.name: upload})
        size = request.headers.get("content-length", "")
        upload = Upload(
            pieces,
            content_type=request.content_type,
            size_bytes=int(size) if size.isdecimal() else None,
            limit_bytes=limit_bytes,
        )
        return self._from_lead(upload, request)

    def _media(self, request: Request) -> str:
        """Return the media type of the body; it is guessed from the first bytes if the client sent none."""
        media = ALIASES.get(request.content_type, request.content_type)
        if media.endswith("+json"):
            return JSON
        if media not in UNSAID:
            return media
        body = request.body
        for form, starts in STARTS:
            if body.startswith(starts) and self._lead is not None and self._lead.form is form:
                return MEDIA_IN[form][0]
        if media == "application/octet-stream" and (self._lead is not None or self._is_v2):
            return media
        if self._reads_json or self._is_v2:
            if body[:64].lstrip()[:1] in (b"{", b"[") or (media == "" and not body):
                return JSON
        if media == "" and self._lead is not None:
            return MEDIA_IN[self._lead.form][0] if self._lead.form in (Form.BYTES, Form.TEXT, Form.LINES) else media
        return media

    @staticmethod
    def _takes(lead: Parameter, media: str) -> bool:
        if lead.form is Form.BYTES:
            return True
        if lead.form is Form.TEXT:
            return media.startswith("text/")
        return media in MEDIA_IN[lead.form]

    def _from_lead(self, value: Any, request: Request) -> tuple[Any, ...]:
        """Read the whole body as one input; the others may be in the URL's query."""
        lead = self._lead or self._inputs[0]
        fields: dict[str, Any] = {}
        if len(self._inputs) > 1:
            fields = pairs(request.query)
        if lead.form in (Form.LINES, Form.UPLOAD):
            return self._ordered(self._convert(fields), {lead.name: value})
        return self._from_fields({**fields, lead.name: value})

    def _from_fields(self, fields: Mapping[str, Any]) -> tuple[Any, ...]:
        value = self._convert({name: self._as_meant(name, each) for name, each in fields.items()})
        return (value,) if self._is_whole else self._ordered(value)

    def _as_meant(self, name: str, value: Any) -> Any:
        """Convert a form field to its parameter: the one item of a list, text for bytes, or a file for text."""
        form = self._forms.get(name)
        if name in self._lists and not isinstance(value, list):
            return [value]
        if form is Form.BYTES and isinstance(value, str):
            return value.encode()
        if form is Form.TEXT and isinstance(value, bytes):
            try:
                return value.decode()
            except UnicodeDecodeError as error:
                raise Refused("the file is not UTF-8 text", field=f"$.{name}") from error
        return value

    def _convert(self, fields: Mapping[str, Any]) -> Any:
        """Convert fields to the types of the parameters; text is parsed as a number or boolean where one is
        expected.
        """
        try:
            return msgspec.convert(fields, self._type, strict=False, dec_hook=converted)
        except msgspec.ValidationError as error:
            raise invalid(error, self._type) from error

    def _ordered(self, value: Any, more: Mapping[str, Any] | None = None) -> tuple[Any, ...]:
        if more is None:
            return tuple([getattr(value, name) for name in self._names])
        return tuple([more[name] if name in more else getattr(value, name) for name in self._names])

    def _refuse_in_query(self, query: str) -> None:
        """Refuse inputs in the URL beside a JSON body: the URL is not read then, and they would be lost. Raises
        Refused.
        """
        lost = next((name for name in pairs(query) if name in self._names), None)
        if lost is not None:
            raise Refused(f"'{lost}' stands in the URL beside a JSON body: write it in the body", field=f"$.{lost}")

    def _unsupported(self, request: Request) -> MediaUnsupported:
        sent = (
            f", not {request.content_type[:60]}"
            if request.content_type not in UNSAID
            else " and say so in Content-Type"
        )
        return MediaUnsupported(f"send {self._kinds()}{sent}")

    def _kinds(self) -> str:
        """List the accepted media types for an error text."""
        kinds = [JSON] if self._reads_json or self._is_v2 else []
        if self._lead is not None:
            kinds += [each for each in MEDIA_IN[self._lead.form] if each not in kinds]
        if not self._is_v2 and (self._stream is None or self._stream.form is Form.UPLOAD):
            kinds.append(MULTIPART)
        return f"{', '.join(kinds[:-1])}{' or ' if kinds[1:] else ''}{kinds[-1]}"


def list_names(signature: Signature) -> frozenset[str]:
    """Return the names of the form fields that are always lists, even if they come only once."""
    if signature.body != "whole":
        return frozenset(each.name for each in signature.inputs if is_list(each.type))
    try:
        hints = typing.get_type_hints(signature.inputs[0].type, include_extras=True)
    except Exception:  # whatever evaluating a user's annotations raises
        return frozenset()
    return frozenset(name for name, hint in hints.items() if is_list(hint))


def is_list(hint: Any) -> bool:
    """Return whether a type is a list; one that may be None or has bounds counts, such as `list[int] | None`."""
    while True:
        bare = typing.get_args(hint)[0] if typing.get_origin(hint) is typing.Annotated else without_none(hint)[0]
        if bare is hint:
            return (typing.get_origin(hint) or hint) in LISTS
        hint = bare


def pairs(text: str) -> dict[str, Any]:
    """Parse the fields of a form or a query; names that come more than once become lists.

    Raises Refused past MAX_QUERY_FIELDS.
    """
    try:
        found = parse_qsl(text, keep_blank_values=True, max_num_fields=MAX_QUERY_FIELDS, errors="strict")
    except UnicodeDecodeError as error:
        raise Refused("the form or query is not percent-encoded UTF-8") from error
    except ValueError as error:
        raise Refused(f"a form or query may have at most {MAX_QUERY_FIELDS} fields") from error
    values: dict[str, Any] = {}
    for name, value in found:
        if name in values:
            values[name] = [*values[name], value] if isinstance(values[name], list) else [values[name], value]
        else:
            values[name] = value
    return values
