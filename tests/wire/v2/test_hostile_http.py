"""Bodies made to break the decoder: each is refused by name, cheaply, in a short sentence."""

import json
import tracemalloc
from typing import Any

import msgspec
import pytest

from oriel_wire.errors import BadMessage, TooLarge
from oriel_wire.v2 import http


def body_of(binary: bytes = b"", **changes: Any) -> tuple[bytes, int | None]:
    entry = {"name": "x", "shape": [2], "datatype": "FP32", "data": [1, 2]} | changes
    entry = {key: value for key, value in entry.items() if value is not ...}
    head = json.dumps({"inputs": [entry]}).encode()
    return head + binary, len(head) if binary or "data" not in entry else None


def refusal(body: bytes, header_length: int | None = None, **options: Any) -> str:
    tracemalloc.start()
    try:
        with pytest.raises(BadMessage) as caught:
            http.decode_request("m", "", body, header_length, **options)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message = caught.value.message
    assert 0 < len(message) <= 500
    assert message.isprintable()
    assert peak < 1 << 20 or peak < 64 * len(body)
    return message


@pytest.mark.parametrize(
    ("changes", "hint"),
    [
        ({"shape": [2**30, 2**29]}, "shape [1073741824, 536870912] has 576460752303423488 elements, data holds 2"),
        ({"shape": [2**64 + 2]}, "causes total element count to exceed maximum size of 9223372036854775807"),
        ({"shape": [0, 2**62, 2**62]}, "causes total element count to exceed maximum size"),
        (
            {"shape": [0, 2**23], "data": []},
            "shape [0, 8388608] has no elements; the product of its other dimensions may be 4194304",
        ),
        ({"datatype": "BYTES", "shape": [2**18 + 1]}, "262145 BYTES elements, at most 262144 are accepted"),
        ({"parameters": {f"p{n}": n for n in range(1025)}}, "parameters: 1025 are given, at most 1024"),
        ({"shape": [2] * 33}, "33 dimensions, at most 32"),
        ({"shape": [1] * 100_000}, "100000 dimensions, at most 32"),
        ({"shape": [-1]}, "shape [-1] has a negative dimension"),
        ({"shape": [2.0]}, "Expected `int`, got `float`"),
        ({"shape": 2}, "Expected `array`, got `int`"),
        ({"shape": [3]}, "shape [3] has 3 elements, data holds 2"),
        ({"data": [0] * 100_000}, "shape [2] has 2 elements, data holds 100000"),
        ({"shape": [2, 1], "data": [[0, 0]] * 50_000}, "shape [2, 1] has 2 elements, data holds 100000"),
        ({"shape": [0, 1], "data": [[]] * 30_000}, "shape [0, 1] has 0 elements, data holds 30000"),
        ({"shape": []}, "shape [] has 1 elements, data holds 2"),
        ({"datatype": "FP31"}, "datatype 'FP31' is not one of BOOL"),
        ({"datatype": "f" * 100_000}, "is not one of"),
        ({"datatype": "FP16"}, "FP16 cannot travel as JSON, send it as binary data"),
        ({"data": 1}, "data must be a list"),
        ({"data": [1, "2"]}, "data does not hold FP32 elements: Expected `float`, got `str`"),
        ({"data": [1, True]}, "Expected `float`, got `bool`"),
        ({"data": [[1], 2]}, "data does not hold FP32 elements"),
        ({"data": [1, 1e39]}, "outside the range of FP32"),
        ({"data": [1, 10**400]}, "Number out of range"),
        ({"datatype": "INT32", "data": [1, 1.5]}, "Expected `int`, got `float`"),
        ({"datatype": "INT32", "data": [1, False]}, "Expected `int`, got `bool`"),
        ({"datatype": "INT8", "data": [127, 128]}, "outside INT8 (-128 to 127)"),
        ({"datatype": "UINT64", "data": [0, 2**64]}, "outside UINT64"),
        ({"datatype": "INT64", "data": [0, -(2**63) - 1]}, "outside INT64"),
        ({"datatype": "BOOL", "data": [True, 1]}, "Expected `bool`, got `int`"),
        ({"datatype": "BYTES", "data": ["a", 1]}, "Expected `str`, got `int`"),
        ({"shape": [2, 2], "data": [[1, 2], [3]]}, "nested unevenly"),
        ({"shape": [2, 3], "data": [[1, 2], [3, 4], [5, 6]]}, "data is nested as [3, 2], the shape is [2, 3]"),
        ({"name": 1}, "Expected `str`, got `int`"),
        ({"name": ...}, "missing required field `name`"),
        ({"data": ...}, "has neither data nor binary_data_size"),
        ({"parameters": {"binary_data_size": 8}}, "has both data and binary_data_size"),
        ({"parameters": {"shared_memory_region": "r"}, "data": ...}, "shared memory is not supported"),
        ({"parameters": {"a": None}}, "got `null`"),
    ],
)
def test_json_tensor_is_refused(changes: dict[str, Any], hint: str) -> None:
    body, _ = body_of(**changes)
    assert hint in refusal(body)


@pytest.mark.parametrize(
    ("size", "binary", "changes", "hint"),
    [
        (7, b"1234567", {}, "input byte size mismatch for input 'x' for model 'm'. Expected 8, got 7"),
        (8, b"1234", {}, "binary_data_size is 8, the body has 4 bytes left"),
        (8, b"1234567890", {}, "the body has 2 bytes that belong to no input"),
        (-8, b"12345678", {}, "must be a whole number of bytes"),
        (True, b"1", {"datatype": "BOOL", "shape": [1]}, "must be a whole number of bytes"),
        (2**70, b"12345678", {}, "binary_data_size is 1180591620717411303424, the body has 8 bytes left"),
        (8, b"12345678", {"shape": [2**30, 2**29]}, "Expected 2305843009213693952, got 8"),
        (8, b"12345678", {"shape": [-1, -2]}, "negative dimension"),
        (
            8,
            b"\x00" * 8,
            {"datatype": "BYTES", "shape": [3]},
            "expected 3 string elements for inference input 'x' for model 'm', got 2 at most",
        ),
        (
            12,
            b"\x00" * 12,
            {"datatype": "BYTES", "shape": [1]},
            "unexpected number of string elements 2 for inference input 'x' for model 'm', expecting 1",
        ),
        (
            8,
            b"\x05\0\0\0abcd",
            {"datatype": "BYTES", "shape": [1]},
            "expecting string of length 5 but only 4 bytes available",
        ),
        (
            8,
            b"\x02\0\0\0ab\0\0",
            {"datatype": "BYTES", "shape": [2]},
            "expected 2 string elements for inference input 'x' for model 'm', got 1",
        ),
    ],
)
def test_binary_tensor_is_refused(size: object, binary: bytes, changes: dict[str, Any], hint: str) -> None:
    body, header_length = body_of(binary, data=..., parameters={"binary_data_size": size}, **changes)
    assert hint in refusal(body, header_length)


@pytest.mark.parametrize("header_length", [-1, -(2**63), 1000, 2**63, 10**400])
def test_header_length_beyond_the_body(header_length: int) -> None:
    body, _ = body_of()
    assert "Inference-Header-Content-Length" in refusal(body, header_length)


def test_header_length_that_cuts_the_json() -> None:
    body, _ = body_of()
    assert "not an infer message" in refusal(body, len(body) - 1)
    assert "not an infer message" in refusal(body, 1)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        b"\xff\xfe",
        b'{"inputs": null}',
        b'{"inputs": [null]}',
        b'{"inputs": {}}',
        b'{"inputs": [], "id": 7}',
        b'{"inputs": [], "id": "\xff"}',
        b'{"inputs": [], "outputs": [{"parameters": {}}]}',
        b'{"inputs": []} {}',
        b'{"inputs": [],}',
        b"{'inputs': []}",
        b'{"inputs": NaN}',
        b'{"inputs": [NaN]}',
        b'{"inputs": [{"name": NaN}]}',
        b'[Infinity, "NaN"]',
        b'{"inputs": [], "parameters": {"a": 1e999}}',
        b'{"inputs": [], "parameters": {"a": ' + b"9" * 5000 + b"}}",
        b'{"inputs": [], "parameters": {"a": NaN, "b": ' + b"9" * 5000 + b"}}",
        json.dumps({"inputs": []}).encode("utf-16"),
    ],
)
def test_json_that_is_no_infer_message(body: bytes) -> None:
    assert "not an infer message" in refusal(body)


@pytest.mark.parametrize("depth", [65, 1000, 100_000])
@pytest.mark.parametrize(
    "inside", ['{"inputs": %s}', '{"inputs": [{"name":"x","shape":[1],"datatype":"FP32","data":%s}]}']
)
@pytest.mark.parametrize("word", ["1", "NaN"])
def test_deep_json(depth: int, inside: str, word: str) -> None:
    refusal((inside % ("[" * depth + word + "]" * depth)).encode())


@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_deep_json_where_nobody_looks(opening: str) -> None:
    body = '{"inputs": [], "extra": ' + opening * 100_000
    assert "JSON nesting depth exceeds maximum allowed limit (100)" in refusal(body.encode())


def test_json_part_over_the_limit_is_not_decoded() -> None:
    body, _ = body_of()
    with pytest.raises(TooLarge, match=f"the JSON part has {len(body)} bytes, at most {len(body) - 1}"):
        http.decode_request("m", "", body, None, json_limit=len(body) - 1)
    http.decode_request("m", "", body, None, json_limit=len(body))
    with pytest.raises(TooLarge):
        http.decode_request("m", "", b" " * (http.JSON_LIMIT_BYTES + 1), None)


def test_names_given_twice() -> None:
    entry = {"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}
    assert refusal(json.dumps({"inputs": [entry, entry]}).encode()) == "input 'x' for model 'm' is given more than once"
    body = json.dumps({"inputs": [entry], "outputs": [{"name": "y"}, {"name": "z"}, {"name": "y"}]}).encode()
    outputs = http.decode_request("m", "", body, None).outputs or ()
    assert [output.name for output in outputs] == ["y", "z"], "it is still one output"


def test_counts_are_bounded() -> None:
    entry = {"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}
    many = json.dumps({"inputs": [{**entry, "name": str(n)} for n in range(1025)]}).encode()
    assert refusal(many) == "inputs: 1025 are given, at most 1024 are accepted"
    many = json.dumps({"inputs": [entry], "outputs": [{"name": str(n)} for n in range(1025)]}).encode()
    assert refusal(many) == "outputs: 1025 are given, at most 1024 are accepted"
    many = json.dumps({"inputs": [entry], "parameters": {f"p{n}": n for n in range(1025)}}).encode()
    assert refusal(many) == "request: parameters: 1025 are given, at most 1024 are accepted"


def test_member_given_twice_counts_once() -> None:
    body = b'{"inputs": [], "inputs": [{"name":"x","shape":[9],"shape":[1],"datatype":"FP32","data":[1]}]}'
    assert [each.shape for each in http.decode_request("m", "", body, None).inputs] == [(1,)]


@pytest.mark.parametrize(
    ("members", "hint"),
    [
        ({"parameters": {"triton_final_response": True}}, "'triton_final_response': names that start with triton_"),
        ({"parameters": {"binary_data_output": 1}}, "binary_data_output must be true or false"),
        ({"outputs": [{"name": "y", "parameters": {"binary_data": "yes"}}]}, "output 'y': parameter binary_data must"),
        ({"outputs": [{"name": "y", "parameters": {"classification": -1}}]}, "the number of classes wanted"),
        ({"outputs": [{"name": "y", "parameters": {"classification": True}}]}, "the number of classes wanted"),
        ({"outputs": [{"name": "y", "parameters": {"classification": 2**31}}]}, "the number of classes wanted"),
        ({"outputs": [{"name": "y", "parameters": {"shared_memory_region": "r"}}]}, "shared memory is not supported"),
    ],
)
def test_parameters_that_are_refused(members: dict[str, Any], hint: str) -> None:
    assert hint in refusal(json.dumps({"inputs": [], **members}).encode())


def test_hostile_names_stay_short_and_printable_in_errors() -> None:
    for name in ("n" * 1_000_000, "a\nb\x1b[31m\u202e", "\ud83d\ude00" * 200_000):
        body, _ = body_of(name=name, shape=[3])
        refusal(body, json_limit=1 << 24)


def test_lone_surrogates() -> None:
    body = b'{"inputs":[{"name":"x","shape":[1],"datatype":"BYTES","data":["\\ud800"]}]}'
    refusal(body)
    refusal(body.replace(b'"\\ud800"', b'"\\ud800", NaN'))
    refusal(b'{"inputs": [{"name":"x","shape":[1],"datatype":"BYTES","data":["\\ud800"], "parameters": {"a": NaN}}]}')
    number = b'{"name":"x","shape":[1],"datatype":"FP32","data":[NaN]}'
    for place in (b'"id":"\\ud800"', b'"parameters":{"\\ud800":1}', b'"parameters":{"a":"\\ud800"}'):
        refusal(b'{"inputs":[%b],%b}' % (number, place))
        answer = b'{"model_name":"m","outputs":[%b],%b}' % (number, place)
        with pytest.raises(BadMessage, match="surrogates not allowed"):
            http.decode_response(answer, None)
    body = b'{"inputs":[%b],"id":"\\ud83d\\ude00"}' % number.replace(b"NaN", b"1")
    assert http.decode_request("m", "", body, None).id == "\U0001f600"


def test_msgspec_still_skips_without_recursion_limits_of_its_own() -> None:
    """The decoder counts on RecursionError: a C stack overflow would take the process down.

    Deep enough for every Python: from 3.14 on it counts the bytes of the stack that are left, not the calls.
    """
    with pytest.raises(RecursionError):
        msgspec.json.decode(b"[" * 1_000_000, type=msgspec.Raw)


@pytest.mark.parametrize(
    ("data", "count", "hint"),
    [
        ("1", (1 << 17) - 10, "has 1 elements"),  # not too many: refused for its shape
        ("1", 1 << 17, "values, at most 131072"),
        ("NaN", 1 << 17, "values, at most 131072"),
        ("[1]", 1 << 16, "lists and objects, at most 65536"),
    ],
)
def test_texts_that_would_keep_a_decoder_busy(data: str, count: int, hint: str) -> None:
    one = {"name": "x", "shape": [1], "datatype": "FP32", "data": []}
    text = json.dumps({"inputs": [one]}).replace("[]", f"[{','.join([data] * count)}]")
    with pytest.raises(BadMessage, match=hint):
        http.decode_request("m", "", text.encode().ljust(1 << 20), None)
