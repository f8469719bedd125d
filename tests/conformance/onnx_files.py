"""A model every backend suite can open: y = x + x, FP32 [-1, 4]."""

from onnx import TensorProto, helper

_X, _Y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4]) for name in "xy")
_GRAPH = helper.make_graph([helper.make_node("Add", ["x", "x"], ["y"])], "g", [_X], [_Y])
DOUBLE: bytes = helper.make_model(_GRAPH, opset_imports=[helper.make_opsetid("", 17)], ir_version=9).SerializeToString()
