"""The lines of the usage ledger: what was used within one minute, and how long devices were busy in it. Pure.

A segment is a file of such lines, one JSON object each. Its name INSTANCE-SEQ never comes twice, so that the identity
of a line is INSTANCE-SEQ-LINE.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

MAX_LINE_BYTES = 4096
COUNTERS = ("requests", "rows", "device_ns", "cpu_ns", "bytes_in", "bytes_out", "tokens_in", "tokens_out")
_SEGMENT = re.compile(r"([A-Za-z0-9]{1,32})-([0-9]{1,12})\Z")


class UsageLine(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One line of the usage ledger.

    kind: "use" of a tenant, or of none; "seen": use that answers reported to a gateway, which the servers record as
    "use" themselves, so that it must not be added up; "device": the time of one device; "start" of a server, or its
    "stop"; "crash": the server ended without a stop, and what it used since it wrote last is missing: `wall_ns` is the
    time until the next server opened its folder.
    minute: its beginning in UTC, as "2026-11-24T17:05".
    unit: "gateway", "logic" or "inference".
    why: why nobody is charged; "" if the tenant is. target_kind: "model", "service" or "server" in lines of a gateway.
    estimated: True if the device time is an estimate, because the server does not report it.
    busy_ns, wall_ns: time in which the device was busy, and in which it was watched.
    open_ns: busy time that is not in any line yet, because a batch is charged when it ends.
    """

    kind: Literal["use", "seen", "device", "start", "stop", "crash"] = "use"
    minute: str
    unit: str
    tenant: str = ""
    tier: str = ""
    target: str = ""
    version: str = ""
    device: str = ""
    device_class: str = ""
    why: str = ""
    target_kind: str = ""
    estimated: bool = False
    requests: int = 0
    rows: int = 0
    device_ns: int = 0
    cpu_ns: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    busy_ns: int = 0
    wall_ns: int = 0
    open_ns: int = 0

    def name(self) -> tuple[str, ...]:
        """Return the fields in which lines must agree to be added up."""
        return tuple(str(getattr(self, name)) for name in _NAMES)


_NAMES = UsageLine.__struct_fields__[: UsageLine.__struct_fields__.index(COUNTERS[0])]


@dataclass(slots=True)
class LedgerCounts:
    """The number of things that went wrong with the usage ledger of one server.

    write_failures, ship_failures: failed tries to write lines, and to send a segment to the store; both are repeated.
    lost_lines: lines that were dropped because the folder could not be written for too long. lost_segments: sealed
    segments that were deleted because the folder was full.
    write_error: the folder and the reason why the latest try to write failed; "" if it succeeded.
    """

    write_error: str = ""
    write_failures: int = 0
    ship_failures: int = 0
    lost_lines: int = 0
    lost_segments: int = 0

    def families(self) -> Iterator[tuple[str, str, dict[str, int]]]:
        """Yield (name, description, label `what` -> count) of each counter of `/metrics`; names without `_total`."""
        failures = {"write": self.write_failures, "ship": self.ship_failures}
        yield "oriel_usage_ledger_failures", "Failed tries to write usage or to send it to its store.", failures
        lost = {"lines": self.lost_lines, "segments": self.lost_segments}
        yield "oriel_usage_ledger_lost", "Lines and segments of usage that were dropped for lack of room.", lost


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(UsageLine)


def encode_lines(lines: Iterable[UsageLine]) -> bytes:
    """Return the lines as text, each with its end."""
    return b"".join([_encoder.encode(line) + b"\n" for line in lines])


def decode_line(line: bytes) -> UsageLine | None:
    """Return a line; None if it is none, for example because a crash cut it off."""
    if len(line) > MAX_LINE_BYTES:
        return None
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None


def merge(lines: Iterable[UsageLine]) -> list[UsageLine]:
    """Add up the lines of the same name, in the order of their first ones. The last `open_ns` counts."""
    found: dict[tuple[str, ...], UsageLine] = {}
    merge_into(found, lines)
    return list(found.values())


def merge_into(found: dict[tuple[str, ...], UsageLine], lines: Iterable[UsageLine]) -> None:
    """Do what `merge` does, with the sums so far in `found`."""
    for line in lines:
        name = line.name()
        known = found.get(name)
        if known is None:
            found[name] = line
            continue
        sums = {each: getattr(known, each) + getattr(line, each) for each in (*COUNTERS, "busy_ns", "wall_ns")}
        found[name] = msgspec.structs.replace(known, open_ns=line.open_ns, **sums)


def segment_name(instance: str, sequence: int) -> str:
    """Return the name of a segment."""
    return f"{instance}-{sequence:08d}"


def parse_segment(name: str) -> tuple[str, int] | None:
    """Return instance and sequence number of a segment; None if that is not its name."""
    match = _SEGMENT.match(name)
    return None if match is None else (match[1], int(match[2]))


def missing(sequences: Mapping[str, set[int]]) -> list[str]:
    """Return the names of segments that are missing between others of their instance, at most 100."""
    found = []
    for instance, numbers in sorted(sequences.items()):
        for number in range(min(numbers), max(numbers)):
            if number not in numbers:
                found.append(segment_name(instance, number))
                if len(found) >= 100:
                    return found
    return found
