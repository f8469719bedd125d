"""`/v1/models` for tenants that may not use every model: the server's answer is read as a whole and filtered."""

from oriel_gateway.call import Call
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.named_models import filtered, unknown_model
from oriel_wire.h1_response import ResponseHead

__all__ = ["LISTED_BYTES", "ModelListCall"]

LISTED_BYTES = 1024 * 1024  # of a server's list
ASKED = b"accept: application/json\r\n"  # all that the server gets of the client's head: no encoding, no range


class ModelListCall(Call):
    """A call whose answer names models."""

    def response(self, head: ResponseHead, data: bytes, complete: bool) -> None:
        """The upstream's head. Errors are passed on; of a HEAD the length would tell how many models there are."""
        self._listed: ResponseHead | None = None
        self._parts: list[bytes] = []
        self._size = 0
        if head.status >= 300:
            super().response(head, data, complete)
        elif head.status != 200:
            self._broken("did not answer with a list")
        elif self.target.head_only:
            super().response(_head_of(head, None), b"", complete)
        else:
            self._listed = head
            self._gather(data, complete)

    def response_data(self, data: bytes, complete: bool) -> None:
        """More of the answer."""
        if self._listed is None:
            super().response_data(data, complete)
        else:
            self._gather(data, complete)

    def _gather(self, data: bytes, complete: bool) -> None:
        self._parts.append(data)
        self._size += len(data)
        if self._size > LISTED_BYTES:
            self._broken(f"lists more than {LISTED_BYTES} bytes")
        elif complete:
            head = self._listed
            assert head is not None
            self._listed = None
            self._connection = None
            try:
                body = filtered(b"".join(self._parts), self.tenant, entry=self.target.names == "entry")
            except (ValueError, RecursionError):
                self._broken("did not answer with a list")
                return
            if body is None:
                path = self.target.line.split(b" ")[1].partition(b"?")[0]
                self.refuse(unknown_model(path[len(b"/v1/models/") :].decode("ascii"), self.tenant))
            else:
                super().response(_head_of(head, len(body)), body, True)

    def _broken(self, how: str) -> None:
        self.refuse(Refused(Outcome.UPSTREAM_BROKEN, f"the server of this path {how} of models", retry_after_s=1))


def _head_of(head: ResponseHead, length: int | None) -> ResponseHead:
    made = head.copy()
    made.forward = [head.forward[0], b"content-type: application/json"]
    made.content_length, made.chunked, made.dated = length, False, False
    return made
