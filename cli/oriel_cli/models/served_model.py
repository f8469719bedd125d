"""A model of a running v2 server in the form of a session, so that its answers can be compared: one request per run."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

import httpx

from oriel_wire.errors import WireError
from oriel_wire.v2.http import decode_response, encode_request, parse_header_length
from oriel_wire.v2.messages import InferRequest, RequestedOutput, tensor

_LENGTH = "inference-header-content-length"


class ServedModel:
    """One version of a model.

    inputs, outputs: its tensors, as the reference has them. A run blocks. It raises BackendFailed, whatever is wrong
    with the answer.
    """

    provider = "HTTP"

    def __init__(
        self, client: httpx.Client, model: str, version: int, inputs: Sequence[Any], outputs: Sequence[Any]
    ) -> None:
        self._client = client
        self._model = model
        self._path = f"/v2/models/{quote(model, safe='')}/versions/{version}/infer"
        self._datatypes = {each.name: each.datatype for each in inputs}
        self.inputs = inputs
        self.outputs = outputs

    def run(self, inputs: Mapping[str, Any], outputs: Sequence[str]) -> list[Any]:
        from oriel_inference.errors import BackendFailed

        try:
            request = InferRequest(
                model_name=self._model,
                inputs=[tensor(name, array, self._datatypes[name]) for name, array in inputs.items()],
                outputs=[RequestedOutput(name, binary=True) for name in outputs],
            )
            parts, length = encode_request(request)
            headers = {} if length is None else {_LENGTH: str(length)}
            answer = self._client.post(self._path, content=b"".join(parts), headers=headers)
            if not answer.is_success:
                raise BackendFailed(f"the server answers {answer.status_code}: {answer.text[:300]}")
            found = decode_response(answer.content, parse_header_length(answer.headers.get(_LENGTH)))
        except httpx.HTTPError as error:
            raise BackendFailed(f"the server does not answer: {error}") from error
        except WireError as error:
            raise BackendFailed(f"the server's answer cannot be read: {error}") from error
        arrays = {each.name: each.array for each in found.outputs}
        if missing := [name for name in outputs if name not in arrays]:
            raise BackendFailed(f"the server's answer lacks output {missing[0][:64]!r}")
        return [arrays[name] for name in outputs]

    def close(self) -> None:
        """Do nothing: the client is the caller's."""
