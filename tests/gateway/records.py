"""Records of requests that have ended, as a gateway makes them, for tests of what reads them."""

from typing import Any

from oriel_gateway.errors import Outcome
from oriel_gateway.observe.record import Record


def record(tenant: Any, target: Any, outcome: Outcome = Outcome.ANSWERED, **facts: Any) -> Record:
    """Return a record. facts: the attributes that are not as in a call that was just received."""
    made = Record(facts.pop("mark", None), "POST", facts.pop("received_s", 1.0), tenant, target, outcome)
    for name, value in facts.items():
        setattr(made, name, value)
    return made
