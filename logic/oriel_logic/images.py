"""Pictures from outside, read safely: PNG and JPEG only, bounded before a pixel is allocated, one kind of error.

Reading costs CPU: call it in a plain `def` stage, which runs in a worker process.
"""

import base64
import binascii
import warnings
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from oriel_logic.errors import MediaUnsupported, Refused
from oriel_logic.messages import Request

__all__ = ["MAX_PIXELS", "TooManyPixels", "grey", "image_bytes", "read"]

MAX_PIXELS = 24_000_000
FORMATS = ("PNG", "JPEG")
SIGNATURES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")
# What clients send when they do not say what they send: curl's --data-binary says the second one.
UNSAID = ("application/octet-stream", "application/x-www-form-urlencoded", "")
NOT_AN_IMAGE = "the body is not an image this service can read (PNG or JPEG)"

Image.preinit()  # loads Pillow's readers now, once, instead of in every worker


def image_bytes(request: Request, *, field: str = "image") -> bytes:
    """The picture of a request: its body, or the base64 text in `field` of a JSON body (a data: URL is fine too).

    Raises MediaUnsupported for other kinds of bodies, Refused for JSON without such a field.
    """
    kind = request.content_type
    if kind.startswith("image/") or (kind in UNSAID and request.body.startswith(SIGNATURES)):
        return request.body
    if kind != "application/json" and not kind.endswith("+json"):
        sent = f"not {kind}" if kind not in UNSAID else "and say so in Content-Type"
        raise MediaUnsupported(f"send a PNG or JPEG image, or JSON with a base64 field '{field}', {sent[:100]}")
    value = request.json()
    text = value.get(field) if isinstance(value, dict) else None
    if not isinstance(text, str):
        raise Refused(f"the JSON body needs a field '{field}' with the image in base64")
    if text.startswith("data:"):
        text = text.partition(",")[2]
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise Refused(f"the field '{field}' is not base64") from error


def read(data: bytes, *, max_pixels: int = MAX_PIXELS) -> Image.Image:
    """A decoded picture, upright (EXIF). Raises Refused for what is no PNG or JPEG, is damaged, or is too large.

    The size is judged by the header: a small file that would unpack to more than `max_pixels` is never unpacked.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own bound is lower
            picture = Image.open(BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise too_large("far too many", max_pixels) from error
    except Exception as error:  # Pillow's readers raise many kinds for bytes that are no picture
        raise Refused(NOT_AN_IMAGE) from error
    if picture.width * picture.height > max_pixels:
        raise too_large(f"{picture.width} x {picture.height}", max_pixels)
    try:
        picture.load()
        ImageOps.exif_transpose(picture, in_place=True)  # else it is copied, also where it is upright
        return picture
    except Exception as error:  # likewise for pictures that break off or lie about themselves
        raise Refused("the image is damaged: it cannot be decoded to the end") from error


class TooManyPixels(Refused):
    """Judged by the header, before anything is unpacked."""


def too_large(what: str, max_pixels: int) -> TooManyPixels:
    return TooManyPixels(
        f"the image has {what} pixels, at most {max_pixels // 1_000_000} megapixels are read: scale it down"
    )


def grey(picture: Image.Image) -> NDArray[Any]:
    """[height, width] FP32, 0 black .. 1 white. What is transparent is white; 16-bit pictures keep their range."""
    if picture.mode.startswith(("I", "F")):
        values = np.asarray(picture, dtype=np.float32)
        return values / 65535.0
    if picture.has_transparency_data:
        coloured = picture.convert("RGBA")
        paper = Image.new("RGBA", coloured.size, "white")
        picture = Image.alpha_composite(paper, coloured)
    return np.asarray(picture.convert("L"), dtype=np.float32) / 255.0
