import json
from typing import Any

import numpy as np
import pytest

from oriel_wire.errors import BadMessage
from oriel_wire.v2 import document, http
from oriel_wire.v2.messages import MAX_TENSORS, InferRequest, InferResponse, RequestedOutput, Tensor, tensor


def request_body(**members: Any) -> bytes:
    return json.dumps(members).encode()


def x(**changes: Any) -> dict[str, Any]:
    return {"name": "x", "shape": [2], "datatype": "FP32", "data": [1, 2.5]} | changes


def test_integers_are_numbers_in_a_float_tensor() -> None:
    got = http.decode_request("m", "1", request_body(inputs=[x()], id="7", parameters={"priority": 2}), None)
    assert (got.model_name, got.model_version, got.id, got.parameters) == ("m", "1", "7", {"priority": 2})
    assert got.outputs is None
    assert not got.binary_default
    assert got.inputs[0].array.dtype == np.float32
    assert got.inputs[0].array.tolist() == [1, 2.5]


def test_members_that_are_null_or_unknown_are_left_alone() -> None:
    body = request_body(inputs=[x(parameters=None)], id=None, parameters=None, outputs=None, extra={"a": [1]})
    got = http.decode_request("m", "", body, None)
    assert (got.id, got.parameters, got.outputs) == ("", {}, None)


def test_empty_outputs_mean_all_of_them() -> None:
    assert http.decode_request("m", "", request_body(inputs=[x()], outputs=[]), None).outputs is None


def test_output_parameters_become_fields() -> None:
    body = request_body(
        inputs=[x()],
        parameters={"binary_data_output": True},
        outputs=[
            {"name": "a", "parameters": {"binary_data": False, "classification": 3, "own": "kept"}},
            {"name": "b"},
        ],
    )
    got = http.decode_request("m", "", body, None)
    assert got.parameters == {}
    assert got.binary_default
    assert got.outputs == [RequestedOutput("a", False, 3, {"own": "kept"}), RequestedOutput("b", True)]


@pytest.mark.parametrize(("datatype", "value"), [("INT64", 123), ("BYTES", "hello")])
def test_data_may_be_nested_deeper_than_its_shape_in_lists_of_one(datatype: str, value: object) -> None:
    data = json.loads("[" * 50 + json.dumps(value) + "]" * 50)
    body = json.dumps({"inputs": [{"name": "x", "datatype": datatype, "shape": [1, 1], "data": data}]}).encode()
    assert http.decode_request("m", "", body, None).inputs[0].shape == (1, 1)


def test_pretty_printed_nested_data() -> None:
    shape = [1] * 8 + [2]
    data: Any = [1, 2]
    for _ in range(8):
        data = [data]
    body = json.dumps({"inputs": [x(shape=shape, data=data)]}, indent=40).encode()
    assert http.decode_request("m", "", body, None).inputs[0].array.shape == tuple(shape)


@pytest.mark.parametrize(("shape", "data"), [([0], []), ([0, 3], []), ([2, 0], [[], []]), ([], [5])])
def test_empty_and_scalar_shapes(shape: list[int], data: list[Any]) -> None:
    got = http.decode_request("m", "", request_body(inputs=[x(shape=shape, data=data)]), None)
    assert got.inputs[0].array.shape == tuple(shape)


def test_nan_and_infinities_as_other_servers_write_them() -> None:
    array = np.array([np.nan, np.inf, -np.inf, 1.5], np.float32)
    response = InferResponse(model_name="m", outputs=[tensor("y", array), tensor("s", [b"NaN"])])
    [body], header_length = http.encode_response(response, InferRequest(model_name="m"))
    assert header_length is None
    assert json.loads(body)["outputs"][0]["data"][1:] == [np.inf, -np.inf, 1.5]
    outputs = http.decode_response(body, None).outputs
    assert np.array_equal(outputs[0].array, array, equal_nan=True)
    assert outputs[1].array.tolist() == [b"NaN"]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ([1, float("nan"), 3, float("inf")], "'x': data holds NaN at position 1, "),
        ([1, 2, float("-inf"), 4], "'x': data holds -Infinity at position 2, "),
        ([[1, 2], [3, float("inf")]], "'x': data holds Infinity at position 3, "),
    ],
)
def test_nan_and_infinities_in_a_request_are_refused_where_they_are(data: list[Any], said: str) -> None:
    for inputs in ([x(shape=[2, 2], data=data)], [x(name="w"), x(shape=[2, 2], data=data)]):
        with pytest.raises(BadMessage, match="send the tensor as binary data") as caught:
            http.decode_request("m", "", request_body(inputs=inputs), None)
        assert said in caught.value.message
    with pytest.raises(BadMessage, match="it holds NaN, which is no JSON number"):
        http.decode_request("m", "", request_body(inputs=[x()], parameters={"a": float("nan")}), None)


def test_each_output_travels_as_it_was_asked_for() -> None:
    outputs = [{"name": "a"}, {"name": "b", "parameters": {"binary_data": True}}]
    request = http.decode_request("m", "", request_body(inputs=[x()], outputs=outputs), None)
    response = InferResponse(
        model_name="m",
        model_version="2",
        id="q",
        outputs=[tensor("a", np.arange(3)), tensor("b", np.array([[1.5]], np.float16))],
    )
    parts, header_length = http.encode_response(response, request)
    assert header_length == len(parts[0])
    assert header_length % 16 == 0
    document = json.loads(parts[0])
    assert (document["model_name"], document["model_version"], document["id"]) == ("m", "2", "q")
    assert document["outputs"] == [
        {"name": "a", "datatype": "INT64", "shape": [3], "data": [0, 1, 2]},
        {"name": "b", "datatype": "FP16", "shape": [1, 1], "parameters": {"binary_data_size": 2}},
    ]
    assert bytes(parts[1]) == np.float16(1.5).tobytes()


@pytest.mark.parametrize(
    ("array", "datatype", "hint"),
    [
        (np.zeros(1, np.float16), "FP16", "FP16 cannot travel as JSON, ask for it as binary data"),
        (np.zeros(1, np.uint16), "BF16", "BF16 cannot travel as JSON, ask for it as binary data"),
        (np.array([b"\xff"], dtype=object), "BYTES", "not UTF-8 text, ask for it as binary data"),
        (np.zeros(1), "FP32", "FP32 needs an array of float32, not float64"),
    ],
)
def test_output_that_cannot_travel_as_json_says_what_to_do(array: np.ndarray, datatype: str, hint: str) -> None:
    response = InferResponse(model_name="m", outputs=[Tensor("y", datatype, array.shape, array)])
    with pytest.raises(BadMessage, match=f"output 'y': .*{hint}"):
        http.encode_response(response, InferRequest(model_name="m"))


def test_array_must_have_the_shape_it_claims() -> None:
    wrong = Tensor("y", "FP32", (3,), np.zeros(2, np.float32))
    for binary in (True, False):
        with pytest.raises(BadMessage, match=r"its shape is \[3\], its array has \[2\]"):
            http.encode_request(InferRequest(model_name="m", inputs=[wrong]), binary=binary)


def test_response_parts_are_views_of_the_arrays() -> None:
    array = np.arange(4, dtype=np.float32)
    response = InferResponse(model_name="m", outputs=[tensor("y", array)])
    parts, _ = http.encode_response(response, InferRequest(model_name="m", binary_default=True))
    assert np.shares_memory(np.frombuffer(parts[1], np.uint8), array)


def test_arrays_that_are_not_contiguous_are_written_in_order() -> None:
    array = np.arange(6, dtype=np.int32).reshape(2, 3).T
    parts, header_length = http.encode_request(InferRequest(model_name="m", inputs=[tensor("x", array)]))
    got = http.decode_request("m", "", b"".join(parts), header_length).inputs[0]
    assert got.array.tolist() == array.tolist()


class TestRaw:
    def test_body_takes_the_shape_of_the_model(self) -> None:
        values = np.arange(6, dtype=np.float32)
        request = http.decode_request("m", "", values.tobytes(), 0)
        http.resolve_raw(request, name="x", datatype="FP32", shape=[1, -1, 2])
        [got] = request.inputs
        assert (got.name, got.datatype, got.shape) == ("x", "FP32", (1, 3, 2))
        assert np.array_equal(got.array.reshape(-1), values)
        assert request.binary_default
        assert request.outputs is None

    def test_bytes_are_one_element(self) -> None:
        request = http.decode_request("m", "", b"any \xff text", 0)
        http.resolve_raw(request, name="x", datatype="BYTES", shape=[1, 1])
        assert request.inputs[0].array.tolist() == [[b"any \xff text"]]

    def test_empty_body(self) -> None:
        request = http.decode_request("m", "", b"", 0)
        http.resolve_raw(request, name="x", datatype="FP32", shape=[1, -1])
        assert request.inputs[0].shape == (1, 0)

    @pytest.mark.parametrize(
        ("body", "datatype", "shape", "hint"),
        [
            (b"1234567", "FP32", [1, -1], r"7 bytes do not fill FP32 \[1, -1\]"),
            (b"12345678", "FP32", [1, 3], r"8 bytes do not fill FP32 \[1, 3\]"),
            (b"12345678", "FP32", [-1, -1], "more than one variable-sized dimension"),
            (b"12345678", "FP32", [0, -1], "do not fill"),
            (b"12345678", "BYTES", [1, 2], "must have input shape \\[1\\], not"),
            (b"427", "BYTES", [1, -1], "must have input shape \\[1\\], not"),
        ],
    )
    def test_bodies_that_do_not_fit(self, body: bytes, datatype: str, shape: list[int], hint: str) -> None:
        request = http.decode_request("m", "", body, 0)
        with pytest.raises(BadMessage, match=f"input 'x'.*{hint}"):
            http.resolve_raw(request, name="x", datatype=datatype, shape=shape)


@pytest.mark.parametrize(("value", "length"), [(None, None), ("0", 0), ("17", 17)])
def test_header_length(value: str | None, length: int | None) -> None:
    assert http.parse_header_length(value) == length


@pytest.mark.parametrize("value", ["", "-1", "+1", "1_0", " 1", "1.0", "0x1", "\u0661", "9" * 20, "9" * 5000])
def test_header_length_that_is_no_number(value: str) -> None:
    with pytest.raises(BadMessage, match="whole number"):
        http.parse_header_length(value)


NUMBERS = [round(0.37 * n - 900, 3) for n in range(5000)]
LISTS: dict[str, list[dict[str, Any]]] = {
    "flat": [x(shape=[5000], data=NUMBERS)],
    "nested": [x(shape=[2, 50, 50], data=np.array(NUMBERS).reshape(2, 50, 50).tolist())],
    "several": [
        x(shape=[5000], data=NUMBERS),
        x(name="y", shape=[2], datatype="INT8", data=[1, -1]),
        x(name="z", shape=[5000, 1], datatype="INT32", data=list(range(5000))),
        x(name="t", shape=[1], datatype="BYTES", data=['"data": [1, 2]}']),
    ],
    "mixed kinds of numbers": [x(shape=[5000], datatype="FP64", data=[n if n % 2 else n / 7 for n in range(5000)])],
    "extremes": [x(shape=[5000], datatype="FP64", data=[1e308, -5e-324, 2**70, 0, -0.0] * 1000)],
    "of another kind": [x(shape=[5000], datatype="INT32", data=NUMBERS)],
    "a truth value": [x(shape=[5001], data=[*NUMBERS, True])],
    "a text": [x(shape=[5001], data=[*NUMBERS, "]"])],
    "an object": [x(shape=[5001], data=[*NUMBERS, {"data": NUMBERS}])],
    "too few": [x(shape=[5001], data=NUMBERS)],
    "uneven": [x(shape=[2, 2500], data=[NUMBERS[:2400], NUMBERS[2400:]])],
    "too large": [x(shape=[5000], data=[1e39, *NUMBERS[1:]])],
    "NaN": [x(shape=[5000], data=[*NUMBERS[1:], float("nan")])],
    "without shape": [{"name": "x", "datatype": "FP32", "data": NUMBERS}],
    "elsewhere": [x(shape=[1], data=[1], more={"data": NUMBERS})],
    "in a parameter": [x(shape=[1], data=[1], parameters={"data": NUMBERS})],
    "a mark": [x(shape=[5000], data=NUMBERS), x(name="y", shape=[1], datatype="BYTES", data=["\0" + "0"])],
}


@pytest.mark.parametrize("inputs", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize("layout", [{"separators": (",", ":")}, {"indent": 1}], ids=["dense", "indented"])
def test_long_lists_are_read_apart_and_nothing_else_changes(
    inputs: list[dict[str, Any]], layout: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = json.dumps({"inputs": inputs, "id": '\\"data":[1]', "parameters": {"p": 1}}, **layout).encode()
    usual = document.CUT_BYTES
    for broken in (text, text[:-9], text.replace(b"-900", b"-0900"), text.replace(b"900", b"9OO"), text + b"]"):
        whole = read_with(broken, 1 << 30, monkeypatch)
        assert read_with(broken, 0, monkeypatch) == read_with(broken, usual, monkeypatch) == whole


def read_with(text: bytes, cut_bytes: int, monkeypatch: pytest.MonkeyPatch) -> object:
    """Return the request that a text holds, or the sentence that refuses it.

    cut_bytes: lists with fewer bytes are not read apart.
    """
    monkeypatch.setattr(document, "CUT_BYTES", cut_bytes)
    try:
        parts, length = http.to_binary_request(text, None, model="m")
    except BadMessage as error:
        return error.message
    return b"".join(parts), length


def test_data_given_twice_counts_once_and_the_last_one() -> None:
    first, last = json.dumps(NUMBERS), json.dumps(NUMBERS[::-1])
    text = json.dumps({"inputs": [x(shape=[5000], data="here")]}).replace('"here"', f'{first}, "data": {last}')
    array = http.decode_request("m", "", text.encode(), None).inputs[0].array
    np.testing.assert_array_equal(array, np.array(NUMBERS[::-1], np.float32))


def test_a_long_list_is_no_part_of_the_text_that_is_read_whole() -> None:
    """Skipping the list to find its end took half as long as reading it."""
    rest, lists = document.cut(json.dumps({"inputs": LISTS["several"]}).encode())
    assert len(rest) < 400 and [len(memoryview(each)) for each in lists] == [
        len(json.dumps(NUMBERS)),
        len(json.dumps(list(range(5000)))),
    ]


@pytest.mark.parametrize("text", [b'"data":[' * 500_000, b'"data":[' * 500_000 + b"}", b'"data":[1,' * 400_000])
def test_a_text_of_many_beginnings_is_searched_once(text: bytes) -> None:
    assert document.cut(text) == (text, [])


def test_no_more_beginnings_are_looked_at_than_a_text_may_have_tensors() -> None:
    """1 MiB of `"data"` held up the loop for 60 ms."""
    last = b'"data": %b}' % json.dumps(NUMBERS).encode()
    assert document.cut(b'"data" ' * (MAX_TENSORS - 1) + last)[1]
    text = b'"data" ' * MAX_TENSORS + last
    assert document.cut(text) == (text, [])
