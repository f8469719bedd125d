"""Calls for a pool that scales, while it has no usable server: which are held, until when, and what is reported.

The rules are in `oriel_policies.scaling.cold_start`. They apply to the tiers that have a `hold_ms` for the pool; calls
of others wait until their deadlines, as in a pool that does not scale.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from time import monotonic
from typing import Any, Final

from oriel_gateway.errors import Outcome, Refused
from oriel_gateway.pools.endpoint_state import Reach
from oriel_gateway.pools.endpoints import EndpointSet
from oriel_policies.documents import Scaling, Tenant
from oriel_policies.scaling.cold_start import ColdStarts, hold_until, worth_holding

__all__ = ["Phase", "PoolColdStart", "phase_of", "timing"]


class Phase(StrEnum):
    """The progress of the start of a pool's first server. The values are published in `Server-Timing` and metrics."""

    NO_ADDRESS = "no_address"
    STARTING = "starting"  # it has an address and refuses connections, or was not asked yet
    LOADING = "loading"  # it accepts connections and is not ready
    READY = "ready"


class PoolColdStart:
    """The cold starts of one pool that scales, over HTTP and gRPC. Single writer: the gateway's loop.

    starts: their measured times. refused: calls that could not be in time.
    loading: bytes of model files that the most advanced server has loaded, and all that it has to; None while unknown.
    clock: monotonic seconds; another one than the machine's in simulations.
    """

    def __init__(
        self, scaling: Scaling, sets: Sequence[EndpointSet[Any]], clock: Callable[[], float] = monotonic
    ) -> None:
        self._sets = sets
        self._clock = clock
        self.starts = ColdStarts(guess_s=scaling.start_s, forget_s=scaling.keep_alive_s)
        self.refused = 0
        self.loading: tuple[int, int] | None = None
        self.adopt(scaling)

    def adopt(self, scaling: Scaling) -> None:
        """Adopt other documents; what was seen stays."""
        self._scaling = scaling
        self.starts.guess_s, self.starts.forget_s = scaling.start_s, scaling.keep_alive_s

    @property
    def holds(self) -> bool:
        """Return whether calls of any tier are held for a time of their own."""
        return self._scaling.hold_s is not None or bool(self._scaling.tier_hold_s)

    def hold_s(self, tenant: Tenant) -> float:
        """Return how long a call may wait for replicas that were ordered; 0.0 if only until its deadline."""
        return self._scaling.hold_for(tenant.tier.name) or 0.0

    def note_ready(self, *, probed: bool) -> None:
        """Note the end of a start if there is a usable server. probed: only one that has passed a probe is."""
        if any(not probed or member.reach is Reach.READY for these in self._sets for member in these.usable):
            self.starts.ready(self._clock())
            self.loading = None

    def retry_after_s(self) -> int | None:
        """Whole seconds until the start under way has probably ended; None if none is."""
        return self.starts.retry_after_s(self._clock())

    @property
    def phase(self) -> Phase:
        """The progress of the most advanced endpoint of the pool, over either protocol."""
        return max((phase_of(these) for these in self._sets), key=_PHASES.index)

    def described(self, these: EndpointSet[Any]) -> str:
        """Return the phase of `these`, while models are loaded with the bytes that are, of all, if they are known."""
        phase = phase_of(these)
        if phase is not Phase.LOADING or self.loading is None:
            return phase
        return f"{phase} {self.loading[0]} of {self.loading[1]} bytes"

    def until(
        self, these: EndpointSet[Any], tenant: Tenant, received_s: float, requested_until: float, now: float
    ) -> float | None:
        """Return when a call that finds no usable endpoint in `these` is given up; None: at the deadline that it has.

        requested_until: the deadline that its caller set, infinite if none. Raises Refused INFEASIBLE if no server
        can be there before.
        """
        self.starts.called(now, empty=not any(each.members for each in self._sets))
        hold_s = self._scaling.hold_for(tenant.tier.name)
        if hold_s is None:
            return None
        until, rest_s = hold_until(received_s, hold_s, requested_until), self.starts.rest_s(now)
        if worth_holding(now, rest_s, until):
            return until
        self.refused += 1
        assert rest_s is not None
        raise Refused(
            Outcome.INFEASIBLE,
            f"the pool has no server yet and expects one in about {rest_s:.1f} s; the call can wait "
            f"{max(0.0, until - now):.1f} s",
            retry_after_s=self.starts.retry_after_s(now),
            timing=timing(self.described(these), 0.0),
        )


def phase_of(these: EndpointSet[Any]) -> Phase:
    """Return how far the most advanced endpoint is."""
    if these.usable:
        return Phase.READY
    if not these.members:
        return Phase.NO_ADDRESS
    answers = any(member.reach is Reach.NOT_READY and member.probed_s for member in these.members)
    return Phase.LOADING if answers else Phase.STARTING


def timing(phase: str, held_s: float) -> str:
    """Return an entry of `Server-Timing`: how long a call was held, and the phase that the pool was in when it came.

    phase: see `PoolColdStart.described`.
    """
    return f"gateway-cold-start;dur={held_s * 1e3:.3f};desc=" + (f'"{phase}"' if " " in phase else phase)


_PHASES: Final = tuple(Phase)
