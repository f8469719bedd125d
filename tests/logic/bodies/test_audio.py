import wave
from io import BytesIO

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_logic.bodies import audio
from oriel_logic.bodies.audio import Audio
from oriel_logic.errors import InputTooLarge, Refused


def wav(raw: bytes, *, width: int = 2, channels: int = 1, rate: int = 8000) -> bytes:
    file = BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((channels, width, rate, 0, "NONE", ""))
        writer.writeframes(raw)
    return file.getvalue()


@pytest.mark.parametrize(
    ("width", "raw", "samples"),
    [
        (1, bytes([0, 128, 192]), [-1, 0, 0.5]),
        (2, np.array([-32768, 0, 16384], "<i2").tobytes(), [-1, 0, 0.5]),
        (3, b"\x00\x00\x80" + b"\x00\x00\x00" + b"\x00\x00\x40", [-1, 0, 0.5]),
        (4, np.array([-(2**31), 0, 2**30], "<i4").tobytes(), [-1, 0, 0.5]),
    ],
)
def test_every_width_has_the_same_scale(width: int, raw: bytes, samples: list[float]) -> None:
    read = audio.decode(wav(raw, width=width))
    assert read.samples.dtype == np.float32
    assert read.samples[:, 0].tolist() == samples and read.rate == 8000


def extensible(plain: bytes, subtype: str = "0100000000001000800000aa00389b71") -> bytes:
    """The same file with the longer header, behind a chunk of another kind of odd length."""
    body = bytearray(plain[20:36])
    body[:2] = b"\xfe\xff"
    body += (22).to_bytes(2, "little") + body[14:16] + bytes(4) + bytes.fromhex(subtype)
    rest = b"WAVE" + b"JUNK\x03\0\0\0abc\0" + b"fmt " + (40).to_bytes(4, "little") + body + plain[36:]
    return b"RIFF" + len(rest).to_bytes(4, "little") + rest


@pytest.mark.parametrize(("width", "channels"), [(2, 6), (3, 1), (4, 2)])
def test_the_longer_header_of_integer_pcm_is_read(width: int, channels: int) -> None:
    plain = wav(bytes(range(width * channels * 5)), width=width, channels=channels)
    read, wanted = audio.decode(extensible(plain)), audio.decode(plain)
    assert read.samples.tolist() == wanted.samples.tolist() and read.rate == 8000


def test_other_sounds_with_the_longer_header_are_refused() -> None:
    floats = extensible(wav(bytes(8), width=4), subtype="0300000000001000800000aa00389b71")
    with pytest.raises(Refused, match="integer PCM samples: unknown"):
        audio.decode(floats)


def test_an_empty_file_is_refused_with_a_whole_sentence() -> None:
    with pytest.raises(Refused, match="samples: it ends too early"):
        audio.decode(b"")


def test_channels_are_columns() -> None:
    read = audio.decode(wav(np.array([1, 2, 3, 4], "<i2").tobytes(), channels=2, rate=44100))
    assert (read.samples * 32768).tolist() == [[1, 2], [3, 4]]
    assert (read.mono() * 32768).tolist() == [1.5, 3.5]
    assert read.seconds == pytest.approx(2 / 44100)


@given(st.lists(st.integers(-32767, 32767), max_size=50), st.integers(1, 3))
def test_what_is_written_reads_back(values: list[int], channels: int) -> None:
    samples = (np.array(values * channels, np.float32) / 32767).reshape(-1, channels)
    read = audio.decode(audio.encode(Audio(samples, 16000)))
    assert read.rate == 16000
    np.testing.assert_allclose(read.samples, samples, atol=2 / 32768)


def test_loud_and_broken_samples_are_clipped() -> None:
    read = audio.decode(audio.encode(Audio(np.array([2.0, -2.0, np.nan], np.float32), 8000)))
    np.testing.assert_allclose(read.samples[:, 0], [1, -1, 0], atol=1e-4)
    with pytest.raises(ValueError, match="frames, channels"):
        audio.encode(Audio(np.zeros((1, 1, 1)), 8000))


def test_length_is_judged_by_the_header() -> None:
    body = bytearray(wav(b"\x00\x00" * 10))
    with pytest.raises(InputTooLarge, match="has 10 samples, at most 9"):
        audio.decode(bytes(body), max_samples=9)
    body[40:44] = (2**31).to_bytes(4, "little")  # the data chunk claims two gigabytes
    with pytest.raises(Refused):
        audio.decode(bytes(body))


@pytest.mark.parametrize("cut", [0, 3, 20, 43, 50])
def test_what_breaks_off_is_refused(cut: int) -> None:
    with pytest.raises(Refused):
        audio.decode(wav(b"\x00\x00" * 10)[:cut])


@given(st.binary(max_size=100), st.integers(0, 63))
def test_any_bytes_are_audio_or_a_refusal(noise: bytes, at: int) -> None:
    body = bytearray(wav(b"\x00\x00" * 10))
    body[at : at + len(noise)] = noise
    for each in (noise, bytes(body)):
        try:
            assert audio.decode(each).samples.ndim == 2
        except Refused as refused:
            assert str(refused)
