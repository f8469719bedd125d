"""Says of a request that has been judged whether its trace is kept, and what its span says of its promise."""

from oriel_gateway.errors import Outcome
from oriel_gateway.observe.objectives import Judged
from oriel_wire.semantics import Attributes

__all__ = ["kept_for", "sla_attributes"]


def kept_for(judged: Judged | None, outcome: Outcome) -> str:
    """Return why the trace of a request is kept that was not sampled at its beginning; "" if it is not.

    "sla": it was late, or refused although it was promised. "error": a server behind failed.
    """
    if judged is None or judged.result == "excused":
        return ""
    failed = judged.result == "missed" and outcome in (Outcome.ANSWERED, Outcome.UPSTREAM_BROKEN)
    return "error" if failed else "sla"


def sla_attributes(judged: Judged | None) -> Attributes:
    """Return the attributes that say whether the promise of a request was kept, and what broke it."""
    if judged is None:
        return {"oriel.sla.result": "met"}
    found: Attributes = {"oriel.sla.result": judged.result}
    if judged.cause:
        found["oriel.sla.cause"] = judged.cause
        found["oriel.sla.excess_ms"] = round(judged.excess_s * 1e3, 3)
    return found
