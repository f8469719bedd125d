"""Attacks on one running server, over HTTP and gRPC: each is refused by name within ANSWER_S, and the next request is
served. How long each takes is in benchmarks/results/2026-11-21-promises.md. See also tests/fuzz for the
codecs alone.
"""

import contextlib
import functools
import http.client
import json
import re
import threading
from collections.abc import Iterable, Iterator

import grpc
import pytest
from _pytest.mark import ParameterSet

from oriel_wire.v2.proto import v2_pb2

from ..waiting import wait_until
from . import compressed_calls
from .attacked import ANSWER_S, Server, attacked
from .attacks import CALLS, GOOD, PATHS, POSTS, bomb, sized

MAX_GROWTH_MIB = 256
# What the allocator keeps of messages of 60 MB, at most.
MAX_KEPT_MIB = 30
NOT_5XX = (501,)  # where Triton says 501
INSIDES = re.compile(r"oriel_|Traceback|<class|object at 0x|\.py\b|/usr/|/home/|/tmp/|msgspec|numpy|protobuf")


# Attacks of tens of megabytes take a third of a second of a core each. Of each kind that the server meets in another
# place, one stays in `make test`; the others are left to `make test SUITE=long`.
LARGE = re.compile("6[03] Mi?B|[0-9] million|bomb|largest|30 MB|300 pieces|behind")
WITNESSES = {
    *("binary 60 MiB for 4 numbers", "gzip bomb of 1 GiB", "gzip bomb of 16 million lists for 4 numbers"),
    *("deflate bomb", "body beyond the limit", "unknown fields in 60 MB", "raw behind a group"),
    *("INT64 varints in 60 MB", "beyond the largest message"),
}


def attacks(names: Iterable[str]) -> list[ParameterSet]:
    return [
        pytest.param(name, marks=[pytest.mark.long] if LARGE.search(name) and name not in WITNESSES else [])
        for name in names
    ]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with attacked(tmp_path_factory.mktemp("hostile")) as running:
        yield running


def refused(server: Server, name: str, status: int, said: str) -> None:
    """What holds for every refusal, and for the server after it."""
    grown = server.grown_mib()
    assert 400 <= status < 500 or status in NOT_5XX, f"{name}: {status} {said[:300]}"
    assert 0 < len(said) <= 500 and said.isprintable(), said[:600]
    assert not INSIDES.search(re.sub(r"'[^']*'", "", said)), said
    server.canary()
    assert grown < MAX_GROWTH_MIB, f"{name}: the server grew by {grown} MiB"


@pytest.mark.parametrize("name", attacks(POSTS))
def test_http(server: Server, name: str) -> None:
    post = POSTS[name]
    body = post.body()
    server.fresh()
    answer = server.http.post(post.path, content=body, headers=post.headers)
    if post.also and answer.status_code == post.also:
        assert server.grown_mib() < MAX_GROWTH_MIB
        server.canary()
        return
    assert answer.headers["content-type"] == "application/json"
    found = answer.json()
    assert isinstance(found["error"], str) and found["reason"]
    refused(server, name, answer.status_code, found["error"])


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path[:40])
def test_paths(server: Server, path: str) -> None:
    """Decoded once; an invalid model name is not searched for."""
    server.fresh()
    # A client library would tidy the path up.
    connection = http.client.HTTPConnection("127.0.0.1", server.http.base_url.port or 0, timeout=ANSWER_S)
    with contextlib.closing(connection):
        connection.request("POST", path, GOOD)
        answer = connection.getresponse()
        refused(server, path[:60], answer.status, json.loads(answer.read())["error"])


STATUSES = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.RESOURCE_EXHAUSTED}


@pytest.mark.parametrize("name", attacks(CALLS))
def test_grpc(server: Server, name: str) -> None:
    data = CALLS[name]()
    server.fresh()
    with pytest.raises(grpc.RpcError) as caught:
        server.call("ModelInfer", data)
    assert caught.value.code() in STATUSES, caught.value
    refused(server, name, 400, caught.value.details())


@pytest.mark.parametrize("name", attacks(CALLS))
def test_grpc_streams(server: Server, name: str) -> None:
    """The same messages on a stream: an error in a message, or as the status where the message never arrived."""
    call = server.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
    data = CALLS[name]()
    server.fresh()
    try:
        (answer,) = list(call(iter([data]), timeout=ANSWER_S))
        said = v2_pb2.ModelStreamInferResponse.FromString(answer).error_message
    except grpc.RpcError as error:
        assert error.code() in STATUSES, error
        said = error.details()
    refused(server, name, 400, said)


@pytest.mark.parametrize(
    ("method", "data"),
    [
        ("RepositoryModelLoad", sized(2, b"double") + b"\x1a\x00" * 30_000_000),
        ("RepositoryModelLoad", sized(2, b"../etc")),
        ("LogSettings", b"\x0a\x00" * 30_000_000),
        ("ModelMetadata", sized(1, b"../etc")),
        ("ModelStatistics", sized(1, b"n" * 1_000_000)),
        ("ModelConfig", b"\xff"),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{len(value)} bytes",
)
def test_other_methods(server: Server, method: str, data: bytes) -> None:
    server.fresh()
    with pytest.raises(grpc.RpcError) as caught:
        server.call(method, data)
    assert caught.value.code() in STATUSES | {grpc.StatusCode.UNAVAILABLE}, caught.value
    refused(server, method, 400, caught.value.details())


def gives_back(server: Server) -> None:
    try:
        wait_until(lambda: server.kept_mib() <= MAX_KEPT_MIB)
    except TimeoutError:
        pytest.fail(f"the server keeps {server.kept_mib()} MiB, in {server.large_mappings()}")


def test_memory_of_large_messages_is_given_back(server: Server) -> None:
    """Over the other attacks, and a few more: nothing is kept for the next one to come on top of."""
    data = CALLS["unknown fields in 60 MB"]()
    for _ in range(5):
        for method in (server.channel.unary_unary, server.channel.stream_stream):
            name = "ModelInfer" if method == server.channel.unary_unary else "ModelStreamInfer"
            call = method(f"/inference.GRPCInferenceService/{name}")
            if name == "ModelInfer":
                with pytest.raises(grpc.RpcError):
                    call(data, timeout=ANSWER_S)
            else:
                assert len(list(call(iter([data]), timeout=ANSWER_S))) == 1
    gives_back(server)


def test_stream_that_stays_open_holds_no_message(server: Server) -> None:
    data = CALLS["unknown fields in 60 MB"]()
    done = threading.Event()

    def messages() -> Iterator[bytes]:
        yield data
        done.wait()

    call = server.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")(messages(), timeout=280)
    try:
        assert next(call)
        gives_back(server)
    finally:
        done.set()
        list(call)


@functools.cache
def zeros(window: int) -> bytes:
    """Two gigabytes of them in two megabytes."""
    return bomb(1900 << 20, window, b"\0")()


@pytest.mark.parametrize(
    ("method", "encoding"),
    [
        ("ModelInfer", "gzip"),
        ("ModelStreamInfer", "deflate"),
        *(
            pytest.param(method, encoding, marks=pytest.mark.long)
            for method, encoding in (
                ("ModelInfer", "deflate"),
                ("ModelStreamInfer", "gzip"),
                ("RepositoryModelLoad", "gzip"),
                ("RepositoryModelLoad", "deflate"),
            )
        ),
    ],
)
def test_grpc_bombs(server: Server, method: str, encoding: str) -> None:
    """A message of 2 MB that would be 1.9 GiB: decompression stops at the largest message."""
    packed = zeros(31 if encoding == "gzip" else 15)
    server.fresh()
    path = f"/inference.GRPCInferenceService/{method}"
    answer = compressed_calls.call(("127.0.0.1", server.grpc_port), path, encoding, packed, ANSWER_S)
    said = re.search(
        rb"grpc-status.(?P<status>[0-9]+)(?s:.*)(?P<text>Decompressed message larger than max[ -~]*)", answer
    )
    refused(server, f"{encoding} bomb", 400, "said")
    assert said, answer
