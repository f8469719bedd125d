"""Tensors in system shared memory, with unmodified clients against a server, and what hostile ones try."""

import asyncio
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.utils import InferenceServerException, serialize_byte_tensor
from tritonclient.utils import shared_memory as shm

from oriel_gateway.core import Gateway
from oriel_gateway.ingress.http import serve_public
from oriel_gateway.limits import EmbeddedLimiter
from oriel_inference.app import Unit
from oriel_inference.errors import BackendFailed, InferenceError, InvalidRequest, RequestTooLarge
from oriel_inference.servers.regions import MAX_BYTES, MAX_REGIONS, Regions, SharedInputs
from oriel_policies.documents import compile_documents
from oriel_wire.observe.trace import ListSink
from oriel_wire.v2.grpc import SERVICE
from oriel_wire.v2.messages import InferResponse, RequestedOutput, SharedBytes, Tensor
from oriel_wire.v2.proto import v2_pb2

from ..gateway.stack import GOLD, documents
from .conftest import settings_of
from .thread_unit import unit_in_thread

A = np.arange(16, dtype=np.float32).reshape(1, 16)
B = np.ones((1, 16), np.float32)


class Client:
    """One of tritonclient's clients. region: creates a file and registers it."""

    def __init__(self, kind: ModuleType, port: int) -> None:
        self.kind = kind
        self.raw = kind.InferenceServerClient(f"127.0.0.1:{port}")
        self.files: list[Any] = []

    def file(self, size: int) -> tuple[str, Any]:
        key = f"/oriel-{uuid4().hex}"
        self.files.append(shm.create_shared_memory_region(key, key, size))
        return key, self.files[-1]

    def region(self, name: str, size: int, array: np.ndarray[Any, Any] | None = None) -> Any:
        key, handle = self.file(size)
        if array is not None:
            shm.set_shared_memory_region(handle, [array])
        self.raw.register_system_shared_memory(name, key, size)
        return handle

    def names(self) -> list[str]:
        found = self.raw.get_system_shared_memory_status()
        return sorted(found.regions if hasattr(found, "regions") else (each["name"] for each in found))

    def input(self, name: str, array: np.ndarray[Any, Any] | None = None, **options: Any) -> Any:
        made = self.kind.InferInput(name, [1, 16], "FP32")
        if array is not None:
            made.set_data_from_numpy(array, **options)
        return made

    def output(self, name: str, *place: Any) -> Any:
        made = self.kind.InferRequestedOutput(name)
        if place:
            made.set_shared_memory(*place)
        return made

    def refusal(self, act: Callable[..., Any], *arguments: Any, **named: Any) -> str:
        with pytest.raises(InferenceServerException) as refused:
            act(*arguments, **named)
        return str(refused.value.message())


@pytest.fixture(scope="module")
def sharing(repository: Path) -> Iterator[Unit]:
    with unit_in_thread(replace(settings_of(repository), client_shm=True)) as unit:
        yield unit


@pytest.fixture(params=[tritonclient.http, tritonclient.grpc], ids=["http", "grpc"])
def client(request: pytest.FixtureRequest, sharing: Unit) -> Iterator[Client]:
    made = Client(request.param, sharing.http_port if request.param is tritonclient.http else sharing.grpc_port)
    yield made
    made.raw.unregister_system_shared_memory()
    made.raw.close()
    for each in made.files:
        shm.destroy_shared_memory_region(each)


def contents(handle: Any) -> np.ndarray[Any, Any]:
    return shm.get_contents_as_numpy(handle, np.float32, [1, 16]).copy()


# --- regions --------------------------------------------------------------------------------------------------------


def test_regions_are_registered_listed_and_unregistered(client: Client) -> None:
    client.raw.unregister_system_shared_memory("absent")
    key, _ = client.file(64)
    client.raw.register_system_shared_memory("part of it", key, 16, offset=32)
    client.region("other", 8)
    assert client.names() == ["other", "part of it"]
    found = client.raw.get_system_shared_memory_status("part of it")
    one = found[0] if isinstance(found, list) else found.regions["part of it"]
    values = one if isinstance(one, dict) else {name.name: value for name, value in one.ListFields()}
    assert values == {"name": "part of it", "key": key, "offset": 32, "byte_size": 16}
    assert "shared memory region 'other' already in manager" in client.refusal(client.region, "other", 8)
    client.raw.unregister_system_shared_memory("other")
    assert client.names() == ["part of it"]
    assert "Unable to find system shared memory region: 'other'" in client.refusal(
        client.raw.get_system_shared_memory_status, "other"
    )
    client.raw.unregister_system_shared_memory()
    assert client.names() == []


@pytest.mark.parametrize(
    ("offset", "size"), [(0, 65), (1, 64), (64, 1), (65, 0), (0, 0), (2**63, 2**63), (2**64 - 32, 32)]
)
def test_a_region_is_a_part_of_its_file(client: Client, offset: int, size: int) -> None:
    key, _ = client.file(64)
    said = client.refusal(client.raw.register_system_shared_memory, "r", key, size, offset=offset)
    assert ("failed to register shared memory region 'r': invalid args" in said) or f"{MAX_BYTES} bytes in all" in said
    assert client.names() == []


@pytest.mark.parametrize(
    ("key", "said"),
    [
        *((key, "is not the name of a file under") for key in ("", "/", "//x", "a/b", "..", "/..", ".", "a\0b")),
        ("x" * 256, "File name too long"),
        ("{link}", "Too many levels of symbolic links"),
        ("{folder}", "Is a directory"),
        ("{pipe}", "it is not a file of /dev/shm"),
        ("oriel-none-such", "No such file or directory"),
        ("\ud800", "its name is not valid text"),
    ],
)
def test_keys_name_regular_files_of_dev_shm(key: str, said: str) -> None:
    names = {kind: f"oriel-{kind}-{uuid4().hex}" for kind in ("link", "folder", "pipe")}
    paths = {kind: Path("/dev/shm") / name for kind, name in names.items()}
    paths["link"].symlink_to("/etc/hostname")
    paths["folder"].mkdir()
    os.mkfifo(paths["pipe"])
    try:
        with pytest.raises(BackendFailed, match=f"Unable to open shared memory region: .*{said}"):
            Regions(1).register("r", key.format(**names), 0, 1)
    finally:
        paths["link"].unlink()
        paths["folder"].rmdir()
        paths["pipe"].unlink()


@pytest.fixture
def sparse() -> Iterator[tuple[str, Path]]:
    """A file of more bytes than the server accepts, none of which is stored."""
    path = Path("/dev/shm") / f"oriel-{uuid4().hex}"
    path.touch(0o600)
    os.truncate(path, MAX_BYTES + 1)
    yield path.name, path
    path.unlink()


@pytest.mark.parametrize("slash", ["", "/"])
def test_memory_of_a_triton_server_beside_is_refused(slash: str) -> None:
    with pytest.raises(InvalidRequest, match="region 'r' with key .* as the key contains the reserved prefix"):
        Regions(1).register("r", f"{slash}triton_python_backend_shm_region_1", 0, 1)


def test_regions_are_bounded_in_number_and_bytes_and_closed(sparse: tuple[str, Path]) -> None:
    regions = Regions(1 << 20)
    with pytest.raises(InvalidRequest, match="bytes in all"):
        regions.register("r", sparse[0], 0, MAX_BYTES + 1)
    for number in range(MAX_REGIONS):
        regions.register(str(number), sparse[0], number, MAX_BYTES // MAX_REGIONS)
    with pytest.raises(InvalidRequest, match=f"at most {MAX_REGIONS} regions"):
        regions.register("r", sparse[0], 0, 1)
    opened = [each.descriptor for each in regions.status("")]
    regions.unregister("")
    for descriptor in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


@pytest.mark.parametrize("name", ["", "x" * 257])
def test_names_of_regions_are_bounded(sparse: tuple[str, Path], name: str) -> None:
    with pytest.raises(InvalidRequest, match="the name has 1 to 256 characters"):
        Regions(1).register(name, sparse[0], 0, 1)


def test_the_inputs_of_one_request_are_bounded(sparse: tuple[str, Path]) -> None:
    regions = Regions(100)
    regions.register("r", sparse[0], 0, 1000)
    inputs = SharedInputs(regions)
    assert inputs(SharedBytes("r", 0, 60)) == bytes(60) and inputs.size_bytes == 60
    with pytest.raises(RequestTooLarge, match="larger than 100 bytes"):
        inputs(SharedBytes("r", 0, 60))
    with pytest.raises(InvalidRequest, match="Integer overflow detected: byte_size"):
        inputs(SharedBytes("r", 32, 2**64 - 32))
    regions.unregister("")


def test_a_region_stays_until_the_requests_that_want_outputs_in_it_are_answered(sparse: tuple[str, Path]) -> None:
    regions = Regions(100)
    for name in ("in", "out"):
        regions.register(name, sparse[0], 0, 8)
    inputs, output = SharedInputs(regions), RequestedOutput("y", shared=SharedBytes("out", 0, 8))
    inputs(SharedBytes("in", 0, 8))
    inputs.check([output])
    del inputs
    regions.unregister("")
    assert {each.name for each in regions.status("")} == {"in", "out"}
    regions.write(InferResponse(model_name="m", outputs=[Tensor("y", "FP64", (1,), np.ones(1))]), [output])
    with sparse[1].open("rb") as file:
        assert file.read(8) == np.ones(1).tobytes()
    del output
    assert regions.status("") == []


def test_a_file_of_another_user_is_refused(sparse: tuple[str, Path]) -> None:
    if root := os.geteuid() == 0:
        os.seteuid(65534)
    else:
        sparse[1].chmod(0)
    try:
        with pytest.raises(BackendFailed, match="Permission denied"):
            Regions(1).register("r", sparse[0], 0, 1)
    finally:
        if root:
            os.seteuid(0)


@given(
    *(st.one_of(st.integers(0, 80), st.integers(0, 2**64)) for _ in range(4)),
)
def test_no_place_reaches_out_of_its_region(start: int, size: int, offset: int, wanted: int) -> None:
    path = Path("/dev/shm") / f"oriel-{uuid4().hex}"
    path.write_bytes(bytes(range(64)))
    regions = Regions(1 << 30)
    try:
        try:
            regions.register("r", path.name, start, size)
        except InvalidRequest:
            assert size < 1 or start + size > 64
            return
        assert start + size <= 64
        try:
            data = SharedInputs(regions)(SharedBytes("r", offset, wanted))
        except InferenceError:
            assert offset >= size or offset + wanted > size
        else:
            assert data == bytes(range(64))[start : start + size][offset : offset + wanted] and len(data) == wanted
    finally:
        regions.unregister("")
        path.unlink()


# --- inference ------------------------------------------------------------------------------------------------------


def test_inputs_and_outputs_in_regions(client: Client) -> None:
    client.region("a", 64, A)
    client.region("b", 64, B)
    results = client.region("results", 128)
    a, b = client.input("a"), client.input("b")
    a.set_shared_memory("a", 64)
    b.set_shared_memory("b", 64)
    outputs = [client.output("sum", "results", 64), client.output("difference", "results", 64, 64)]
    for number in range(3):
        shm.set_shared_memory_region(client.files[0], [A + number])
        answer = client.raw.infer("pair", [a, b], outputs=outputs)
        assert contents(results).tolist() == (A + number + B).tolist()
        assert shm.get_contents_as_numpy(results, np.float32, [1, 16], 64).tolist() == (A + number - B).tolist()
    said = answer.get_output("sum")
    if isinstance(said, dict):
        assert said == {"name": "sum", "datatype": "FP32", "shape": [1, 16]}
    else:
        assert (said.datatype, list(said.shape)) == ("FP32", [1, 16]) and not said.parameters
        assert list(answer.get_response().raw_output_contents) == [b"", b""]


@pytest.mark.parametrize("binary", [True, False])
def test_regions_are_mixed_with_the_message_and_objects_used_again(client: Client, binary: bool) -> None:
    options = {"binary_data": binary} if client.kind is tritonclient.http else {}
    client.region("b", 64, B)
    results = client.region("results", 64)
    a, b = client.input("a", A, **options), client.input("b")
    b.set_shared_memory("b", 64)
    total, difference = client.output("sum", "results", 64), client.output("difference")
    for _ in range(3):
        answer = client.raw.infer("pair", [a, b], outputs=[total, difference])
        assert contents(results).tolist() == (A + B).tolist()
        assert answer.as_numpy("difference").tolist() == (A - B).tolist()
    b.set_data_from_numpy(2 * B, **options)
    total.unset_shared_memory()
    for _ in range(3):
        answer = client.raw.infer("pair", [a, b], outputs=[total, difference])
        assert answer.as_numpy("sum").tolist() == (A + 2 * B).tolist()
    assert contents(results).tolist() == (A + B).tolist()
    b.set_shared_memory("b", 64)
    assert client.raw.infer("pair", [a, b]).as_numpy("sum").tolist() == (A + B).tolist()


def test_tensors_without_elements_need_no_bytes(client: Client) -> None:
    client.region("a", 64, A)
    inputs = [client.kind.InferInput(name, [1, 0], "FP32") for name in "ab"]
    for each in inputs:
        each.set_shared_memory("a", 0)
    answer = client.raw.infer("pair", inputs, outputs=[client.output("sum", "a", 0), client.output("difference")])
    assert answer.as_numpy("difference").shape == (1, 0)


def test_text_in_regions(client: Client) -> None:
    texts = np.array([[b"one"], [b""], ["drei \u00fc".encode()]], object)
    packed = serialize_byte_tensor(texts)
    client.region("in", 64, packed)
    out = client.region("out", 64)
    text = client.kind.InferInput("text", [3, 1], "BYTES")
    text.set_shared_memory("in", len(packed.item()))
    client.raw.infer("echo", [text], outputs=[client.output("said", "out", 64)])
    assert shm.get_contents_as_numpy(out, np.object_, [3, 1]).tolist() == texts.tolist()
    text.set_shared_memory("in", len(packed.item()) + 1)
    said = client.refusal(client.raw.infer, "echo", [text])
    assert "unexpected number of string elements 4 for inference input 'text' for model 'echo', expecting 3" in said


@pytest.mark.parametrize(
    ("given_place", "output_place", "said"),
    [
        (("a", 128), ("out", 64), "input byte size mismatch for input 'a' for model 'pair'. Expected 64, got 128"),
        (("none", 64), ("out", 64), "Unable to find shared memory region: 'none'"),
        (("a", 64, 1), ("out", 64), "Invalid offset + byte size for shared memory region: 'a'"),
        (("a", 64), ("none", 64), "Unable to find shared memory region: 'none'"),
        (("a", 64), ("out", 64, 64), "Invalid offset for shared memory region: 'out'"),
        (("a", 64), ("out", 65), "Invalid offset + byte size for shared memory region: 'out'"),
        (("a", 64), ("out", 63), "for output 'sum' (63 bytes) should be at least 64 bytes to hold the results"),
        (("a", 64), ("out", 2**63 - 1, 1), "Invalid offset + byte size for shared memory region: 'out'"),
        (("a", -64), ("out", 64), "whole numbers of bytes"),
    ],
)
def test_wrong_places_are_refused(
    client: Client, given_place: tuple[Any, ...], output_place: tuple[Any, ...], said: str
) -> None:
    client.region("a", 64, A)
    out = client.region("out", 64, B)
    a = client.input("a")
    a.set_shared_memory(*given_place)
    outputs = [client.output("sum", *output_place)]
    assert said in client.refusal(client.raw.infer, "pair", [a, client.input("b", B)], outputs=outputs)
    assert contents(out).tolist() == B.tolist()


def test_a_file_that_shrank_is_an_error_and_grows_no_more(client: Client) -> None:
    client.region("a", 64, A)
    client.region("out", 64)
    a, b, outputs = client.input("a"), client.input("b", B), [client.output("sum", "out", 64)]
    a.set_shared_memory("a", 64)
    source, target = (f"/dev/shm{each._shm_key}" for each in client.files)
    os.truncate(target, 60)
    assert "region 'out' has become shorter" in client.refusal(client.raw.infer, "pair", [a, b], outputs=outputs)
    assert os.path.getsize(target) == 60
    os.truncate(source, 0)
    assert "region 'a' has become shorter" in client.refusal(client.raw.infer, "pair", [a, b])
    os.truncate(source, 64)
    os.truncate(target, 64)
    client.raw.infer("pair", [a, b], outputs=outputs)


def test_a_file_that_changes_its_size_during_calls_does_no_harm(client: Client) -> None:
    client.region("a", 64, A)
    out = client.region("out", 64)
    a, outputs = client.input("a"), [client.output("sum", "out", 64)]
    a.set_shared_memory("a", 64)
    stop = threading.Event()

    def resize() -> None:
        while not stop.is_set():
            for each in client.files[:2]:
                os.truncate(f"/dev/shm{each._shm_key}", 0)
                os.truncate(f"/dev/shm{each._shm_key}", 64)

    thread = threading.Thread(target=resize)
    thread.start()
    try:
        for _ in range(200):
            try:
                client.raw.infer("pair", [a, client.input("b", B)], outputs=outputs)
            except InferenceServerException as refused:
                assert "has become shorter" in refused.message()
    finally:
        stop.set()
        thread.join()
    shm.set_shared_memory_region(client.files[0], [A])
    client.raw.infer("pair", [a, client.input("b", B)], outputs=outputs)
    assert contents(out).tolist() == (A + B).tolist()


def test_a_removed_file_serves_until_it_is_unregistered(client: Client) -> None:
    client.region("a", 64, A)
    path = Path(f"/dev/shm{client.files[0]._shm_key}")
    path.rename(f"{path}-kept")
    a = client.input("a")
    a.set_shared_memory("a", 64)
    assert client.raw.infer("pair", [a, client.input("b", B)]).as_numpy("sum").tolist() == (A + B).tolist()
    Path(f"{path}-kept").rename(path)
    client.raw.unregister_system_shared_memory("a")
    assert "Unable to find" in client.refusal(client.raw.infer, "pair", [a, client.input("b", B)])


def test_outputs_of_a_stream_are_written(sharing: Unit) -> None:
    client = Client(tritonclient.grpc, sharing.grpc_port)
    out = client.region("streamed", 64)
    message = v2_pb2.ModelInferRequest(model_name="pair")
    for name, array in (("a", A), ("b", B)):
        message.inputs.add(name=name, datatype="FP32", shape=[1, 16])
        message.raw_input_contents.append(array.tobytes())
    parameters = message.outputs.add(name="sum").parameters
    parameters["shared_memory_region"].string_param = "streamed"
    parameters["shared_memory_byte_size"].int64_param = 64
    with grpc.insecure_channel(f"127.0.0.1:{sharing.grpc_port}") as channel:
        ask = channel.stream_stream(
            f"/{SERVICE}/ModelStreamInfer",
            v2_pb2.ModelInferRequest.SerializeToString,
            v2_pb2.ModelStreamInferResponse.FromString,
        )
        (answer,) = ask(iter([message]), timeout=60)
    assert not answer.error_message and answer.infer_response.raw_output_contents == [b""]
    assert contents(out).tolist() == (A + B).tolist()
    client.raw.unregister_system_shared_memory()
    shm.destroy_shared_memory_region(client.files[0])


# --- who may --------------------------------------------------------------------------------------------------------


def test_the_extension_is_listed_and_cuda_is_not(client: Client) -> None:
    found = client.raw.get_server_metadata()
    extensions = set(found["extensions"] if isinstance(found, dict) else found.extensions)
    assert "system_shared_memory" in extensions and "cuda_shared_memory" not in extensions
    cuda = client.raw.get_cuda_shared_memory_status()
    assert cuda == [] or not cuda.regions
    said = client.refusal(client.raw.register_cuda_shared_memory, "r", b"aGFuZGxl", 0, 64)
    assert "CUDA shared memory is not served" in said


def test_calls_for_a_tenant_use_no_shared_memory(client: Client) -> None:
    """The direct call comes first, because heads of requests are kept."""
    client.region("out", 64)
    a, b, outputs = client.input("a", A), client.input("b", B), [client.output("sum", "out", 64)]
    shared = client.input("a")
    shared.set_shared_memory("out", 64)
    sent = {"x-oriel-tenant": "acme"}
    for _ in range(3):
        client.raw.infer("pair", [a, b], outputs=outputs)
        client.raw.infer("pair", [shared, b])
        refused = client.refusal(client.raw.infer, "pair", [a, b], outputs=outputs, headers=sent)
        assert re.search("output 'sum'.*: shared memory is not supported", refused)
        refused = client.refusal(client.raw.infer, "pair", [shared, b], headers=sent)
        assert re.search("input 'a'.*: shared memory is not supported", refused)
    register = client.raw.register_system_shared_memory
    assert "is not served" in client.refusal(register, "r", client.file(8)[0], 8, headers=sent)
    client.raw.unregister_system_shared_memory(headers=sent)
    listed = client.raw.get_system_shared_memory_status(headers=sent)
    assert listed == [] or not listed.regions
    assert client.names() == ["out"]


async def test_tensors_through_a_gateway_use_no_shared_memory(sharing: Unit) -> None:
    core = Gateway(compile_documents(documents([sharing.grpc_port])), limiter=EmbeddedLimiter(), sink=ListSink())
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    ingress = await serve_public(core, sock)

    def ask() -> None:
        direct, through = (Client(tritonclient.grpc, port) for port in (sharing.grpc_port, ingress.port))
        key = {"authorization": f"Bearer {GOLD}"}
        direct.region("out", 64)
        x = tritonclient.grpc.InferInput("x", [1, 4], "FP32")
        outputs = [direct.output("y", "out", 64)]
        for _ in range(2):
            x.set_data_from_numpy(np.ones((1, 4), np.float32))
            direct.raw.infer("double", [x], outputs=outputs)
            refused = through.refusal(through.raw.infer, "double", [x], outputs=outputs, headers=key)
            assert re.search("output 'y'.*: shared memory is not supported", refused)
            x.set_shared_memory("out", 16)
            refused = through.refusal(through.raw.infer, "double", [x], headers=key)
            assert re.search("input 'x'.*: shared memory is not supported", refused)
        assert through.refusal(through.raw.register_system_shared_memory, "r", "/key", 8, headers=key)
        direct.raw.unregister_system_shared_memory()
        shm.destroy_shared_memory_region(direct.files[0])

    try:
        await asyncio.to_thread(ask)
    finally:
        await ingress.drain(0.0)
        await core.close()
