"""A stream whose permit a pool may suspend, and the calls that may have it meanwhile."""

from typing import Protocol

from oriel_policies.documents import Tenant
from oriel_policies.waiting.exchanges import Exchange

Others = tuple[int, frozenset[str]]  # a band, and the tenants of it that are left out


class Lendable(Protocol):
    """The permit of a stream that may be suspended so that another call can use it; see `lending.PermitLending`."""

    tenant: Tenant
    exchange: Exchange | None
    rests: bool
    pauses: bool

    @property
    def waits_for_client(self) -> bool: ...

    @property
    def silent(self) -> bool: ...

    def suspend(self) -> None:
        """Free the permit."""

    def resume_at_work(self) -> None:
        """Take the permit back."""


def others_than(lending: Lendable, whole: bool, mute: frozenset[str] | None) -> Others:
    """Return the calls that may have a stream's permit, as arguments of `SlaQueue.others_wait`.

    Calls of a more urgent tier may always have it. Calls of other tenants of the same tier may have that of a silent
    stream as well, if it is within the number of permits for them (`whole`), or else if they are not in `mute`.
    """
    tier, tenant = lending.tenant.tier, lending.tenant.name
    between_answers = lending.waits_for_client and lending.exchange is not None and not lending.pauses
    if not between_answers and (lending.waits_for_client or whole):
        return tier.band, frozenset((tenant,))
    if not between_answers and mute is not None:
        return tier.band, mute
    return tier.band - 1, frozenset()
