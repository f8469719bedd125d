"""Requests that are made to cost: each of their bytes may cause a few steps of work, and nobody else is refused.

Steps are calls of functions, which do not depend on the machine. Regular expressions are counted in
`tests/house/test_patterns.py`, because one call of theirs may take any time.
"""

import asyncio
import base64
import zlib

import pytest

from oriel_wire.h2.frames import DATA, END_HEADERS, HEADERS, PREFACE, SETTINGS, frame

from ..steps import steps
from ..wire.h2.blocks import literal
from ..wire.http2_attacks import request_head
from .grpc_stack import Backend, idle, infer, stack
from .raw_grpc import framed, raw_call
from .stack import BRONZE, GOLD, Client, digest, documents, gateway, upstream

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"


async def in_single_bytes(address: str, path: str, body: bytes, key: str) -> tuple[bytes, int]:
    """Send a call whose body comes in frames of one byte; return what comes back, and the steps that it took."""
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = request_head(path.encode()) + literal(b"x-api-key", key.encode()) + literal(b"grpc-encoding", b"gzip")
    writer.write(PREFACE + frame(SETTINGS, 0, 0) + frame(HEADERS, END_HEADERS, 1, head))
    frames = b"".join([frame(DATA, 0, 1, body[at : at + 1]) for at in range(len(body))])
    answer = b""
    with steps() as counted:
        writer.write(frames)
        while b"grpc-status" not in answer and (data := await reader.read(65536)):
            answer += data
    writer.close()
    return answer, counted.count


def bomb(size: int) -> bytes:
    """A beginning of a compressed message, incomplete: a few bytes that are `size` bytes of fields without a name."""
    deflate = zlib.compressobj(wbits=31)
    return deflate.compress(b"\x18\x00" * (size // 2)) + deflate.flush(zlib.Z_SYNC_FLUSH)


@pytest.mark.parametrize("path", [INFER, STREAM])
@pytest.mark.parametrize("compressed", [False, True])
async def test_a_message_that_comes_byte_by_byte_takes_steps_by_its_bytes(path: str, compressed: bool) -> None:
    """All that had come was decompressed and read again with each byte."""
    took = []
    unit = b"\x00\x00\x00\xff\xff" if compressed else b"\x18\x00"  # an empty block; a field without a name
    async with stack(Backend()) as (address, core):
        for size in (1000, 2000):
            start = bytes((compressed,)) + (65_000).to_bytes(4, "big") + (bomb(8000) if compressed else b"")
            body = start + unit * (size // len(unit)) + b"\x07" + bytes(40)  # the last ones are not valid
            answer, counted = await in_single_bytes(address, path, body, BRONZE)
            assert b"bad_request" in answer
            took.append(counted)
        assert took[1] < 2.5 * took[0] and took[1] < 200_000
        assert (await infer(address, "digits", GOLD)).get_response().model_name == "digits", "nobody else is refused"
        assert idle(core) and not core.pools["p"].held_bytes


async def test_four_kilobytes_that_are_64_as_fields_are_read_once() -> None:
    """Their 400 frames were 26 MB of fields, which took the gateway more than three seconds."""
    start = b"\x01" + (65_000).to_bytes(4, "big") + bomb(64_000)
    body = start + b"\x00\x00\x00\xff\xff" * ((4300 - len(start)) // 5)
    async with stack(Backend()) as (address, core):
        answer, counted = await in_single_bytes(address, INFER, body, BRONZE)
        assert b"bad_request" in answer and counted < 300_000
        assert idle(core) and not core.pools["p"].held_bytes


@pytest.mark.parametrize("kind", ["application/grpc", "application/grpc-web-text"])
@pytest.mark.parametrize("first", [b"\x0a\xfa\xff\x03", b"\x12\xfa\xff\x03", b"\x3a\xfa\xff\x03"])
async def test_a_first_field_longer_than_what_is_read_for_the_name_is_refused_at_once(kind: str, first: bytes) -> None:
    """It waited until its deadline for bytes that the window of its stream does not let through."""
    body = framed(first + b"m" * 65_530)
    async with stack(Backend()) as (address, core):
        sent = base64.b64encode(body[:-2]) if "text" in kind else body
        answer = await raw_call(address, INFER, {"x-api-key": GOLD}, sent, end=False, kind=kind)
        assert answer.status == 3 and answer.trailers["x-oriel-reason"] == "bad_request", answer
        assert idle(core) and not core.pools["p"].held_bytes


async def test_a_name_within_the_window_is_known_before_the_rest_comes() -> None:
    body = framed(b"\x3a\xe8\xfb\x03" + bytes(65_000) + b"\x0a\x06digits" + b"\x3a\x80\xf1\x04" + bytes(80_000))
    async with stack(Backend()) as (address, _):
        for kind, sent in (("", body), ("-web-text", base64.b64encode(body))):
            answer = await raw_call(address, INFER, {"x-api-key": BRONZE}, sent, kind=f"application/grpc{kind}")
            assert answer.status == 0 or base64.b64decode(answer.data).endswith(b"digits"), answer


@pytest.mark.parametrize("size", [1_000, 300_000])
async def test_a_text_that_never_ends_is_refused_and_stops_nobody(size: int) -> None:
    """It was searched from each of its escaped quotes to its end: with the square of its length."""
    key = f'keys = [{{ sha256 = "{digest("one")}" }}]'
    extra = f'[tenants.one]\ntier = "gold"\nmodels = ["small"]\nservices = ["*"]\n{key}\n'
    body = b'{"model":"small","x":' + b"[" * 65 + b'"' + b'\\"' * size
    async with upstream() as up, gateway(documents([up.port], extra=extra)) as (port, _), Client(port) as client:
        headers = "content-type: application/json\r\n"
        reply = await client.ask("/v1/chat/completions", body, method="POST", key="one", headers=headers)
        assert reply.status == 400 and b"not one JSON object" in reply.body
        assert (await client.ask("/v1/services/own", key=GOLD)).status == 200 and len(up.seen) == 1
