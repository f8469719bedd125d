"""Records of requests that have ended, as a gateway makes them, for tests of what reads them."""

from types import SimpleNamespace
from typing import Any

from oriel_gateway.errors import Outcome
from oriel_gateway.observe.record import Record, refused_record
from oriel_gateway.observe.tracing import Mark
from oriel_gateway.routing.targets import Target


def mark(request_id: str = "i") -> Mark:
    """Return the ids of a call whose trace is not kept."""
    return Mark(request_id, "1" * 32, "2" * 16, "3" * 16)


def target(name: str = "m", **facts: Any) -> Target:
    """Return a model of pool `p`, which a call executes. facts: the attributes that are others."""
    plan = SimpleNamespace(name="r", split=())
    known: dict[str, Any] = {"tenant": None, "kind": "model", "name": name, "pool": "p", "route": f"model:{name}"}
    return Target(**known | {"plan": plan, "line": b"", "head_only": False, "executes": True} | facts)


def record(tenant: Any, of: Target | None, outcome: Outcome = Outcome.ANSWERED, **facts: Any) -> Record:
    """Return a record. facts: the attributes that are not as in a call that was just received."""
    made = refused_record(facts.pop("mark", None) or mark(), "POST", facts.pop("received_s", 1.0), tenant, of, outcome)
    for name, value in facts.items():
        setattr(made, name, value)
    return made
