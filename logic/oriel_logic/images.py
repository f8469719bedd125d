"""Reads pictures safely: PNG and JPEG only, bounded before a pixel is allocated, with one kind of error.

Decoding costs CPU: do it in a plain `def` stage, which runs in a worker process.
"""

import warnings
from io import BytesIO
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from oriel_logic.errors import Refused

__all__ = ["MAX_PIXELS", "TooManyPixels", "grey", "read"]

MAX_PIXELS = 24_000_000
FORMATS = ("PNG", "JPEG")
NOT_AN_IMAGE = "the body is not an image this service can read (PNG or JPEG)"

Image.preinit()  # loads Pillow's readers now, once, instead of in every worker


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
