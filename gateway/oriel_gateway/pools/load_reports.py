"""Reads the load reports (ORCA) that servers add to their answers."""

from oriel_wire.errors import BadMessage
from oriel_wire.observe.orca import parse_report

__all__ = ["load_direction"]

_IDLE, _BUSY = 0.8, 1.0  # `application_utilization` of a load report
_DEEP = 4.0  # calls in the queue of a load report


def load_direction(report: str) -> int:
    """Return 1 if a load report (ORCA) says that its server has room for more calls, -1 if the server is overloaded.

    Returns 0 if the report says neither, or cannot be read. The report's `application_utilization` decides (above 1.0
    the server is overloaded, as ORCA defines it), or else the depth of its queue.
    """
    try:
        found = parse_report(report)
    except BadMessage:
        return 0
    utilization = found.load.get("application_utilization")
    if utilization is not None:
        return 1 if utilization < _IDLE else -1 if utilization > _BUSY else 0
    depth = found.named.get("queue_depth")
    if depth is not None:
        return 1 if depth < 1.0 else -1 if depth >= _DEEP else 0
    return 0
