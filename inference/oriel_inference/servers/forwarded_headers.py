"""Headers of calls that models get as parameters, by Triton's flags `--http-header-forward-pattern` and
`--grpc-header-forward-pattern`.
"""

import argparse
import re
from collections.abc import Iterable, Mapping

from oriel_inference.servers.restrictions import Restriction
from oriel_wire.h1.request import RequestHead
from oriel_wire.h2.known_fields import Field
from oriel_wire.v2.messages import ParameterValue

MAX_NAME = 64  # longer names are not given to the pattern, whose time grows with the third power of their length
# Python's time for a group that repeats can double with each character of a name that a client chooses.
_SLOW = re.compile(r"\)[*+{]|[*+{][^|]*[*+{][^|]*[*+{]")
# Parameters that the server itself acts upon.
_RESERVED = frozenset(
    ("sequence_id", "sequence_start", "sequence_end", "priority", "timeout", "scan", "binary_data_output")
)
_PRIVATE = ("triton_", "x-oriel-", ":")


def header_pattern(text: str) -> re.Pattern[str] | None:
    """Convert the value of a flag; None for an empty one. Upper and lower case are alike unless it begins with
    `(?-i)`.
    """
    exact = text.startswith("(?-i)")
    if _SLOW.search(text):
        why = "repeats a group, or has more than two repetitions: clients could keep the server busy with long names"
        raise argparse.ArgumentTypeError(f"{text[:80]!r} {why}")
    try:
        return re.compile(text.removeprefix("(?-i)"), 0 if exact else re.IGNORECASE) if text else None
    except re.error as error:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a regular expression: {error}") from error


class ForwardedHeaders:
    """Chooses headers by their names. restrictions: their secrets are never forwarded."""

    def __init__(self, pattern: re.Pattern[str], restrictions: Iterable[Restriction]) -> None:
        self._pattern = pattern
        self._hidden = frozenset(each.header.lower() for each in restrictions)

    def of_head(self, head: RequestHead) -> dict[str, ParameterValue]:
        """Return the parameters of an HTTP request. Names are spelled as the client did."""
        named = ((each.line.partition(b":")[0].decode("ascii") or each.name, each.value) for each in head.fields)
        return self._chosen(named)

    def of_call(self, fields: Iterable[Field], own: Mapping[str, str]) -> dict[str, ParameterValue]:
        """Return the parameters of a gRPC call. own: the metadata of this call alone."""
        return self._chosen((*((name.decode(), value.decode("latin-1")) for name, value in fields), *own.items()))

    def _chosen(self, named: Iterable[tuple[str, str]]) -> dict[str, ParameterValue]:
        return {
            name: value
            for name, value in named
            if len(name) <= MAX_NAME
            and self._pattern.search(name)
            and name not in _RESERVED
            and (lower := name.lower()) not in self._hidden
            and not lower.startswith(_PRIVATE)
        }
