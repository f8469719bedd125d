"""v2 tensors as a service's input and answer: bodies of the Open Inference protocol, JSON or binary."""

from collections.abc import Mapping

from oriel_logic.bodies.json import MAX_JSON_BYTES
from oriel_logic.client.models import Array
from oriel_logic.errors import InputTooLarge, Refused

HEADER_LENGTH = "inference-header-content-length"


class Tensors(dict[str, Array]):
    """Arrays by name, as in a v2 infer request; its other fields are dropped."""


def decode(body: bytes, headers: Mapping[str, str]) -> Tensors:
    """Decode a v2 infer request; arrays may be views of `body`. Raises Refused with the codec's text, or
    InputTooLarge.
    """
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
    """Encode a v2 infer response; return it with the length of its JSON part, None if all of it is JSON.

    Raises ValueError for an array that cannot be a v2 tensor.
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
