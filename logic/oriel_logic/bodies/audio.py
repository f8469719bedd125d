"""Reads and writes WAV files: integer PCM of 8 to 32 bits, with the standard library."""

import wave
from io import BytesIO

from oriel_logic.client.models import Array
from oriel_logic.errors import InputTooLarge, Refused

MAX_SAMPLES = 16 << 20
"""Over all channels: 64 MiB as FP32, three minutes of stereo at 44.1 kHz."""
MAX_CHANNELS = 32
PCM, EXTENSIBLE = b"\x01\x00", b"\xfe\xff"
SUBTYPE_PCM = bytes.fromhex("0100000000001000800000aa00389b71")
"""KSDATAFORMAT_SUBTYPE_PCM of Microsoft's mmreg.h, as it stands in a file."""
MAX_CHUNKS = 64
"""Before the one that says the format."""
NOT_A_WAV = "the audio is not a WAV file with integer PCM samples"


class Audio:
    """One sound.

    samples: [frames, channels], FP32 from -1 to 1.
    rate: frames per second.
    """

    __slots__ = ("rate", "samples")

    def __init__(self, samples: Array, rate: int) -> None:
        self.samples = samples
        self.rate = rate

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.rate

    def mono(self) -> Array:
        """Return the mean of the channels as [frames], FP32."""
        mixed: Array = self.samples.mean(axis=1, dtype="float32")
        return mixed


def decode(data: bytes, *, max_samples: int = MAX_SAMPLES) -> Audio:
    """Decode a WAV file.

    Raises Refused for data that is not a complete WAV file, and InputTooLarge past `max_samples`; the header decides
    that.
    """
    try:
        with wave.open(BytesIO(as_plain(data))) as file:
            channels, width, rate, frames = file.getparams()[:4]
            if not 1 <= channels <= MAX_CHANNELS or not 1 <= width <= 4 or not 1 <= rate <= 1_000_000:
                raise Refused(NOT_A_WAV)
            if frames * channels > max_samples:
                raise InputTooLarge(
                    f"the audio has {frames * channels} samples, at most {max_samples} are read: cut it or mix it down"
                )
            raw = file.readframes(frames)
    except (wave.Error, EOFError, RuntimeError, ValueError) as error:
        raise Refused(f"{NOT_A_WAV}: {str(error) or 'it ends too early'}") from error
    if len(raw) != frames * channels * width:
        raise Refused("the audio ends before its last sample")
    return Audio(samples_of(raw, width).reshape(frames, channels), rate)


def as_plain(data: bytes) -> bytes:
    """Rewrite a file of WAVE_FORMAT_EXTENSIBLE with integer PCM samples as plain PCM; return all others unchanged.

    Programs write the longer header for more than 16 bits or two channels; `wave` reads it from Python 3.12 on.
    """
    at = 12  # behind RIFF, size, WAVE
    for _ in range(MAX_CHUNKS):
        kind, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        if kind != b"fmt ":
            at += 8 + size + size % 2
            continue
        body = data[at + 8 : at + 8 + min(size, 40)]
        if body[:2] == EXTENSIBLE and body[24:40] == SUBTYPE_PCM:
            return data[: at + 8] + PCM + data[at + 10 :]
        break
    return data


def samples_of(raw: bytes, width: int) -> Array:
    import numpy as np

    if width == 1:  # the only unsigned one
        return (np.frombuffer(raw, np.uint8).astype(np.float32) - 128.0) / 128.0
    if width == 3:
        wide = np.zeros((len(raw) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(raw, np.uint8).reshape(-1, 3)
        return wide.reshape(-1).view("<i4").astype(np.float32) / 2.0**31
    return np.frombuffer(raw, f"<i{width}").astype(np.float32) / 2.0 ** (8 * width - 1)


def encode(audio: Audio) -> bytes:
    """Encode a WAV file with 16 bits per sample; values outside -1 to 1 are clipped. Raises ValueError for other
    shapes.
    """
    import numpy as np

    samples = audio.samples[:, np.newaxis] if audio.samples.ndim == 1 else audio.samples
    if samples.ndim != 2 or not 1 <= samples.shape[1] <= MAX_CHANNELS:
        raise ValueError(f"audio has [frames, channels] samples, not {list(samples.shape)}")
    scaled = np.clip(np.rint(np.nan_to_num(samples) * 32767.0), -32768, 32767).astype("<i2")
    file = BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(samples.shape[1])
        writer.setsampwidth(2)
        writer.setframerate(audio.rate)
        writer.writeframes(scaled.tobytes())
    return file.getvalue()
