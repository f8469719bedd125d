"""The tier that serves a call: the tenant's, a key's, a route's, or a lower one that the client asks for.

The key's tier has been applied before: `ApiKey.tenant` is the tenant with that tier. The route's tier comes next and
the client's wish last, so a client never gets a tier above that of the documents.
"""

from collections.abc import Mapping

from oriel_policies.documents import Route, Tier

_FLEX = "flex"


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


def flex(own: Tier, tiers: Mapping[str, Tier]) -> Tier:
    """The tier for `service_tier: "flex"` of the OpenAI API: the tier of that name, else the lowest; never above
    `own`.
    """
    found = tiers.get(_FLEX) or max(tiers.values(), key=lambda t: (t.band, t.target_s), default=own)
    return own if found.above(own) else found


def offered(own: Tier, tiers: Mapping[str, Tier]) -> list[Tier]:
    """The tiers that a caller whose tier is `own` may ask for, the most urgent first."""
    return sorted((t for t in tiers.values() if not t.above(own)), key=lambda t: (t.band, t.target_s, t.name))
