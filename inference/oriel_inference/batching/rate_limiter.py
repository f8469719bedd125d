"""Rate limiter: executions wait for resources that models count, such as memory that they share (`rate_limiter` of an
instance group, as in Triton).

Rules.
1. An execution takes its cores and all resources of its instance at once, or waits and takes nothing.
2. Tier and deadline decide which model goes next, as for cores. A model that waits keeps the resources that it needs
   for itself: what comes free of them goes to no model behind it. Models that need none of them go on.
3. After an execution of a model with a priority above 1, as many executions of others as its priority says go first,
   if they wait and are of the same tier.
4. A resource has the count of the flag --rate-limit-resource; without that flag, what the instance that needs most of
   it asks for.

Single writer: the loop. Only `check` may be called by other threads.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from oriel_inference.backends import Session
from oriel_inference.batching.cores import Contender, Cores
from oriel_inference.errors import ConfigInvalid
from oriel_inference.model import EVERYWHERE, InstanceLimit, Resource

_FIELD = "instance_group.rate_limiter"


class InstanceLimits:
    """The limits of one model's instances.

    limiter: the server's. contender: the model. idle: its idle sessions, of which the last one runs next; changed in
    place. limits: identity of a session -> its limit.
    yields: executions of others that go first. resources: those that its instances need.
    """

    def __init__(
        self, limiter: "RateLimiter", contender: Contender, idle: list[Session], limits: Mapping[int, InstanceLimit]
    ) -> None:
        self.yields = 0
        self._limiter = limiter
        self._contender = contender
        self._idle = idle
        self.limits = limits
        self.resources = {each for limit in limits.values() for each in limit.needs}
        limiter.members[contender] = self

    def needs(self) -> list[Resource]:
        """Return the resources that its idle instances need."""
        return [each for session in self._idle for each in self.limits[id(session)].needs]

    def choose(self, taken: set[Resource]) -> bool:
        """Let an idle instance run next that could have its resources now. Returns False if there is none.

        taken: resources that belong to more urgent models.
        """
        for index, session in enumerate(reversed(self._idle)):
            needs = self.limits[id(session)].needs
            if taken.isdisjoint(needs) and all(self._limiter.has(each, count) for each, count in needs.items()):
                self._idle.append(self._idle.pop(-1 - index))
                return True
        return False

    def acquire(self) -> None:
        """Take the resources of the instance that runs next."""
        limit = self.limits[id(self._idle[-1])]
        self._limiter.held.update(limit.needs)
        self.yields = limit.priority if limit.priority > 1 else 0

    def release(self, session: Session, *, contends: bool) -> None:
        """Return the resources of an instance, before its cores. contends: the model may get them again at once."""
        self._limiter.held.subtract(self.limits[id(session)].needs)
        if contends:
            self._limiter.join(self._contender)

    def swap(self, before: Sequence[Session], after: Sequence[Session]) -> None:
        """Give the limits of sessions to those that take their places."""
        self.limits = {id(new): self.limits[id(old)] for old, new in zip(before, after, strict=True)}

    def close(self) -> None:
        """Forget the model; its executions that still run return their resources."""
        self._limiter.members.pop(self._contender, None)


class RateLimiter(Cores):
    """Cores, and the resources of a machine.

    counts: (name, number of the device, or None for every device) -> count, from flags; empty without the flag.
    held: resource -> how much of it executions hold.
    """

    def __init__(self, total: int, counts: Mapping[tuple[str, int | None], int]) -> None:
        super().__init__(total)
        self.held: Counter[Resource] = Counter()
        self.members: dict[Contender, InstanceLimits] = {}
        self._counts = counts

    def check(self, limits: Sequence[InstanceLimit], file: str) -> tuple[InstanceLimit, ...]:
        """Return the limits of a model; none if its instances need nothing. Raises ConfigInvalid if one of them could
        never run.
        """
        known = {each for member in tuple(self.members.values()) for each in member.resources}
        wanted = {each: count for limit in limits for each, count in limit.needs.items()}
        everywhere = {name for name, device in (*known, *wanted) if device == EVERYWHERE}
        for limit in limits:
            for resource, count in limit.needs.items():
                name, device = resource
                if device != EVERYWHERE and name in everywhere:
                    both = "is present as both global and device-specific resource in the model configuration"
                    raise ConfigInvalid(file, _FIELD, f'Resource "{name}" {both}.')
                if self._counts and self._given(resource) < count:
                    raise ConfigInvalid(
                        file,
                        _FIELD,
                        f'Resource count for "{name}" is limited to {self._given(resource)} which will prevent '
                        f"scheduling of one or more model instances, the minimum required count is {count}",
                    )
        return tuple(limits) if wanted or any(limit.priority > 1 for limit in limits) else ()

    def has(self, resource: Resource, count: int) -> bool:
        """Return whether so much of a resource is free."""
        if self._counts:
            return self.held[resource] + count <= self._given(resource)
        limits = [limit for member in self.members.values() for limit in member.limits.values()]
        return self.held[resource] + count <= max(each.needs.get(resource, 0) for each in limits)

    def _given(self, resource: Resource) -> int:
        name, device = resource
        if device == EVERYWHERE:
            return max((count for (other, _), count in self._counts.items() if other == name), default=0)
        return max(self._counts.get((name, each), 0) for each in (device, None))

    def join(self, contender: Contender) -> None:
        """Put a model on the waiting list until the next release of cores, which drops it if it has nothing to run."""
        if contender not in self._waiting:
            self._waiting.append(contender)

    # Cores ----------------------------------------------------------------------------------------------------------

    def acquire(self, contender: Contender) -> bool:
        """Take cores and resources now, or put the contender on the waiting list."""
        if contender in self._waiting or self._granting:
            self.join(contender)
            return False
        self._waiting.append(contender)
        if self._next() is contender:
            self._waiting.remove(contender)
            self._take(contender)
            self._grant()  # a model that let others go first may be the first one now
            return True
        self._grant()
        return False

    def _next(self) -> Contender | None:
        taken: set[Resource] = set()
        free = self.free
        for _, each in sorted(self._contest(), key=self._rank):
            member = self.members.get(each)
            if each.units > free:
                free = 0  # no other model overtakes it
            elif member is None or member.choose(taken):
                return each
            taken.update(() if member is None else member.needs())
        return None

    def _rank(self, contest: tuple[tuple[int, float], Contender]) -> tuple[int, int, float]:
        (band, deadline), contender = contest
        member = self.members.get(contender)
        return band, 0 if member is None else member.yields, deadline

    def _take(self, contender: Contender) -> None:
        super()._take(contender)
        for each in self.members.values():
            each.yields = max(0, each.yields - 1)
        if (member := self.members.get(contender)) is not None:
            member.acquire()
