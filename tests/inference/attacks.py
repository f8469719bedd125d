"""Attacks on an inference server over HTTP and gRPC: bodies and paths."""

import gzip
import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from oriel_wire.v2.proto import v2_pb2

MAX_BODY = 64 << 20
INFER = "/v2/models/double/infer"
X = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}


@dataclass(frozen=True)
class Post:
    """An attack by a body, which is built when it is sent. also: a status that is allowed besides a refusal."""

    body: Callable[[], bytes]
    path: str = INFER
    headers: dict[str, str] = field(default_factory=dict)
    also: int = 0


def document(*inputs: dict[str, Any], **members: Any) -> Callable[[], bytes]:
    return lambda: json.dumps({"inputs": list(inputs), **members}).encode()


def tensor(**changes: Any) -> Callable[[], bytes]:
    entry = {key: value for key, value in {**X, **changes}.items() if value is not ...}
    return document(entry)


def binary(size: object, data: bytes = b"\0" * 16, path: str = INFER, **changes: Any) -> Post:
    entry = {**X, "parameters": {"binary_data_size": size}, **changes}
    del entry["data"]
    head = json.dumps({"inputs": [entry]}).encode()
    return Post(lambda: head + data, path, {"inference-header-content-length": str(len(head))})


def built(body: Callable[[], Callable[[], bytes]]) -> Post:
    """Return an attack whose parts take as long to make as its body: each test process reads this table."""
    return Post(lambda: body()())


def raw(text: str | bytes, **more: Any) -> Post:
    return Post(lambda: text if isinstance(text, bytes) else text.encode(), **more)


END = b"\x03\x00"  # an empty last block
GZIP_HEAD, ZLIB_HEAD = b"\x1f\x8b\x08" + bytes(5) + b"\x02\xff", b"\x78\xda"


def bomb(size: int, window: int = 31, filler: bytes = b" ") -> Callable[[], bytes]:
    """Return about `size` bytes of filler, compressed: one compressed block is repeated. window: zlib's window bits."""

    def make() -> bytes:
        block = filler * ((1 << 20) // len(filler))
        stream = zlib.compressobj(9, zlib.DEFLATED, -15)
        blocks = (stream.compress(block) + stream.flush(zlib.Z_FULL_FLUSH)) * (size >> 20) + END
        if window < 0:
            return blocks
        checksum, head = (zlib.crc32, GZIP_HEAD) if window > 15 else (zlib.adler32, ZLIB_HEAD)
        found = checksum(b"")
        for _ in range(size >> 20):
            found = checksum(block, found)
        length = len(block) * (size >> 20) % 2**32
        return head + blocks + (struct.pack("<II", found, length) if window > 15 else struct.pack(">I", found))

    return make


def within(head: bytes, filler: bytes, tail: bytes, size: int = 60 << 20) -> Callable[[], bytes]:
    """Return gzip of about `size` bytes: the head, repeated filler, the tail."""
    return lambda: gzip.compress(head + filler * (size // len(filler)) + tail, 1)


GZIP, DEFLATE = {"content-encoding": "gzip"}, {"content-encoding": "deflate"}
LENGTH = "inference-header-content-length"
GOOD = json.dumps({"inputs": [X]})
ECHO = "/v2/models/echo/infer"
TEXT = {"name": "text", "shape": [1, 1], "datatype": "BYTES"}
FREE = "/v2/models/free/infer"


def free(shape: list[int], **more: Any) -> Post:
    entry = {"datatype": "FP32", "shape": shape, "data": []}
    return Post(document({**entry, "name": "a"}, {**entry, "name": "b"}), FREE, **more)


POSTS: dict[str, Post] = {
    # shapes
    "shape 2^62 x 4": Post(tensor(shape=[2**62, 4])),
    "shape 2^63": Post(tensor(shape=[2**63])),
    "shape 2^64 + 4, which wraps to 4": Post(tensor(shape=[1, 2**64 + 4])),
    "shape 2^32 x 2^32": Post(tensor(shape=[2**32, 2**32])),
    "shape of 4000 digits": Post(tensor(shape=[1, 10**4000])),
    "shape negative": Post(tensor(shape=[-1, -4])),
    "shape of 10^5 dimensions": Post(tensor(shape=[1] * 100_000)),
    "shape of floats": Post(tensor(shape=[1.0, 4.0])),
    "shape deep": Post(tensor(shape=[[1, 4]])),
    "shape empty": Post(tensor(shape=[], data=[1])),
    "shape zero rows": Post(tensor(shape=[0, 4], data=[])),
    "shape zero columns": Post(tensor(shape=[1, 0], data=[])),
    "empty by a huge extent": free([2**40, 0]),
    "empty by a large extent": free([2**24, 0]),
    "empty both ways": free([0, 0], also=200),
    "empty and honest": free([3, 0], also=200),
    # numbers and text
    "NaN as a shape": raw('{"inputs":[{"name":"x","shape":[1,NaN],"datatype":"FP32","data":[1]}]}'),
    "Infinity as a size": raw(GOOD.replace('"data": [1, 2, 3, 4]', '"parameters":{"binary_data_size":Infinity}')),
    "number 1e999": raw(GOOD.replace("3", "1e999")),
    "number of 10^6 digits": raw(GOOD.replace("3", "9" * 1_000_000)),
    "number beyond FP32": raw(GOOD.replace("3", "1e39")),
    "timeout of 400 digits": Post(document(X, parameters={"timeout": 10**400})),
    "timeout 2^64": Post(document(X, parameters={"timeout": 2**64})),
    "timeout float": Post(document(X, parameters={"timeout": 1.5})),
    "priority of 400 digits": Post(document(X, parameters={"priority": 10**400}), also=200),
    "UTF-16": Post(lambda: GOOD.encode("utf-16")),
    "UTF-16 without mark": Post(lambda: GOOD.encode("utf-16-le")),
    "UTF-32": Post(lambda: GOOD.encode("utf-32")),
    "byte order mark": Post(lambda: b"\xef\xbb\xbf" + GOOD.encode()),
    "not UTF-8": raw(GOOD.replace('"x"', '"\u00ff"').encode("latin-1")),
    "lone surrogate": raw(GOOD.replace('"x"', '"\\ud800"')),
    "lone surrogate as id beside NaN": raw(GOOD.replace("3", "NaN")[:-1] + ', "id": "\\ud800"}'),
    "NUL": raw(b"\0" * 1000),
    "NUL in a name": raw(GOOD.replace('"x"', '"x\\u0000"')),
    "terminal control in a name": raw(GOOD.replace('"x"', '"\\u001b[31m"')),
    "two documents": raw(GOOD + GOOD),
    "nothing": raw(""),
    # depth
    "depth 65": raw("[" * 65 + "]" * 65),
    "depth 10^5": raw('{"inputs":' + "[" * 100_000),
    "depth 4 MiB": raw("[" * (4 << 20)),
    "depth in data": raw(GOOD.replace("[1, 2, 3, 4]", "[" * 5000 + "1" + "]" * 5000)),
    "depth in data with NaN": raw(GOOD.replace("[1, 2, 3, 4]", "[" * 5000 + "NaN" + "]" * 5000)),
    "depth in a member nobody reads": raw('{"inputs":[],"extra":' + '{"a":' * 100_000),
    "empty lists and NaN": raw('{"inputs":[NaN' + ",[]" * 1_000_000 + "]}"),
    # names and counts
    "name of 1 MB": Post(tensor(name="n" * 1_000_000)),
    "datatype of 1 MB": Post(tensor(datatype="f" * 1_000_000)),
    "id of 1 MB": Post(document(X, id="i" * 1_000_000), also=200),
    "input twice": Post(document(X, X)),
    "outputs 10^5": built(lambda: document(X, outputs=[{"name": str(n)} for n in range(100_000)])),
    "outputs 10^5 of one name": Post(document(X, outputs=[{"name": "y"}] * 100_000)),
    "inputs 50,000": built(
        lambda: document(*({"name": str(n), "shape": [1], "datatype": "BOOL", "data": [True]} for n in range(50_000)))
    ),
    "parameters 10^5": built(lambda: document(X, parameters={f"p{n}": n for n in range(100_000)})),
    "parameters 10^5 of an input": built(lambda: tensor(parameters={f"p{n}": n for n in range(100_000)})),
    "parameter null": Post(document(X, parameters={"p": None})),
    "parameter list": Post(document(X, parameters={"p": [1]})),
    "parameter object": Post(document(X, parameters={"p": {"q": 1}})),
    "parameters a list": Post(document(X, parameters=[1])),
    "parameter reserved": Post(document(X, parameters={"triton_x": 1})),
    "parameter of 1 MB": Post(document(X, parameters={"p": "v" * 1_000_000}), also=200),
    "member twice, the last one good": raw(GOOD.replace('"shape"', '"shape": [9], "shape"'), also=200),
    "inputs twice, the last one bad": raw(GOOD[:-1] + ', "inputs": [] }'),
    "data 10^6 for 4": Post(tensor(data=[1] * 1_000_000)),
    "classification 2^31 - 1": Post(
        document(X, outputs=[{"name": "y", "parameters": {"classification": 2**31 - 1}}]), also=200
    ),
    "classification 2^63": Post(document(X, outputs=[{"name": "y", "parameters": {"classification": 2**63}}])),
    "classification negative": Post(document(X, outputs=[{"name": "y", "parameters": {"classification": -1}}])),
    "classification of text": Post(
        document({**TEXT, "data": ["a"]}, outputs=[{"name": "said", "parameters": {"classification": 1}}]), ECHO
    ),
    "shared memory": Post(tensor(data=..., parameters={"shared_memory_region": "r", "shared_memory_byte_size": 8})),
    # binary
    "binary size negative": binary(-16),
    "binary size beyond the body": binary(17),
    "binary size 2^63": binary(2**63),
    "binary size of 4000 digits": binary(10**4000),
    "binary size float": binary(16.0),
    "binary size true": binary(True),
    "binary size text": binary("16"),
    "binary size too small": binary(8),
    "binary bytes of nobody": binary(16, b"\0" * 17),
    "binary size for JSON data": Post(tensor(parameters={"binary_data_size": 16})),
    "binary 60 MiB for 4 numbers": binary(60 << 20, b"\0" * (60 << 20)),
    "two inputs share the bytes": Post(
        lambda: json.dumps({"inputs": [{"name": n, "shape": [1, 2], "datatype": "FP32",
                 "parameters": {"binary_data_size": 8}} for n in "ab"]}).encode().ljust(200) + b"\0" * 8,
        "/v2/models/pair/infer", {LENGTH: "200"},
    ),
    "header length beyond the body": raw(GOOD, headers={LENGTH: "1000000"}),
    "header length inside the JSON": raw(GOOD, headers={LENGTH: "10"}),
    "header length negative": raw(GOOD, headers={LENGTH: "-1"}),
    "header length 10^30": raw(GOOD, headers={LENGTH: "9" * 30}),
    "header length hex": raw(GOOD, headers={LENGTH: "0x10"}),
    "header length no number": raw(GOOD, headers={LENGTH: "a"}),
    "header length with a sign": raw(GOOD, headers={LENGTH: "+10"}),
    "raw too short": raw(b"\0" * 15, headers={LENGTH: "0"}),
    "raw too long": raw(b"\0" * (1 << 20), headers={LENGTH: "0"}),
    "raw empty": raw(b"", headers={LENGTH: "0"}),
    "raw for two inputs": raw(b"\0" * 8, path="/v2/models/pair/infer", headers={LENGTH: "0"}),
    "raw not text": raw(b"\xff\xfe", path=ECHO, headers={LENGTH: "0"}),
    "BYTES length 2^32 - 1": binary(8, b"\xff\xff\xff\xffabcd", ECHO, **TEXT),
    "BYTES length cut": binary(3, b"\1\0\0", ECHO, **TEXT),
    "BYTES left over": binary(9, b"\1\0\0\0a\0\0\0\0", ECHO, **TEXT),
    "BYTES 2^30 of them": binary(8, b"\0" * 8, ECHO, **{**TEXT, "shape": [1, 2**30]}),
    "BYTES 16 million empty ones": binary(60 << 20, b"\0" * (60 << 20), ECHO, **{**TEXT, "shape": [1, 15 << 20]}),
    "BYTES not text": binary(6, struct.pack("<I", 2) + b"\xff\xfe", ECHO, **TEXT),
    # encodings
    "gzip bomb of 1 GiB": Post(bomb(1 << 30), headers=GZIP),
    "gzip bomb of brackets": Post(bomb(63 << 20, filler=b"["), headers=GZIP),
    "gzip bomb of lists": Post(bomb(60 << 20, filler=b"[0],"), headers=GZIP),
    "gzip bomb of quotes": Post(bomb(60 << 20, filler=b'"'), headers=GZIP),
    "gzip bomb of backslashes": Post(bomb(60 << 20, filler=b"\\"), headers=GZIP),
    "gzip bomb of objects": Post(bomb(60 << 20, filler=b'{"":{}},'), headers=GZIP),
    "gzip bomb of 16 million lists for 4 numbers": Post(
        within(b'{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[[0]', b",[0]", b"]}]}"), headers=GZIP
    ),
    "gzip bomb of 30 million numbers for 4": Post(
        within(b'{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[0', b",0", b"]}]}"), headers=GZIP
    ),
    "gzip bomb of 15 million texts for one": Post(
        within(b'{"inputs":[{"name":"text","shape":[1,1],"datatype":"BYTES","data":[""', b',""', b"]}]}"),
        ECHO, headers=GZIP,
    ),
    "gzip bomb of a member nobody reads": Post(within(b'{"inputs":[],"extra":[{}', b",{}", b"]}"), headers=GZIP),
    "gzip bomb of parameters": Post(
        within(b'{"parameters":{"a":0', b',"a":0', b'},"inputs":[]}'), headers=GZIP
    ),
    "gzip bomb of inputs": Post(
        within(b'{"inputs":[{}', b',{"name":"x","shape":[1],"datatype":"BOOL","data":[true]}', b"]}"), headers=GZIP
    ),
    "gzip bomb of one number": Post(
        within(b'{"inputs":[{"name":"x","shape":[1,4],"datatype":"FP32","data":[1', b"0", b"]}]}"), headers=GZIP
    ),
    "deflate bomb": Post(bomb(128 << 20, 15), headers=DEFLATE),
    "gzip of gzip": Post(lambda: gzip.compress(gzip.compress(GOOD.encode())), headers=GZIP),
    "gzip cut": Post(lambda: gzip.compress(GOOD.encode())[:-9], headers=GZIP),
    "gzip followed by more": Post(lambda: gzip.compress(GOOD.encode()) + b"more", headers=GZIP),
    "gzip that is none": raw(GOOD, headers=GZIP),
    "gzip with a wrong sum": Post(lambda: gzip.compress(GOOD.encode())[:-8] + b"\0" * 8, headers=GZIP),
    "gzip twice by name": Post(lambda: gzip.compress(GOOD.encode()), headers={"content-encoding": "gzip, gzip"}),
    "brotli": raw(GOOD, headers={"content-encoding": "br"}),
    "deflate that is raw": Post(bomb(1 << 20, -15), headers=DEFLATE),
    # sizes
    "body beyond the limit": Post(lambda: b" " * (MAX_BODY + 1)),
    "JSON of 60 MiB": Post(lambda: b" " * (60 << 20)),
    "JSON of the largest size": Post(lambda: GOOD.encode() + b" " * ((4 << 20) - len(GOOD)), also=200),
    # other paths with bodies
    "generate deep": raw('{"x":' + "[" * 100_000, path="/v2/models/double/generate"),
    "generate 10^6 numbers": Post(lambda: json.dumps({"x": [1] * 1_000_000}).encode(), "/v2/models/double/generate"),
    "generate ragged": raw('{"x":[[1,2],[3]]}', path="/v2/models/double/generate"),
    "generate list": raw("[]", path="/v2/models/double/generate"),
    "generate input twice": raw('{"x":[1,2,3,4],"parameters":{"x":[1,2,3,4]}}', path="/v2/models/double/generate"),
    "generate huge number": raw('{"x":[1,2,3,1e999]}', path="/v2/models/double/generate_stream"),
    "generate timeout": Post(
        lambda: json.dumps({"x": [1, 2, 3, 4], "timeout": 10**400}).encode(), "/v2/models/double/generate"
    ),
    "generate 10^5 parameters": Post(
        lambda: json.dumps({"x": [1, 2, 3, 4], **{f"p{n}": n for n in range(100_000)}}).encode(),
        "/v2/models/double/generate",
    ),
    "logging deep": raw("[" * 100_000, path="/v2/logging"),
    "logging level": raw('{"log_verbose_level":' + "9" * 400 + "}", path="/v2/logging"),
    "load deep": raw('{"parameters":' + "[" * 100_000, path="/v2/repository/models/double/load"),
    "load NaN": raw('{"parameters":{"config":NaN}}', path="/v2/repository/models/double/load"),
    "load configuration deep": raw(
        json.dumps({"parameters": {"config": '{"input":' + "[" * 50_000}}), path="/v2/repository/models/double/load"
    ),
    "load base64": raw('{"parameters":{"config":"{}","file:1/a":"*"}}', path="/v2/repository/models/double/load"),
    "index not JSON": raw("{", path="/v2/repository/index"),
}  # fmt: skip

PATHS = (
    "/v2/models/..%2f..%2fetc%2fpasswd/infer",
    "/v2/models/..%252f..%252fetc/infer",
    "/v2/models/%2e%2e/infer",
    "/v2/models/%2e/ready",
    "/v2/models/.hidden/ready",
    "/v2/models/d%6fuble%00/infer",
    "/v2/models/double%2Fversions%2F1/infer",
    "/v2/models/double%0d%0ax:%20y/infer",
    "/v2/models/" + "n" * 129 + "/infer",
    "/v2/models/" + "n" * 7000 + "/infer",
    "/v2/models/%ff/infer",
    "/v2/models/double%cc%81/infer",
    "/v2/models//infer",
    "/v2/models/double/versions/../infer",
    "/v2/models/double/versions/%31/infer",
    "/v2/models/double/versions/+1/infer",
    "/v2/models/double/versions/0/infer",
    "/v2/models/double/versions/01/infer",
    "/v2/models/double/versions/99999999999999999999999/infer",
    "/v2/models/double/versions/1/infer/",
    "/v2/models/double/versions/1/versions/1/infer",
    "/v2//models/double/infer",
    "/v2/models/double/infer?x=" + "y" * 9000,
    "/v2/repository/models/..%2f..%2fetc/load",
    "/v2/repository/models/%252e%252e/unload",
    "/v2/repository/..%2f../index",
    "/v2/systemsharedmemory/region/a/register",
    "/" + "a/" * 3000,
)


def message(**more: Any) -> v2_pb2.ModelInferRequest:
    return v2_pb2.ModelInferRequest(model_name="double", **more)


def typed(field: str, values: Any, shape: list[int], datatype: str = "FP32", model: str = "double") -> bytes:
    request = v2_pb2.ModelInferRequest(model_name=model)
    entry = request.inputs.add(name="x", datatype=datatype, shape=shape)
    getattr(entry.contents, field).extend(values)
    return request.SerializeToString()


def rawly(shape: list[int], data: bytes, *, name: str = "x", datatype: str = "FP32", model: str = "double") -> bytes:
    request = v2_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name=name, datatype=datatype, shape=shape)
    request.raw_input_contents.append(data)
    return request.SerializeToString()


def mixed() -> bytes:
    request = v2_pb2.ModelInferRequest.FromString(typed("fp32_contents", [1, 2, 3, 4], [1, 4]))
    request.raw_input_contents.append(b"\0" * 16)
    return request.SerializeToString()


def many(count: int, what: str) -> bytes:
    request = v2_pb2.ModelInferRequest.FromString(rawly([1, 4], b"\0" * 16))
    for n in range(count):
        if what == "parameters":
            request.parameters[f"p{n}"].int64_param = n
        else:
            getattr(request, what).add(name=f"n{n}")
    return request.SerializeToString()


def sized(number: int, data: bytes) -> bytes:
    length, out = len(data), b""
    while length > 127:
        out, length = out + bytes([length & 127 | 128]), length >> 7
    return bytes([number << 3 | 2]) + out + bytes([length]) + data


def parameter(**value: Any) -> bytes:
    request = v2_pb2.ModelInferRequest.FromString(rawly([1, 4], b"\0" * 16))
    request.parameters["timeout"].CopyFrom(v2_pb2.InferParameter(**value))
    return request.SerializeToString()


NAME = sized(1, b"double")
CALLS: dict[str, Callable[[], bytes]] = {
    "nothing": lambda: b"",
    "no message": lambda: b"\xff" * 100,
    "a length beyond the message": lambda: NAME + b"\x2a\xff\xff\xff\xff\x0f",
    "groups 10^5 deep": lambda: NAME + b"\x7b" * 100_000,
    "messages 10^4 deep": lambda: NAME + b"".join(sized(5, b"") for _ in range(10)) + b"\x2b" * 10_000,
    "a name that is no UTF-8": lambda: sized(1, b"\xff\xfe"),
    "a model name of 1 MB": lambda: sized(1, b"n" * 1_000_000),
    "a model name with a path": lambda: sized(1, b"../../etc/passwd"),
    "a version of 1 MB": lambda: NAME + sized(2, b"9" * 1_000_000),
    "a version in other digits": lambda: NAME + sized(2, "\u00b2".encode()) + rawly([1, 4], b"\0" * 16)[8:],
    "a version with a zero before it": lambda: NAME + sized(2, b"01"),
    "a version that is none": lambda: NAME + sized(2, b"-1"),
    "an input name of 1 MB": lambda: rawly([1, 4], b"\0" * 16, name="n" * 1_000_000),
    "shape 2^62 x 4": lambda: rawly([2**62, 4], b"\0" * 16),
    "shape negative": lambda: rawly([-1, -4], b"\0" * 16),
    "shape of 10^6 dimensions": lambda: rawly([1] * 1_000_000, b"\0" * 16),
    "empty by a huge extent": lambda: rawly([2**40, 0], b"", name="a", model="free"),
    "typed fewer than the shape": lambda: typed("fp32_contents", [1, 2, 3], [1, 4]),
    "typed none for 2^40": lambda: typed("fp32_contents", [], [1, 2**40]),
    "typed in another field": lambda: typed("int_contents", [1, 2, 3, 4], [1, 4]),
    "typed out of range": lambda: typed("int_contents", [300], [1], "INT8"),
    "typed FP16": lambda: typed("fp32_contents", [1], [1], "FP16"),
    "raw and typed": mixed,
    "raw for nobody": lambda: rawly([1, 4], b"\0" * 16) + sized(7, b"\0" * 16),
    "raw too long by 60 MiB": lambda: rawly([1, 4], b"\0" * (60 << 20)),
    "BYTES length 2^32 - 1": lambda: rawly([1, 1], b"\xff" * 4 + b"abcd", name="text", datatype="BYTES", model="echo"),
    "BYTES 2^30 of them": lambda: rawly([1, 2**30], b"\0" * 8, name="text", datatype="BYTES", model="echo"),
    "inputs 10^5": lambda: many(100_000, "inputs"),
    "inputs 2000": lambda: many(2000, "inputs"),
    "outputs 10^5": lambda: many(100_000, "outputs"),
    "parameters 10^5": lambda: many(100_000, "parameters"),
    "parameters 2000": lambda: many(2000, "parameters"),
    "empty inputs in 60 MB": lambda: NAME + b"\x2a\x00" * 30_000_000,
    "empty raw contents in 60 MB": lambda: NAME + b"\x3a\x00" * 30_000_000,
    "empty parameters in 60 MB": lambda: NAME + b"\x22\x00" * 30_000_000,
    "BYTES contents in 60 MB": lambda: NAME + sized(5, sized(1, b"x") + sized(5, b"\x42\x00" * 30_000_000)),
    "INT64 varints in 60 MB": lambda: NAME + sized(5, sized(1, b"x") + sized(5, sized(3, b"\x01" * 60_000_000))),
    "INT64 unpacked in 60 MB": lambda: NAME + sized(5, sized(1, b"x") + sized(5, b"\x18\x01" * 30_000_000)),
    "shape of 60 MB": lambda: NAME + sized(5, sized(1, b"x") + sized(3, b"\x01" * 60_000_000)),
    "shape of 8 million dimensions": lambda: NAME + sized(5, sized(1, b"x") + sized(3, b"\xff\xff\x01" * 8_000_000)),
    "FP32 in 60 MB for 4": lambda: NAME + sized(5, sized(1, b"x") + sized(2, b"FP32") + sized(3, b"\1\4") + sized(
        5, sized(6, b"\0" * 60_000_000))),
    "booleans in 60 MB": lambda: NAME + sized(5, sized(1, b"x") + sized(2, b"BOOL") + sized(3, b"\x80\x8e\xce\x1c")
        + sized(5, sized(1, b"\1" * 60_000_000))),
    "an id of 60 MB, four bytes a character": lambda: NAME + sized(3, b"i" * 60_000_000 + "\U0001f600".encode()),
    "raw behind what nobody knows": lambda: NAME + b"\xf8\x07\x01" * 200 + rawly([1, 4], b"\0" * 60_000_000),
    "raw behind a group": lambda: NAME + b"\xfb\x07\xfc\x07" + rawly([1, 4], b"\0" * 60_000_000),
    "raw in 300 pieces": lambda: rawly([1, 4], b"") + sized(7, b"\0" * 200_000) * 300,
    "raw 30 MB, typed 30 MB": lambda: NAME + sized(7, b"\0" * 30_000_000) + sized(5, sized(1, b"x") + sized(
        2, b"FP32") + sized(3, b"\1\4") + sized(5, sized(6, b"\0" * 30_000_000))),
    "unknown fields in 60 MB": lambda: NAME + b"\xf8\x07\x01" * 20_000_000,
    "beyond the largest message": lambda: rawly([1, 4], b"\0" * (MAX_BODY + 1)),
    "timeout as text": lambda: parameter(string_param="soon"),
    "timeout as a number": lambda: parameter(double_param=float("nan")),
    "timeout 2^64 - 1": lambda: parameter(uint64_param=2**64 - 1),
    "timeout without a value": lambda: parameter(),
    "timeout negative": lambda: parameter(int64_param=-1),
}  # fmt: skip
