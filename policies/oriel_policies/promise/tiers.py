"""The tier that serves a call: the tenant's, a key's, a route's, or a lower one that the client asks for.

The key's tier has been applied before: `ApiKey.tenant` is the tenant with that tier. The route's tier comes next and
the client's wish last, so a client never gets a tier above that of the documents.
"""

from collections.abc import Mapping
from math import inf

from oriel_policies.documents import Route, Tier
from oriel_policies.documents.schema import ServiceTiers


def on_route(own: Tier, route: Route, tiers: Mapping[str, Tier]) -> Tier:
    """The tier of a route's calls for a caller whose own is `own`: never above that, unless the route allows it."""
    of_route = tiers.get(route.tier)
    if of_route is None or (of_route.above(own) and not route.above_tenant):
        return own
    return of_route


def lowered(own: Tier, requested: str, tiers: Mapping[str, Tier]) -> Tier | None:
    """The tier of this name for a caller whose tier is `own`; None if it is above that or does not exist."""
    found = tiers.get(requested)
    return None if found is None or found.above(own) else found


def by_service_tier(own: Tier, named: ServiceTiers, route: Route, tiers: Mapping[str, Tier]) -> dict[str, Tier]:
    """The tiers for the values of `service_tier` of the OpenAI API that change something or that the documents name.

    own: the tier that serves the caller's other calls on the route. `flex` is the tier that the documents name, else
    the one of that name, else the lowest, and never above `own`; `priority` never below, and only where the route
    allows the tier that the documents name.
    """
    found = {}
    low = tiers.get(named.flex or "flex") or max(tiers.values(), key=lambda t: (t.band, t.target_s), default=own)
    low = own if low.above(own) else low
    if named.flex or low is not own:
        found["flex"] = low
    high = tiers.get(named.priority)
    if high is not None and on_route(high, route, tiers) is high:
        found["priority"] = own if own.above(high) else high
    return found


def offered(own: Tier, tiers: Mapping[str, Tier]) -> list[Tier]:
    """The tiers that a caller whose tier is `own` may ask for, the most urgent first."""
    return sorted((t for t in tiers.values() if not t.above(own)), key=lambda t: (t.band, t.target_s, t.name))


def allowing_more(own: Tier, tiers: Mapping[str, Tier]) -> list[Tier]:
    """The tiers that give their calls more time than `own` does, the least first."""
    return sorted((t for t in tiers.values() if t.give_up_s > own.give_up_s), key=lambda t: (t.give_up_s, t.name))


def time_bound(own: Tier, tiers: Mapping[str, Tier] | None, requested_s: float) -> str:
    """Return a sentence on who bounded the time of a call.

    own: the tier that serves it. tiers: those of which one that gives more is named; None to name none.
    requested_s: seconds that the client asked for; infinite if it asked for none.
    """
    more = ""
    if tiers is not None:
        longer = allowing_more(own, tiers)
        more = f"; tier {longer[0].name!r} gives {longer[0].give_up_s:g} s" if longer else "; no tier gives more"
    if requested_s < own.give_up_s:
        return f"its client asked for {requested_s:g} s, tier {own.name!r} gives {own.give_up_s:g} s"
    ignored = f", and the client's {requested_s:g} s do not count" if own.give_up_s < requested_s < inf else ""
    return f"tier {own.name!r} gives {own.give_up_s:g} s{ignored}{more}"
