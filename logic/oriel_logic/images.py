"""Reads pictures safely: PNG and JPEG only, bounded before a pixel is allocated, with one kind of error.

Decoding costs CPU: do it in a plain `def` stage, which runs in a worker process.
"""

import base64
import binascii
import warnings
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from oriel_logic.bodies.messages import Request
from oriel_logic.errors import MediaUnsupported, Refused

__all__ = ["MAX_PIXELS", "TooManyPixels", "grey", "image_bytes", "read"]

MAX_PIXELS = 24_000_000
FORMATS = ("PNG", "JPEG")
SIGNATURES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff")
# The media types that clients send by default; curl's --data-binary sends the second one.
UNSAID = ("application/octet-stream", "application/x-www-form-urlencoded", "")
NOT_AN_IMAGE = "the body is not an image this service can read (PNG or JPEG)"

Image.preinit()  # loads Pillow's readers now, once, instead of in every worker


def image_bytes(request: Request, *, field: str = "image") -> bytes:
    """Return the picture of a request: its body, or the base64 text (or data: URL) in `field` of a JSON body.

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
    """Decode a picture and turn it upright by its EXIF data.

    Raises Refused for data that is not PNG or JPEG, is damaged, or has more than `max_pixels`. The header decides the
    size, so a small file that would decompress to a larger one is never decompressed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own bound is lower
            picture = Image.open(BytesIO(data), formats=FORMATS)
    except Image.DecompressionBombError as error:
        raise too_large("far too many", max_pixels) from error
    except Exception as error:  # Pillow's readers raise many kinds for bytes that are not a picture
        raise Refused(NOT_AN_IMAGE) from error
    if picture.width * picture.height > max_pixels:
        raise too_large(f"{picture.width} x {picture.height}", max_pixels)
    try:
        picture.load()
        ImageOps.exif_transpose(picture, in_place=True)  # else an upright picture is copied too
        return picture
    except Exception as error:  # likewise for pictures that are cut off or inconsistent
        raise Refused("the image is damaged: it cannot be decoded to the end") from error


class TooManyPixels(Refused):
    """The header announces more pixels than the limit; nothing was decompressed."""


def too_large(what: str, max_pixels: int) -> TooManyPixels:
    return TooManyPixels(
        f"the image has {what} pixels, at most {max_pixels // 1_000_000} megapixels are read: scale it down"
    )


def grey(picture: Image.Image) -> NDArray[Any]:
    """Convert to [height, width] FP32, 0 black to 1 white. Transparent pixels are white; 16-bit pictures keep their
    range.
    """
    if picture.mode.startswith(("I", "F")):
        values = np.asarray(picture, dtype=np.float32)
        return values / 65535.0
    if picture.has_transparency_data:
        coloured = picture.convert("RGBA")
        paper = Image.new("RGBA", coloured.size, "white")
        picture = Image.alpha_composite(paper, coloured)
    return np.asarray(picture.convert("L"), dtype=np.float32) / 255.0
