"""Filters the answer of `/v1/models` for tenants that may not use every model: it is read as a whole first."""

from oriel_gateway.call.contracts import Call
from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.identity.named_models import filtered, unknown_model
from oriel_wire.h1.response import ResponseHead

LISTED_BYTES = 1024 * 1024  # largest list that is read from a server
ACCEPT_JSON = b"accept: application/json\r\n"  # all that the server gets of the client's head: no encoding, no range


class ModelList:
    """Receives the answer of one call, and gives the call the filtered list for its client."""

    def __init__(self) -> None:
        self._filtered = False  # True once the call gets the filtered list, which is for its client
        self._head: ResponseHead | None = None
        self._parts: list[bytes] = []
        self._size = 0

    def response(self, call: Call, head: ResponseHead, data: bytes, complete: bool) -> bool:
        """The upstream's head came. Errors are passed on; of a HEAD the length would tell how many models there are."""
        if self._filtered or head.status >= 300:
            return False
        if head.status != 200:
            _broken(call, "did not answer with a list")
        elif call.target.head_only:
            self._filtered = True
            call.response(_head_of(head, None), b"", complete)
        else:
            self._head, self._parts, self._size = head, [], 0
            self._gather(call, data, complete)
        return True

    def response_data(self, call: Call, data: bytes, complete: bool) -> bool:
        """More of the answer came."""
        if self._head is None:
            return False
        self._gather(call, data, complete)
        return True

    def refused(self, call: Call, refused: Refused) -> bool:
        """An error is for the client."""
        return False

    def finished(self, call: Call) -> None:
        """The call is over."""

    def _gather(self, call: Call, data: bytes, complete: bool) -> None:
        self._parts.append(data)
        self._size += len(data)
        if self._size > LISTED_BYTES:
            _broken(call, f"lists more than {LISTED_BYTES} bytes")
        elif complete:
            head, self._head = self._head, None
            assert head is not None
            try:
                body = filtered(b"".join(self._parts), call.tenant, entry=call.target.names == "entry")
            except (ValueError, RecursionError):
                _broken(call, "did not answer with a list")
                return
            if body is None:
                path = call.target.line.split(b" ")[1].partition(b"?")[0]
                call.refuse(unknown_model(path[len(b"/v1/models/") :].decode("ascii"), call.tenant))
            else:
                self._filtered = True
                call.response(_head_of(head, len(body)), body, True)


def _broken(call: Call, how: str) -> None:
    call.refuse(Refused(Outcome.UPSTREAM_BROKEN, f"the server of this path {how} of models", retry_after_s=1))


def _head_of(head: ResponseHead, length: int | None) -> ResponseHead:
    made = head.copy()
    made.forward = [head.forward[0], b"content-type: application/json"]
    made.content_length, made.chunked, made.dated = length, False, False
    return made
