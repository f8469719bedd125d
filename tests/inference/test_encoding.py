"""gzip and deflate both ways, bombs, and what a refusal for the head alone carries."""

import asyncio
import dataclasses
import gzip
import json
import socket
import zlib
from pathlib import Path

import httpx
import numpy as np
import pytest
import tritonclient.http

from oriel_inference.app import Unit, open_unit
from oriel_inference.servers.encoding import negotiate
from oriel_inference.settings import Settings
from oriel_wire.engine.limits import inflated_limit
from oriel_wire.observe.trace import ListSink

from .clients import client_of

ONES = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
INFER = "/v2/models/double/infer"
PAIR = "/v2/models/pair/infer"


def with_tritonclient(port: int) -> None:
    with tritonclient.http.InferenceServerClient(f"127.0.0.1:{port}") as client:
        for width in (4, 20_000):  # inline, and in a thread
            rows = np.arange(width, dtype=np.float32).reshape(1, width)
            inputs = []
            for name in "ab":
                given = tritonclient.http.InferInput(name, [1, width], "FP32")
                given.set_data_from_numpy(rows)
                inputs.append(given)
            for there in (None, "gzip", "deflate"):
                for back in (None, "gzip", "deflate"):
                    result = client.infer(
                        "pair",
                        inputs,
                        request_compression_algorithm=there,
                        response_compression_algorithm=back,
                    )
                    np.testing.assert_array_equal(result.as_numpy("sum"), rows * 2)


async def test_tritonclient_compresses_both_ways(kept_unit: Unit) -> None:
    await asyncio.to_thread(with_tritonclient, kept_unit.http_port)


@pytest.mark.parametrize(("accept", "encoding"), [("gzip", "gzip"), ("deflate", "deflate"), ("br", None)])
async def test_large_answers_are_compressed_as_accepted(
    kept_http: httpx.AsyncClient, accept: str, encoding: str | None
) -> None:
    for width, packed in ((4, None), (400, encoding), (40_000, encoding)):
        inputs = [{"name": n, "shape": [1, width], "datatype": "FP32", "data": [5] * width} for n in "ab"]
        answer = await kept_http.post(PAIR, json={"inputs": inputs}, headers={"accept-encoding": accept})
        assert answer.headers.get("content-encoding") == packed
        assert answer.json()["outputs"][0]["data"] == [10.0] * width


def test_negotiation() -> None:
    assert negotiate("gzip, deflate, br") == "gzip"
    assert negotiate("deflate, gzip") == "gzip"
    assert negotiate("gzip;q=0.5, deflate") == "deflate"
    assert negotiate("gzip;q=0, br") == ""
    assert negotiate("identity") == negotiate("gzip;q=x") == negotiate("*") == ""


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"xx", 400, "not match its Content-Encoding"),
        (b"", 400, "ends early"),
        (gzip.compress(json.dumps(ONES).encode())[:-9], 400, "ends early"),
        (gzip.compress(b"{}") + b"more", 400, "followed by other bytes"),
        (gzip.compress(b"[" * 200_000), 400, "exceeds maximum allowed limit"),
        (gzip.compress(json.dumps(ONES).encode()), 200, ""),
        (zlib.compress(json.dumps(ONES).encode()), 200, ""),
    ],
    ids=["not packed", "empty", "cut", "more", "deep", "gzip", "deflate"],
)
async def test_compressed_bodies_are_read_or_refused(
    kept_http: httpx.AsyncClient, body: bytes, status: int, words: str
) -> None:
    answer = await kept_http.post(INFER, content=body, headers={"content-encoding": "gzip", "x-request-id": "find-me"})
    assert answer.status_code == status and words in answer.json().get("error", "")
    assert answer.headers["x-request-id"] == "find-me"


async def test_bomb_inflates_no_further_than_a_body_may_be_large(settings: Settings) -> None:
    small = dataclasses.replace(settings, max_body_bytes=1 << 20)
    bomb = gzip.compress(b" " * (200 << 20), 9)
    assert len(bomb) < 1 << 20
    async with open_unit(small, sink=ListSink()) as unit:
        async with client_of(unit.http_port) as http:
            before = peak_kib()
            answer = await http.post(INFER, content=bomb, headers={"content-encoding": "gzip"})
            assert answer.status_code == 413 and answer.json()["reason"] == "too_large"
            assert peak_kib() - before < 16 * 1024


@pytest.mark.parametrize(
    ("path", "plain", "most"),
    [
        (INFER, b" " * (60 << 20), 4 << 20),
        (INFER, b'{"inputs":[' + b"0," * (1 << 20) + b"0]}", 1 << 20),
        ("/v2/models/double/generate", b'{"x":[' + b"0," * (1 << 20) + b"0]}", 1 << 20),
    ],
    ids=["blanks", "json", "generate"],
)
async def test_what_is_very_much_larger_than_it_was_sent_is_refused_before_it_is_scanned(
    kept_http: httpx.AsyncClient, path: str, plain: bytes, most: int
) -> None:
    for packed in (gzip.compress(plain), zlib.compress(plain)):
        assert len(packed) < 64 * 1024
        answer = await kept_http.post(path, content=packed, headers={"content-encoding": "gzip"})
        assert (answer.status_code, answer.json()["reason"]) == (413, "too_large")
        text = answer.json()["error"]
        assert f"larger than {most} bytes once decompressed" in text and "without compression" in text


def test_how_far_a_body_may_be_inflated_depends_on_what_was_sent() -> None:
    assert inflated_limit(1, 64 << 20) == 4 << 20
    assert inflated_limit(1 << 17, 64 << 20) == 8 << 20
    assert inflated_limit(1 << 20, 64 << 20) == 64 << 20 and inflated_limit(1 << 20, 1 << 20) == 1 << 20


async def test_honest_json_that_is_large_may_be_compressed(kept_http: httpx.AsyncClient) -> None:
    numbers = np.random.default_rng(7).random(60_000, np.float32).tolist()
    inputs = [{"name": name, "shape": [1, 60_000], "datatype": "FP32", "data": numbers} for name in "ab"]
    plain = json.dumps({"inputs": inputs}).encode()
    assert len(plain) > 2 << 20
    answer = await kept_http.post(PAIR, content=gzip.compress(plain), headers={"content-encoding": "gzip"})
    assert answer.status_code == 200


def peak_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0])


# --- refusals for the head alone ----------------------------------------------------------------------------------


async def test_unknown_encoding_is_refused_before_the_body_is_read(kept_http: httpx.AsyncClient) -> None:
    for encoding in ("br", "gzip, gzip", "zstd"):
        answer = await kept_http.post(
            INFER, content=b"xx", headers={"content-encoding": encoding, "x-request-id": "me"}
        )
        assert answer.status_code == 501 and answer.headers["accept-encoding"] == "gzip, deflate"
        assert (answer.headers["x-request-id"], answer.json()["reason"]) == ("me", "not_supported")


@pytest.mark.parametrize(
    ("method", "path", "headers", "status", "reason"),
    [
        ("GET", "/nothing", {}, 404, "not_found"),
        ("GET", INFER, {}, 405, "method_not_allowed"),
        ("POST", "/v2/models/absent/infer", {}, 404, "unknown_model"),
        ("POST", INFER, {"content-length": str(1 << 40)}, 413, "too_large"),
        ("GET", "/v2", {"x": "y" * 40_000}, 431, "too_large"),
    ],
)
async def test_refused_heads_carry_identity_and_reason(
    kept_unit: Unit, method: str, path: str, headers: dict[str, str], status: int, reason: str
) -> None:
    lines = [f"{method} {path} HTTP/1.1", "host: x", "x-request-id: me", *(f"{k}: {v}" for k, v in headers.items())]

    def ask() -> bytes:
        with socket.create_connection(("127.0.0.1", kept_unit.http_port), timeout=30) as sock:
            sock.sendall("\r\n".join([*lines, "", ""]).encode())
            got = b""
            while b"}" not in got:
                got += sock.recv(65536)
            return got

    head, _, body = (await asyncio.to_thread(ask)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert json.loads(body)["reason"] == reason
    assert (b"x-request-id: me" in head) or (status == 431 and b"x-request-id: " in head)


async def test_health_and_description_answers_carry_identity(kept_http: httpx.AsyncClient) -> None:
    for path in ("/v2", "/v2/health/live", "/v2/health/ready", "/v2/models/double", "/v2/models/double/config"):
        assert (await kept_http.get(path, headers={"x-request-id": "me"})).headers["x-request-id"] == "me"
        assert (
            len((await kept_http.get(path, headers={"x-request-id": "not fit\x7f!"[:7]})).headers["x-request-id"]) == 16
        )
