"""What an upstream's load report (ORCA) says about how many calls to hold there."""

from oriel_wire.errors import BadMessage
from oriel_wire.orca import parse_report

__all__ = ["side_of"]

_IDLE, _BUSY = 0.8, 1.0
_DEEP = 4.0


def side_of(report: str) -> int:
    """1: the server has room for more calls; -1: it has more than it can use; 0: neither, or it cannot be read.

    By `application_utilization` (above 1.0 it is overloaded, in ORCA's own words), else by how many wait there.
    """
    try:
        found = parse_report(report)
    except BadMessage:
        return 0
    used = found.load.get("application_utilization")
    if used is not None:
        return 1 if used < _IDLE else -1 if used > _BUSY else 0
    depth = found.named.get("queue_depth")
    if depth is not None:
        return 1 if depth < 1.0 else -1 if depth >= _DEEP else 0
    return 0
