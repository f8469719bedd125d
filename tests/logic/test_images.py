import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from oriel_logic import images
from oriel_logic.errors import Refused


def png(picture: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    data = io.BytesIO()
    picture.save(data, format, **options)
    return data.getvalue()


def gradient(mode: str = "L") -> Image.Image:
    return Image.fromarray(np.arange(0, 250, 10, dtype=np.uint8).reshape(5, 5)).convert(mode)


def test_png_and_jpeg_are_read() -> None:
    assert images.grey(images.read(png(gradient()))).shape == (5, 5)
    assert images.grey(images.read(png(gradient("RGB"), "JPEG"))).shape == (5, 5)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_every_mode_becomes_the_same_grey(mode: str) -> None:
    found = images.grey(images.read(png(gradient("L").convert(mode))))
    assert found.dtype == np.float32 and 0 <= found.min() <= found.max() <= 1
    if mode != "1":
        assert np.abs(found - images.grey(gradient())).max() < 0.03


def test_sixteen_bits_keep_their_range() -> None:
    deep = Image.fromarray(np.linspace(0, 65535, 25).astype(np.uint16).reshape(5, 5))
    found = images.grey(images.read(png(deep)))
    assert found[0, 0] == 0 and found[-1, -1] == 1 and 0.4 < found[2, 2] < 0.6


def test_what_is_transparent_is_paper() -> None:
    assert images.grey(images.read(png(Image.new("RGBA", (2, 2), (0, 0, 0, 0))))).min() == 1


def test_photographs_stand_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by a quarter
    assert images.read(png(Image.new("L", (4, 2)), "JPEG", exif=exif)).size == (2, 4)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack("!I", len(data)) + kind + data + struct.pack("!I", zlib.crc32(kind + data))


def bomb(side: int) -> bytes:
    """A PNG of side x side black pixels in a few kilobytes, complete and valid."""
    row = b"\0" * (side // 8 + 1)
    squeezer = zlib.compressobj(9)
    packed = b"".join(squeezer.compress(row) for _ in range(side)) + squeezer.flush()
    header = struct.pack("!IIBBBBB", side, side, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [8_000, 20_000])
def test_a_bomb_is_refused_before_it_unpacks(side: int) -> None:
    data = bomb(side)
    assert len(data) < 60_000
    with pytest.raises(Refused, match="pixels, at most 24 megapixels"):
        images.read(data)


@pytest.mark.parametrize(
    "data", [b"", b"not an image", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF89a" + b"\0" * 50, b"BM" + b"\0" * 60]
)
def test_what_is_no_image_is_refused_with_a_sentence(data: bytes) -> None:
    with pytest.raises(Refused, match=r"not an image this service can read \(PNG or JPEG\)|damaged"):
        images.read(data)


@given(st.sampled_from(["PNG", "JPEG"]), st.integers(0, 400), st.integers(0, 255), st.integers(0, 400))
def test_damage_gives_a_picture_or_a_refusal_and_nothing_else(kind: str, place: int, byte: int, cut: int) -> None:
    data = bytearray(png(gradient("L"), kind))
    data[place % len(data)] = byte
    try:
        images.grey(images.read(bytes(data[: max(1, len(data) - cut)])))
    except Refused:
        pass
