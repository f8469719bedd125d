"""Decides at its beginning whether a trace is kept, by the trace's own id. Pure.

The last 56 bits of a trace id are random. A trace is kept if they are at least a threshold, T = (1 - ratio) x 2^56, so
every server with the same ratio decides the same without asking. The unit that kept it writes the threshold into
`tracestate`, as `ot=th:H`: H is T in hexadecimal without the zeros at its end. Whoever counts spans can tell from it
how many traces each one stands for.

Source: opentelemetry.io/docs/specs/otel/trace/tracestate-probability-sampling and w3c/trace-context, level 2.
"""

import msgspec

__all__ = ["ALWAYS", "EVERY", "NEVER", "Sampling", "threshold_text", "with_threshold", "without_threshold"]

_ALL = 1 << 56
_LOW = _ALL - 1
_MAX_MEMBERS = 32


class Sampling(msgspec.Struct, frozen=True):
    """The decision for traces that begin here.

    threshold: 0 keeps all of them, 2^56 none.
    parent_based: True keeps the decision of a caller; otherwise its traces are decided like our own.
    state: the `tracestate` of a trace that is kept.
    hex_threshold: the threshold, to be compared with the last 14 digits of an id in lower-case hex.
    """

    threshold: int
    parent_based: bool
    state: str
    hex_threshold: str

    @classmethod
    def by_ratio(cls, ratio: float, *, parent_based: bool = True) -> "Sampling":
        """Keep this share of all traces, from 0 to 1."""
        threshold = round((1.0 - min(max(ratio, 0.0), 1.0)) * _ALL)
        # No digit is as large as "g".
        as_hex = f"{threshold:014x}" if threshold < _ALL else "g"
        state = f"ot=th:{threshold_text(threshold)}" if threshold < _ALL else ""
        return cls(threshold, parent_based, state, as_hex)

    def keeps(self, trace_id: int) -> bool:
        """Return whether a trace with this id is kept."""
        return trace_id & _LOW >= self.threshold

    def decided(self, trace_id: int, state: str) -> tuple[bool, str]:
        """Return whether the trace of a caller is kept, and its `tracestate`, when the caller's decision is not."""
        kept = trace_id & _LOW >= self.threshold
        return kept, with_threshold(state, self.state) if kept else without_threshold(state)


def threshold_text(threshold: int) -> str:
    """Return the value of `th`: hexadecimal without the zeros at its end, "0" for zero."""
    return f"{threshold:014x}".rstrip("0") or "0"


def with_threshold(state: str, own: str) -> str:
    """Return a `tracestate` with our threshold in front. own: `ot=th:H`, which replaces an older threshold."""
    rest = without_threshold(state)
    if not rest:
        return own
    members = rest.split(",")
    for at, member in enumerate(members):
        if member.startswith("ot="):
            own = f"{own};{member[3:]}"
            del members[at]
            break
    return ",".join([own, *members[: _MAX_MEMBERS - 1]])


def without_threshold(state: str) -> str:
    """Return a `tracestate` without the threshold of a decision that does not hold any more."""
    if "ot=" not in state:
        return state
    members = []
    for member in state.split(","):
        member = member.strip()
        if member.startswith("ot="):
            parts = [part for part in member[3:].split(";") if part and not part.startswith("th:")]
            if not parts:
                continue
            member = "ot=" + ";".join(parts)
        members.append(member)
    return ",".join(members)


ALWAYS = Sampling.by_ratio(1.0)
EVERY = Sampling.by_ratio(1.0, parent_based=False)  # also those of callers that do not want it
NEVER = Sampling.by_ratio(0.0)
