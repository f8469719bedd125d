"""v2 tensors as a service's own input and answer: the bodies of the Open Inference protocol, JSON or binary."""

from collections.abc import Mapping

from oriel_logic.errors import InputTooLarge, Refused
from oriel_logic.messages import MAX_JSON_BYTES
from oriel_logic.models import Array

__all__ = ["HEADER_LENGTH", "Tensors", "decode", "encode"]

HEADER_LENGTH = "inference-header-content-length"


class Tensors(dict[str, Array]):
    """Arrays by name, as a v2 infer request carries them (its other fields are not kept)."""


def decode(body: bytes, headers: Mapping[str, str]) -> Tensors:
    """The inputs of a v2 infer request. Raises Refused with the codec's sentence. Arrays may be views of `body`."""
    from oriel_wire.errors import BadMessage, TooLarge
    from oriel_wire.v2.http import decode_request, parse_header_length

    try:
        length = parse_header_length(headers.get(HEADER_LENGTH))
        request = decode_request("", "", body, length, json_limit=MAX_JSON_BYTES)
    except TooLarge as error:
        raise InputTooLarge(str(error)) from error
    except BadMessage as error:
        raise Refused(str(error)) from error
    if length == 0:
        raise Refused("send tensors with a JSON part that names them and says their datatype and shape")
    return Tensors({each.name: each.array for each in request.inputs})


def encode(arrays: Mapping[str, Array], *, service: str, binary: bool) -> tuple[bytes, int | None]:
    """A v2 infer response and the length of its JSON part, None if it is JSON alone.

    Raises ValueError for what is no v2 tensor.
    """
    from oriel_wire.errors import BadMessage
    from oriel_wire.v2.http import encode_response
    from oriel_wire.v2.messages import InferRequest, InferResponse, RequestedOutput, tensor

    wanted = [RequestedOutput(name, binary=binary) for name in arrays]
    try:
        response = InferResponse(model_name=service, outputs=[tensor(name, array) for name, array in arrays.items()])
        parts, length = encode_response(response, InferRequest(model_name=service, inputs=[], outputs=wanted))
    except BadMessage as error:
        raise ValueError(str(error)) from error
    return b"".join(parts), length
