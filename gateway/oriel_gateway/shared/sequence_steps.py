"""Reads which step of which sequence a request is, on routes whose models keep sequences.

JSON is read up to `READ_BYTES`: behind it, a binary request has its tensors. Only the parameters of a message over gRPC
are read. A request that is no step, or is malformed, goes to any endpoint, and its server judges it. But servers that
do not know tenants get no request whose id they might read otherwise: Triton takes the first of two members of a name,
cuts an id at a NUL, counts modulo 2^64, and accepts NaN, a mark of the byte order and bytes that are no UTF-8.
"""

import re
from time import monotonic

import msgspec
from google.protobuf.message import DecodeError

from oriel_gateway.call.contracts import Call
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.pools.sequences import Stick
from oriel_wire.errors import BadMessage
from oriel_wire.v2.grpc_names import peek_parameters
from oriel_wire.v2.proto import v2_pb2

READ_BYTES = 1024 * 1024
MAX_ID = 128  # characters; servers refuse longer ones
_PLAIN = b'"sequence_id"'
_NAMES = re.compile(b'"' + b"".join(b"(?:%c|\\\\u00(?i:%02x))" % (each, each) for each in _PLAIN[1:-1]) + b'"')


class _Flags(msgspec.Struct):
    """The flags of a step: parameters of `infer`, parameters or members of `generate`."""

    sequence_id: int | str | None = None
    sequence_start: bool = False
    sequence_end: bool = False
    parameters: "_Flags | None" = None


_decode = msgspec.json.Decoder(_Flags).decode


def find_sequence(call: Call) -> None:
    """Let a call that is a step of a sequence stick to the endpoint with its state. Raises Refused."""
    call.stick = _step(call, _in_message(call, call.body()) if call.side.grpc else _in_json(call), call.target.sought)
    if call.stick is not None:
        call.endpoints.sequences.find(call.stick, monotonic())


def follow_sequence(call: Call, message: bytes, model: str) -> None:
    """Note the step that a further message of a stream is; its sequence lives at the stream's endpoint. Raises Refused.

    model: the name by which endpoints are asked for its model, see `Target.sought`.
    """
    endpoint, sequences, now = call.endpoint, call.endpoints.sequences, monotonic()
    step = _step(call, _in_message(call, message), model)
    if step is None or endpoint is None:
        return
    sequences.find(step, now)
    if step.home is not None and step.home is not endpoint:
        why = "this sequence lives on another server than this stream: send its steps on a stream of their own"
        raise Refused(Outcome.INVALID_REQUEST, why)
    sequences.place(step, endpoint, now)
    if step.end:
        sequences.forget(step.key)


def _step(call: Call, flags: _Flags, model: str) -> Stick | None:
    sequence = flags.sequence_id
    if len(str(sequence)) > MAX_ID or "\0" in str(sequence):
        _doubt(call)
        return None
    if isinstance(sequence, int):
        sequence %= 1 << 64
    if not sequence:
        return None
    # a number and a text of the same digits are two sequences
    return Stick(f"{model}\0{sequence!r}", call.tenant, start=flags.sequence_start, end=flags.sequence_end)


def _in_json(call: Call) -> _Flags:
    """Return the flags in the body of an HTTP request. Raises Refused if it is too large, or has an encoding."""
    if (call.head.get("content-encoding") or "identity").strip().lower() != "identity":
        raise Refused(Outcome.ENCODING_UNSUPPORTED, "send the body without a content encoding: its sequence is read")
    length, body = call.head.get("inference-header-content-length") or "", call.body()
    if length.isdecimal() and len(length) < 12:
        body = body[: int(length)]
    # Without a backslash no letter of the name is escaped; looking for the escapes themselves takes 10 times as long.
    if _PLAIN not in body and (call.endpoints.sequences.apart or b"\\" not in body):
        return _Flags()
    if len(body) > READ_BYTES:
        message = f"the JSON of a step of a sequence may have {READ_BYTES} bytes: send its tensors as binary data"
        raise Refused(Outcome.TOO_LARGE, message)
    try:
        found = _decode(body)
        flags = next((each for each in (found.parameters, found) if each and each.sequence_id is not None), _Flags())
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        flags = _Flags()
    if len(_NAMES.split(body, 2)) != 1 + (flags.sequence_id is not None):
        _doubt(call)
    return flags


def _in_message(call: Call, message: bytes) -> _Flags:
    """Return the flags in a message over gRPC. Raises Refused if its parameters are too large."""
    try:
        found = v2_pb2.ModelInferRequest.FromString(peek_parameters(message)).parameters
        flags = {name: getattr(one, one.WhichOneof("parameter_choice") or "bool_param") for name, one in found.items()}
        return msgspec.convert(flags, _Flags)
    except BadMessage as error:
        raise Refused(Outcome.INVALID_REQUEST, error.message) from error
    except (DecodeError, msgspec.ValidationError):
        _doubt(call)
        return _Flags()


def _doubt(call: Call) -> None:
    """Refuse a request whose id the servers may read otherwise, unless they know tenants. Raises Refused."""
    if not call.endpoints.sequences.apart:
        why = "its sequence_id cannot be read for sure: give it once, in parameters, as an int64 or a text without NUL"
        raise Refused(Outcome.INVALID_REQUEST, why)
