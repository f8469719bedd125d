"""Reads values that JSON has no type for: pictures, sounds, arrays, pydantic models.

`converted` is msgspec's `dec_hook`: it is called with the expected type and the plain value at that place.
"""

import base64
import binascii
import typing
from contextvars import ContextVar
from typing import Any

import numpy as np

from oriel_logic.bodies import audio, npy
from oriel_logic.bodies.signature import Form, expanded, form_of, is_pydantic
from oriel_logic.bodies.tensors import Tensors
from oriel_logic.client.models import Array
from oriel_logic.client.tensors import narrowed
from oriel_logic.errors import Refused

NUMBERS = "biuf"
MAX_PIXELS = 48_000_000
"""Of all pictures of one request."""
PIXELS_LEFT = ContextVar("pixels left", default=MAX_PIXELS)
ABSTRACT = (np.generic, np.number, np.integer, np.signedinteger, np.unsignedinteger, np.inexact, np.floating)


def converted(wanted: Any, value: Any) -> Any:
    """Convert a plain value to `wanted`. Raises ValueError (msgspec adds the path), caused by a Refused if there is
    one.
    """
    form, kind, _ = form_of(wanted)
    if is_pydantic(kind):
        return kind.model_validate(value)
    if form is Form.TENSORS and isinstance(value, Tensors):
        return value
    if form in (Form.JSON, Form.TENSORS):
        raise ValueError(f"a {getattr(kind, '__name__', kind)} cannot be given here")
    try:
        if form is Form.ARRAY:
            return array_of(npy.decode(value) if isinstance(value, bytes) else value, kind)
        if not isinstance(value, str | bytes):
            return value  # read already
        return from_bytes(form, from_base64(value) if isinstance(value, str) else value)
    except Refused as error:
        raise ValueError(error.message) from error


def from_bytes(form: Form, data: bytes) -> Any:
    """Decode the file of a picture, a sound or an array. Raises Refused."""
    if form is Form.IMAGE:
        return picture(data)
    if form is Form.AUDIO:
        return audio.decode(data)
    if form is Form.ARRAY:
        return npy.decode(data)
    return data


def picture(data: bytes) -> Any:
    """Decode a picture. Raises Refused, also if the pictures of one request are too large together."""
    from oriel_logic import images  # only services that read pictures load Pillow

    left = PIXELS_LEFT.get()
    try:
        found = images.read(data, max_pixels=min(images.MAX_PIXELS, left))
    except images.TooManyPixels as error:
        if left >= images.MAX_PIXELS:
            raise
        raise Refused(f"a request's images may have at most {MAX_PIXELS // 1_000_000} megapixels together") from error
    PIXELS_LEFT.set(left - found.width * found.height)
    return found


def begin() -> None:
    """Reset the count of pixels for a new request: a small body may hold many pictures that decompress to a large
    size.
    """
    PIXELS_LEFT.set(MAX_PIXELS)


def from_base64(text: str) -> bytes:
    """Decode base64 text or a data: URL. Raises Refused."""
    if text.startswith("data:"):
        text = text.partition(",")[2]
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refused("the value is not base64") from error


def array_of(value: Any, wanted: Any) -> Array:
    """Make an array of nested lists, or convert one, to the dtype of `NDArray[...]`. Raises Refused.

    `narrowed` in client/tensors.py decides which values fit a dtype.
    """
    try:
        array = value if isinstance(value, np.ndarray) else np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise Refused("the nested lists are not of one shape") from error
    if array.dtype.kind not in NUMBERS:
        raise Refused("an array takes numbers or booleans, in nested lists of equal length")
    target = dtype_in(wanted)
    if target is None or target == array.dtype:
        return array
    try:
        return narrowed(array, target)
    except ValueError as error:
        raise Refused(f"the array takes {target.name} values, {error}") from error


def dtype_in(wanted: Any) -> "np.dtype[Any] | None":
    """Return float32 for `NDArray[np.float32]`; None if it names no single dtype."""
    arguments = typing.get_args(expanded(wanted))
    inner = typing.get_args(arguments[1]) if len(arguments) == 2 else ()
    named = inner[0] if inner else None
    if not isinstance(named, type) or not issubclass(named, np.generic) or named in ABSTRACT:
        return None
    return np.dtype(named)
