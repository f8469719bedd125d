"""Reads the signatures of a TensorFlow SavedModel. OpenVINO runs `serving_default`; without one of that name it would
join all signatures to one model.
"""

from functools import cache
from pathlib import Path
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.text_format import Parse

from oriel_inference.errors import LoadFailed

SAVED_MODEL = "saved_model.pb"
DEFAULT = "serving_default"
_INITIALISER = "__saved_model_init_op"
_SHOWN = 8
# The part of TensorFlow's public saved_model.proto that holds signatures.
_PROTO = """
name: "saved_model.proto" package: "signatures" syntax: "proto3"
message_type { name: "SavedModel"
  field { name: "graphs" number: 2 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: ".signatures.Graph" } }
message_type { name: "Graph"
  field { name: "entries" number: 5 label: LABEL_REPEATED type: TYPE_MESSAGE type_name: ".signatures.Entry" } }
message_type { name: "Entry"
  field { name: "name" number: 1 label: LABEL_OPTIONAL type: TYPE_STRING }
  field { name: "signature" number: 2 label: LABEL_OPTIONAL type: TYPE_BYTES } }
"""


def check_signature(path: Path, wanted: str) -> None:
    """Raise LoadFailed unless OpenVINO would run the signature `wanted` of a SavedModel, or the default one if that
    is "".
    """
    try:
        model = _message().FromString(path.read_bytes())
    except DecodeError as error:
        raise LoadFailed(f"{SAVED_MODEL} is not a SavedModel, or not a whole one: save it anew") from error
    names = sorted({entry.name for graph in model.graphs for entry in graph.entries} - {_INITIALISER})
    runs = DEFAULT if DEFAULT in names else names[0] if len(names) == 1 else ""
    if names and (not runs or runs != (wanted or runs)):
        shown = ", ".join(name[:64] for name in names[:_SHOWN])
        reason = f"OpenVINO runs the only signature or {DEFAULT!r}, and the SavedModel has {shown}"
        raise LoadFailed(f"{reason}: save it anew with signatures={{{DEFAULT!r}: ...}}")


@cache
def _message() -> Any:
    pool = DescriptorPool()
    pool.Add(Parse(_PROTO, FileDescriptorProto()))
    return GetMessageClass(pool.FindMessageTypeByName("signatures.SavedModel"))
