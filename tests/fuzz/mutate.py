"""Change bytes at random: flip bits, change lengths, splice inputs, insert words of the protocol. Its only state is its
random generator.
"""

import random
import re
import struct
from collections.abc import Sequence

__all__ = ["mutate"]

MAX_BYTES = 1 << 16
_NUMBERS = (0, 1, 2, 3, 4, 7, 8, 31, 32, 33, 64, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32)
_HUGE = (2**61, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64, 10**400, 10**400)
_WORDS: dict[str, tuple[bytes, ...]] = {
    "http": (
        b'"inputs"', b'"outputs"', b'"name"', b'"shape"', b'"datatype"', b'"data"', b'"parameters"', b'"id"',
        b'"binary_data_size"', b'"binary_data"', b'"binary_data_output"', b'"classification"', b'"text_input"',
        b'"shared_memory_region"', b'"priority"', b'"timeout"', b'"triton_x"', b'"model_name"', b'"x"', b'"n"',
        b'"BYTES"', b'"FP16"', b'"BF16"', b'"FP32"', b'"FP64"', b'"INT8"', b'"UINT64"', b'"INT64"', b'"BOOL"',
        b"NaN", b"Infinity", b"-Infinity", b"null", b"true", b"false", b"1e999", b"-0", b"1.5", b"0.1e-400", b"[", b"]",
        b"{", b"}", b",", b":", b"[]", b"{}", b"[[", b"]]", b'"\\ud800"', b'"\\u0000"', b"\xef\xbb\xbf", b"\xff\xfe",
        b"\x00", b"\n", b" ", b'"', b"\\", b"-", b"9" * 400, b"[" * 70, b'{"a":' * 70,
    ),
    "grpc": (
        b"\x0a", b"\x12", b"\x1a", b"\x22", b"\x2a", b"\x32", b"\x3a", b"\x0b", b"\x0c", b"\x2b" * 40, b"\xff" * 10,
        b"\x00", b"FP32", b"BYTES", b"INT8", b"BOOL", b"FP16", b"classification", b"shared_memory_region", b"x",
        b"\x80\x80\x80\x80\x80\x80\x80\x80\x80\x01", b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f", b"\x2a\x00", b"\x3a\x00",
    ),
    "config": (
        b"name:", b"backend:", b"platform:", b"input", b"output", b"dims:", b"data_type:", b"TYPE_FP32", b"TYPE_STRING",
        b"TYPE_INVALID", b"max_batch_size:", b"dynamic_batching", b"ensemble_scheduling", b"step", b"input_map",
        b"instance_group", b"count:", b"kind: KIND_GPU", b"version_policy", b"specific", b"versions:", b"all {}",
        b"reshape", b"shape:", b"parameters", b"key:", b"value", b"string_value:", b"model_warmup", b"optimization",
        b"sequence_batching", b"model_transaction_policy", b"decoupled: true", b"cc_model_filenames",
        b"default_queue_policy", b"priority_levels:", b"preferred_batch_size:", b"batch_input", b"response_cache",
        b'"onnxruntime"', b'"x"', b'"y"', b"true", b"-1", b"0", b"{", b"}", b"[", b"]", b"<", b">", b'"', b"\\", b"'",
        b"\xff", b"\x00", b"input {" * 70, b'"input":[', b'"dims":["1"]', b"nan", b"1e400", b"0x7fffffff", b"\n",
    ),
    "http1": (
        b"\r\n", b"\n", b"\r", b"\r\n\r\n", b" ", b"\t", b":", b";", b",", b"\x00", b"\x0b", b"\xff", b"0\r\n\r\n",
        b"5\r\nabcde\r\n", b"Content-Length: 3\r\n", b"content-length: 0\r\n", b"Content-Length : 3\r\n",
        b"Content_Length: 3\r\n", b"+3", b"-1", b"0x3", b"Transfer-Encoding: chunked\r\n",
        b"transfer-encoding: identity\r\n", b"Transfer-Encoding:\x0bchunked\r\n", b"gzip, ", b"Host: x\r\n",
        b"Host: a b\r\n", b"Connection: close\r\n", b"Connection: keep-alive, x-a\r\n",
        b"Connection: content-length\r\n", b"Expect: 100-continue\r\n", b"Upgrade: h2c\r\n", b"TE: trailers\r\n",
        b"Trailer: a\r\n", b"x-oriel-tier: gold\r\n", b"x_oriel_tier: g\r\n", b"X-Forwarded-For: 1.2.3.4\r\n",
        b"Forwarded: for=x\r\n", b"x-api-key: k\r\n", b"authorization: Bearer k\r\n", b" folded\r\n",
        b"GET /a HTTP/1.1\r\nHost: x\r\n\r\n", b"POST ", b"OPTIONS * ", b"http://h/", b"HTTP/1.0", b"HTTP/1.1",
        b"HTTP/2.0", b"/../", b"%00", b"%2F", b"a: " + b"b" * 300 + b"\r\n", b"a: b\r\n" * 25, b"x" * 4097,
        b";ext=1", b"ffffffff\r\n", b"1000000000\r\n", b"trailer: 1\r\n",
    ),
    "hpack": (
        b"\x20", b"\x3f\x01", b"\x3f\xe1\x1f", b"\x3f\xe2\x1f", b"\x82", b"\x88", b"\xbd", b"\xbe", b"\xbf",
        b"\xff\x00", b"\xff\xff\xff\xff\xff\x0f", b"\xff\x80\x80\x80\x80\x80\x00", b"\x80", b"\x00", b"\x10", b"\x40",
        b"\x0f", b"\x1f", b"\x0f\x2e", b"\x0f\x2f", b"\x7e", b"\x7f\x00", b"\x7f\x80\x7f", b"\x40\x01a\x01b",
        b"\x00\x01a\x01b", b"\x10\x01a\x01b", b"\x00\x00\x00", b"\x40\x82\x18\xff\x82\x18\xff", b"\x7f\xff\xff\xff\xff",
        b"\xfe", b"\x00\x01A\x01b", b"\x00\x01a\x02b ", b"\x00\x7f\x00" + b"n" * 127,
        b"\x00\x02te\x7f\x03" + b"v" * 130, b"\x40\x01x\x7f\xbd\x1d" + b"v" * 3900, b"\xbe" * 200,
        b"\x00\x0aconnection\x05close", b"\x00\x02te\x08trailers", b"\x04\x01/", b"\x1f\x08\x01k", b"0 0\n", b"0 1\n",
        b"100 1\n",
    ),
    "http2": (
        # Whole frames: acknowledged settings, ping, windows, reset, priority, GOAWAY, a request, an answer, DATA.
        b"\0\0\0\4\1\0\0\0\0", b"\0\0\0\4\0\0\0\0\0", b"\0\0\x08\6\0\0\0\0\0draining",
        b"\0\0\x08\6\1\0\0\0\0draining", b"\0\0\4\x08\0\0\0\0\0\0\0\xff\xff", b"\0\0\4\x08\0\0\0\0\1\0\0\2\0",
        b"\0\0\4\x08\0\0\0\0\1\x7f\xff\xff\xff", b"\0\0\4\3\0\0\0\0\1\0\0\0\x08", b"\0\0\4\3\0\0\0\0\5\0\0\0\7",
        b"\0\0\5\2\0\0\0\0\1\0\0\0\0\x10", b"\0\0\x08\7\0\0\0\0\0\0\0\0\3\0\0\0\0", b"\0\0\6\4\0\0\0\0\0\0\4\0\0\0\0",
        b"\0\0\6\4\0\0\0\0\0\0\4\0\1\0\0", b"\0\0\6\1\5\0\0\0\1\x83\x86\x84\x41\1x",
        b"\0\0\6\1\4\0\0\0\3\x83\x86\x84\x41\1x", b"\0\0\6\1\0\0\0\0\5\x83\x86\x84\x41\1x",
        b"\0\0\0\x09\4\0\0\0\5", b"\0\0\1\1\4\0\0\0\1\x88", b"\0\0\1\1\5\0\0\0\3\x88", b"\0\0\5\1\4\0\0\0\5\x08\3103",
        b"\0\0\5\1\5\0\0\0\1\0\1a\1b", b"\0\0\3\0\1\0\0\0\1abc", b"\0\0\3\0\0\0\0\0\3abc",
        b"\0\0\6\0\x08\0\0\0\3\4ab\0\0\0", b"\0\x40\0\0\0\0\0\0\3" + bytes(16384), b"\0\0\4\x05\4\0\0\0\1\0\0\0\2",
        # Begins of frames, stream numbers, kinds of engine.
        b"\0\0\6\1\x2c\0\0\0\1", b"\0\0\x2a\0\x09\0\0\0\1", b"\0\0\0\7", b"\0\0\0\x09", b"\x7f\xff\xff\xff",
        b"\x80\0\0\1", b"s\x23", b"c\x23", b"s\x3f", b"c\x3b", b"s\x2a",
    ),
}  # fmt: skip


def mutate(codec: str, data: bytes, pool: Sequence[bytes], rng: random.Random) -> bytes:
    """Make one to eight changes. pool: other inputs of the codec, to splice with."""
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 8))):
        _change(codec, out, pool, rng)
    return bytes(out[:MAX_BYTES])


def _change(codec: str, out: bytearray, pool: Sequence[bytes], rng: random.Random) -> None:
    start = rng.randrange(len(out) + 1)
    end = min(len(out), start + rng.choice((1, 1, 2, 4, 8, 32, 1 << rng.randrange(12))))
    match rng.randrange(12):
        case 0 if out:
            out[min(start, len(out) - 1)] ^= 1 << rng.randrange(8)
        case 1:
            out[start:end] = rng.randbytes(end - start)
        case 2:
            del out[start:end]
        case 3:
            out[start:start] = out[start:end] * rng.choice((1, 1, 2, 30))
        case 4:
            out[start:start] = rng.choice(_WORDS[codec])
        case 5:
            out[start:end] = rng.choice(_WORDS[codec])
        case 6:
            other = rng.choice(pool)
            cut = rng.randrange(len(other) + 1)
            out[start:] = other[cut:]
        case 7:
            other = rng.choice(pool)
            cut = rng.randrange(len(other) + 1)
            out[start:start] = other[cut : cut + rng.choice((4, 16, 64, 256))]
        case 8 | 9 | 10:
            _number(out, rng)
        case _ if len(out) > 3:
            # A length somewhere in the data: 4 bytes little endian, or a varint of one byte.
            at = min(start, len(out) - 4)
            out[at : at + 4] = struct.pack("<I", rng.choice(_NUMBERS) & 0xFFFFFFFF)


def _number(out: bytearray, rng: random.Random) -> None:
    """Replace a number in decimal digits by another one."""
    runs = [match.span() for match in re.finditer(rb"\d+", out)]
    if not runs:
        return
    first, last = rng.choice(runs)
    number = rng.choice(rng.choice((_NUMBERS, _HUGE, tuple(len(out) + each for each in (-1, 0, 1)))))
    out[first:last] = b"%s%d" % (rng.choice((b"", b"", b"", b"-")), number)
