"""`POST /pools/<name>/wake`: keep replicas of a pool for a while, before its calls come."""

from typing import Annotated, Any, Final

import msgspec

from oriel_gateway.pools.scaling import ScaledPools

MOST_BYTES: Final = 4096
BODY_S: Final = 10.0
MOST_MS: Final = 24 * 3600 * 1000


class Wake(msgspec.Struct, forbid_unknown_fields=True):
    """The body. for_ms: the pool's `keep_alive_ms` if it is absent."""

    replicas: Annotated[int, msgspec.Meta(ge=1)] = 1
    for_ms: Annotated[int, msgspec.Meta(ge=1000, le=MOST_MS)] | None = None


_decode = msgspec.json.Decoder(Wake).decode


def wake_pool(pools: ScaledPools, name: str, body: bytes) -> tuple[int, dict[str, Any]]:
    """Keep at least `replicas` of the pool for `for_ms`. Repeated, it begins anew. Returns status and answer."""
    plan = pools.plans.get(name)
    if plan is None:
        return 404, refusal(f"the policy documents have no pool {name[:200]!r} with a `scaling` table")
    try:
        wish = _decode(body) if body else Wake()
    except ValueError as error:
        return 400, refusal(f'the body is not {{"replicas": 1, "for_ms": 60000}}: {error}')
    scaling = plan.scaling
    if wish.replicas > scaling.maximum:
        return 400, refusal(f"the pool has at most {scaling.maximum} replicas")
    for_s = scaling.keep_alive_s if wish.for_ms is None else wish.for_ms / 1e3
    plan.wake(wish.replicas, for_s)
    return 200, {
        "pool": name,
        "message": f"at least {wish.replicas} replica(s) for {for_s:g} s; {plan.ready} ready, "
        f"a new one takes up to {scaling.start_s:g} s",
        "for_ms": round(for_s * 1e3),
        "floor": plan.latest.floor,
        "wanted": plan.latest.wanted,
        "replicas": plan.replicas,
        "ready": plan.ready,
        "start_ms": round(scaling.start_s * 1e3),
    }


def refusal(message: str) -> dict[str, Any]:
    """Return the body of an answer that says why nothing was done."""
    return {"error": {"message": message}}
