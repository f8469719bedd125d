"""Gives odd values to the names of pb_utils, as its text says: [name, arguments, [method, arguments] ...].

The arguments are indexes into VALUES. The result is sent in whatever way it can be: as an answer, an error, or to
another model.
"""

import enum
import json

import numpy as np
import triton_python_backend_utils as pb_utils


class Silent:
    def __str__(self):
        raise ValueError("no text")

    __repr__ = __str__


class Name(str):
    def encode(self, *given):
        return 5


class Level(enum.IntEnum):
    ODD = 7


COMPLETE = '{"input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [4]}]}'
TENSOR = pb_utils.Tensor("said", np.array([[b"a tensor"]], dtype=object))
X = pb_utils.Tensor("x", np.ones((1, 4), np.float32))
VALUES = [
    None, True, 0, -1, 7, 20, 2**63, 2**64, -(2**70), 1.5, float("nan"), float("inf"), "", "said", "double", "y",
    "\udc80", "a\0b", "x" * 100_000, b"", b"double", b"said", b"\xff", bytearray(b"double"), Name("double"),
    Level.ODD, Silent(), [], [1], ["y"], [b"y"], ["\udc80"], [None], [Silent()], {}, {"a": 1}, {b"a": b"b"}, {1: 2},
    {"a": "\udc80"}, {"priority": -1}, {"timeout": "soon"}, {"sequence_id": -(2**63)}, {"a": np.float32(1)}, {"a":
    np.int64(3)}, {"a": Silent()}, {"a": Level.ODD}, {"a": 2**70}, {"a": float("nan")}, {"a": [1]}, np.float32(1),
    np.int64(3), np.str_("double"), np.bool_(True), np.array([1]), np.array([[b"x"]], object),
    np.array([[Silent()]], object), np.array([["\udc80"]], object), np.zeros((1,) * 40, np.float32), np.zeros((0,
    2**40), np.float32), np.broadcast_to(np.float32(1), (1 << 50,)), np.array("2020", "M8[s]"), np.zeros(1,
    "f4,i4"), np.ma.array([[1]], mask=True), np.array([["text"]]), TENSOR, [TENSOR], [X], [TENSOR, 5], (X,),
    pb_utils.InferenceResponse([TENSOR]), pb_utils.TritonError("odd"), [TENSOR] * 3, '{"input": 5}', COMPLETE,
    Exception, Silent,
]  # fmt: skip


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in list(requests):
            name, given, *then = json.loads(request.inputs()[0].as_numpy().flat[0])
            try:
                answers.append(self.one(requests, request, name, given, then))
            except Exception as error:
                if name == "raised":
                    raise
                answers.append(said(type(error).__name__))
        return answers

    def one(self, requests, request, name, given, then):
        found = {
            "request": request,
            "requests": requests,
            "sender": request.get_response_sender(),
            "responses": pb_utils.InferenceResponse([TENSOR]),
            "asking": pb_utils.InferenceRequest(model_name="double", requested_output_names=["y"], inputs=[X]),
        }.get(name) or getattr(pb_utils, name, None)
        if name == "raised":
            raise pb_utils.TritonModelException(*[VALUES[each] for each in given])
        if isinstance(found, type) or not then and callable(found):
            found = found(*[VALUES[each] for each in given])
        for method, values in then:
            called = getattr(found, method)
            result = called(*[VALUES[each] for each in values]) if callable(called) else called
            found = result if result is not None else found
        if isinstance(found, list) and found is not requests:
            found.append(VALUES[given[0]] if given else b"\xff")
        if isinstance(found, pb_utils.InferenceRequest) and found is not request:
            found.requested_output_names().extend(VALUES[each] for each in given[:1])
            found = found.exec()
            return said(found.error() if found.has_error() else found.output_tensors())
        if isinstance(found, pb_utils.InferenceResponse):
            return found
        if isinstance(found, pb_utils.TritonError):
            return pb_utils.InferenceResponse(error=found)
        if isinstance(found, pb_utils.Tensor):
            return pb_utils.InferenceResponse([found])
        pb_utils.Logger.log(found)
        return said("done")


def said(text):
    array = np.array([[str(text)[:200].encode(errors="replace")]], dtype=object)
    return pb_utils.InferenceResponse([pb_utils.Tensor("said", array)])
