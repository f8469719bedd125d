"""Finds who sent a request: by a key or a token, on the internal port by a ticket."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mypy_extensions import mypyc_attr

from oriel_gateway.identity.keys import identify, still_valid
from oriel_gateway.identity.tickets import Tickets
from oriel_policies.documents import ApiKey, Snapshot
from oriel_wire.h1.request import Field, LineMemo

if TYPE_CHECKING:
    from oriel_gateway.identity.tokens import Tokens

__all__ = ["Callers"]

# Bound on callers that are recognised: one that writes its key with ever other blanks can be all of them, 1 KiB each.
MOST_KNOWN = 256 * 1024


@mypyc_attr(allow_interpreted_subclasses=True)
class Callers:
    """Identifies the senders of requests. Single writer: the gateway's loop.

    snapshot: the documents in force. tokens: the verifier of tokens; None if the documents name no issuers.
    internal: the memo of the port that takes tickets and nothing else; None without such a port.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self.tokens: Tokens | None = None
        self.tickets: Tickets | None = None
        self.internal: LineMemo | None = None

    def identify(self, fields: Sequence[Field] | None, memo: LineMemo) -> ApiKey:
        """Return the key behind parsed header lines; a line that was seen before is recognised by its hash."""
        if fields is not None and len(fields) == 1 and (owner := fields[0].owner) is not None:
            known: ApiKey = owner
            return still_valid(known)
        # A recognised line keeps neither name nor value: two credentials are refused before they are read.
        credentials = [(field.name, field.value) for field in fields or ()]
        if memo is self.internal and self.tickets is not None:
            return self.tickets.identify(credentials, self.snapshot)  # not kept: each request has another one
        key = self.of(credentials)
        assert fields is not None
        memo.keep_credential(fields[0].line, key, self.most_known)
        return key

    @property
    def most_known(self) -> int:
        """Return how many callers are recognised at the same time: all keys, each with heads of four shapes, at most
        `MOST_KNOWN`.
        """
        return min(4 * len(self.snapshot.keys), MOST_KNOWN)

    def of(self, credentials: Sequence[tuple[str, str]]) -> ApiKey:
        """Return the key behind these credentials; see `keys.identify`."""
        return identify(credentials, self.snapshot, None if self.tokens is None else self.tokens.verify)
