"""Lines of the usage ledger, and prices for them."""

from oriel_policies.metering.prices import Price
from oriel_wire.usage.lines import UsageLine

GPU = Price(
    name="h100",
    device_class="h100",
    currency="EUR",
    valid_from="2026-01-01",
    device_hour=4_000_000_000,
)
BASE = Price(
    name="base",
    device_class="",
    currency="EUR",
    valid_from="2026-01-01",
    cpu_core_hour=36_000_000,
    gib_out=90_000_000,
    million_tokens_out=2_000_000_000,
)
PRICES = """
[prices.h100]
class = "h100"
currency = "EUR"
valid_from = 2026-01-01
device_hour = 4

[prices.base]
currency = "EUR"
valid_from = 2026-01-01
cpu_core_hour = "0.036"
gib_out = 0.09
million_tokens_out = 2.0
"""


def line(tenant: str = "acme", ns: int = 0, **more: object) -> UsageLine:
    given: dict[str, object] = {"minute": "2026-11-24T17:05", "unit": "inference", "target": "m", "device": "gpu0"}
    given |= {"device_class": "h100", "tenant": tenant, "device_ns": ns, "why": "" if tenant else "untenanted", **more}
    return UsageLine(**given)  # type: ignore[arg-type]


def device(minute: str, busy: int, wall: int, still_open: int = 0) -> UsageLine:
    return UsageLine(
        kind="device",
        minute=minute,
        unit="inference",
        device="gpu0",
        device_class="h100",
        busy_ns=busy,
        wall_ns=wall,
        open_ns=still_open,
    )
