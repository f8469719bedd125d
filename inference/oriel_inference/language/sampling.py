"""Reads the sampling parameters of a request; refuses by name the ones that are wrong or that no engine here has."""

from collections.abc import Mapping

import msgspec

from oriel_inference.errors import InvalidRequest
from oriel_inference.language.engine import Sampling
from oriel_inference.language.guides import check_guide
from oriel_wire.v2.messages import ParameterValue

MAX_TEXT_BYTES = 256 << 10
_NAMES = frozenset(field.name for field in msgspec.structs.fields(Sampling))
_NOT_SERVED = {
    "n": "send the request once for each answer",
    "best_of": "send the request once for each answer",
    "logit_bias": "the engine has no such setting",
    "prompt_logprobs": "the engine computes none",
}


def read_sampling(given: bytes | Mapping[str, ParameterValue]) -> Sampling:
    """Return the sampling parameters of a request. Raises InvalidRequest that names the parameter.

    given: the JSON object of the input `sampling_parameters`, or the parameters of the request, of which those with
    other names are somebody else's. Numbers and truth values may be texts, as Triton's clients send them.
    """
    if isinstance(given, bytes):
        values = _object(given)
    else:
        values = {name: value for name, value in given.items() if name in _NAMES or name in _NOT_SERVED}
    for name, why in _NOT_SERVED.items():
        if name in values and str(values.pop(name)) != "1":
            raise InvalidRequest(f"sampling parameter {name!r} is not served: {why}")
    if isinstance(stop := values.get("stop"), str):
        values["stop"] = (stop,)
    try:
        sampling = msgspec.convert(values, Sampling, strict=False)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$.")
        name = path.removesuffix("`")
        where = f"sampling parameter {name!r}" if name else "sampling_parameters"
        raise InvalidRequest(f"{where}: {problem[:200]} (known: {', '.join(sorted(_NAMES))})") from error
    if sampling.guide is not None:
        check_guide(sampling.guide)
    return sampling


def _object(text: bytes) -> dict[str, object]:
    if len(text) > MAX_TEXT_BYTES:
        raise InvalidRequest(f"sampling_parameters has {len(text)} bytes, at most {MAX_TEXT_BYTES} are allowed")
    try:
        found = msgspec.json.decode(text, type=dict[str, object])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"sampling_parameters must be a JSON object: {str(error)[:200]}") from error
    return {name: value for name, value in found.items() if value is not None}
