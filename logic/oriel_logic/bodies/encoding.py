"""Encodes a handler's value as the body of an answer, in the negotiated media type."""

import base64
import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from io import BytesIO
from typing import Any

import msgspec
import numpy as np

from oriel_logic.bodies import audio, lines, npy, tensors
from oriel_logic.bodies.audio import Audio
from oriel_logic.bodies.messages import Answer
from oriel_logic.bodies.schemas import EVENTS, JSON, MEDIA_OUT, NDJSON
from oriel_logic.bodies.signature import Form
from oriel_logic.bodies.tensors import HEADER_LENGTH, Tensors
from oriel_logic.errors import HandlerFailed

HEAVY_BYTES = 64 << 10
FORMATS = {"image/png": "PNG", "image/jpeg": "JPEG"}
JPEG_QUALITY = 90
LIGHT = frozenset({str, int, float, bool, type(None)})
BYTES = (bytes, bytearray, memoryview)
OTHERWISE = (Answer, *BYTES, Tensors, Audio)
FIELD = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100}")
VALUE = re.compile(r"[\x20-\x7e\x80-\xff]{0,8000}")
NO_HEADER = "the service's answer has a header that cannot be sent: its log says which"
OURS = frozenset({"connection", "content-length", "content-type", "date", "server-timing", "transfer-encoding"})
Frame = Callable[[Any], bytes]


def as_json(value: Any, media: str) -> bytes | None:
    """Encode an answer that is JSON and cheap to encode; return None for others, which `encode` or a worker handles.

    Raises HandlerFailed for a value that has no JSON form.
    """
    if media and media != JSON:
        return None
    if type(value) is dict:
        for each in value.values():
            if type(each) not in LIGHT and is_heavy(each):
                return None
    elif isinstance(value, OTHERWISE) or is_heavy(value) or is_picture(value):
        return None
    try:
        return ENCODER.encode(value)
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise HandlerFailed("the service's answer cannot be sent as JSON: its log says why") from error


def encode(value: Any, media: str, *, service: str) -> Answer:
    """Encode a handler's value.

    media: the negotiated media type, "" if the handler does not declare its answer.
    Raises HandlerFailed for a value that has no form in that media type.
    """
    if isinstance(value, Answer):
        return sendable(value)
    if isinstance(value, BYTES):
        return Answer(body=bytes(value), content_type="application/octet-stream")
    chosen = JSON if value is None else media or natural(value)
    try:
        if chosen == JSON and not isinstance(value, Tensors):
            return Answer(body=json_text(value), content_type=JSON)
        return encoded(value, chosen, service)
    except (TypeError, ValueError, RecursionError, OverflowError, OSError, KeyError) as error:
        raise HandlerFailed(f"the service's answer cannot be sent as {chosen}: its log says why") from error


def sendable(answer: Answer) -> Answer:
    """Check an `Answer` that a handler built itself. Raises HandlerFailed for headers that would corrupt the
    response.
    """
    try:
        pairs = answer.pairs
        wrong = next((each for each in pairs if [type(part) for part in each] != [str, str]), None)
    except TypeError as error:
        raise HandlerFailed(NO_HEADER) from error
    if wrong is not None:
        raise HandlerFailed(NO_HEADER) from TypeError(f"headers are a mapping or pairs of text, {wrong!r} is neither")
    for name, text in pairs:
        if FIELD.fullmatch(name) is None or VALUE.fullmatch(text) is None or name.lower() in OURS:
            raise HandlerFailed(NO_HEADER) from (ValueError(f"header {name!r}: {text!r}"))
    if VALUE.fullmatch(answer.content_type) is None:
        raise HandlerFailed("the service's answer has a content type that cannot be sent")
    return answer if answer.headers is pairs else replace(answer, headers=pairs)


def encoded(value: Any, media: str, service: str) -> Answer:
    if isinstance(value, Tensors):
        body, length = tensors.encode(value, service=service, binary=media != JSON)
        headers = () if length is None else ((HEADER_LENGTH, str(length)),)
        return Answer(body=body, content_type=media if length is not None else JSON, headers=headers)
    if isinstance(value, str) and media.startswith("text/"):
        return Answer(body=value.encode(), content_type=f"{media}; charset=utf-8")
    if isinstance(value, Audio) and media == "audio/wav":
        return Answer(body=audio.encode(value), content_type=media)
    if isinstance(value, np.ndarray) and media == "application/x-npy":
        return Answer(body=npy.encode(value), content_type=media)
    if is_picture(value) and media in FORMATS:
        return Answer(body=picture(value, media), content_type=media)
    raise TypeError(f"{type(value).__name__} is no {media}")


def natural(value: Any) -> str:
    """Choose the media type for a value of a handler that does not declare its answer."""
    if is_picture(value):
        return MEDIA_OUT[Form.IMAGE][0]
    if isinstance(value, Audio):
        return MEDIA_OUT[Form.AUDIO][0]
    return JSON


def is_picture(value: Any) -> bool:
    """Return whether a value is a Pillow image, judged by its attributes so that Pillow need not be imported."""
    return hasattr(value, "getbands") and hasattr(value, "save")


def picture(value: Any, media: str) -> bytes:
    file = BytesIO()
    if media == "image/jpeg":
        value.convert("RGB").save(file, "JPEG", quality=JPEG_QUALITY)
    else:
        value.save(file, "PNG")
    return file.getvalue()


def json_text(value: Any) -> bytes:
    """Encode a value as JSON. Raises TypeError, ValueError, RecursionError or OverflowError for one without a JSON
    form.
    """
    return ENCODER.encode(value)


def plain(value: Any) -> Any:
    """Serve as msgspec's `enc_hook`: arrays as nested lists, pictures and sounds in base64, pydantic models as
    objects.
    """
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    if is_picture(value):
        return base64.b64encode(picture(value, "image/png")).decode()
    if isinstance(value, Audio):
        return base64.b64encode(audio.encode(value)).decode()
    if inspect.iscoroutine(value):
        value.close()
        raise TypeError("a coroutine has no JSON form: is an `await` missing?")
    dump = getattr(value, "model_dump", None)
    if callable(dump):
        return dump(mode="json")
    raise TypeError(f"{type(value).__name__} is no JSON value")


ENCODER = msgspec.json.Encoder(enc_hook=plain)


def is_heavy(value: Any) -> bool:
    """Return whether a value takes so long to encode that a worker should do it instead of the event loop."""
    if isinstance(value, dict):
        return any(type(each) not in LIGHT and is_heavy(each) for each in value.values())
    if isinstance(value, np.ndarray):
        return bool(value.nbytes > HEAVY_BYTES)
    return is_picture(value) or (isinstance(value, Audio) and value.samples.nbytes > HEAVY_BYTES)


def framing(media: str) -> Frame:
    """Return the function that encodes each value of a stream. It raises what `json_text` raises."""
    if media == EVENTS:
        return lambda value: lines.event(json_text(value))
    if media == NDJSON:
        return lambda value: lines.line(json_text(value))
    return raw


def raw(value: Any) -> bytes:
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, BYTES):
        return bytes(value)
    raise TypeError(f"{type(value).__name__} is neither text nor bytes")
