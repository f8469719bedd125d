"""An embedded limiter with a clock that the test sets."""

import pytest

from oriel_gateway.errors import Refused
from oriel_gateway.limits import EmbeddedLimiter
from oriel_gateway.routing.targets import Target, resolve
from oriel_policies.documents import Snapshot, Tenant, compile_documents
from oriel_policies.promise.routing import RouteTable

from .stack import digest, documents

INFER = "/v2/models/digits/infer"
NOON = 1_790_000_000.0 // 86400 * 86400 + 43200  # epoch seconds


def tenant_t(limits: str) -> dict[str, bytes]:
    """Documents of a tenant `t` with the key key-t."""
    return documents(
        [1],
        extra=f'[tenants.t]\ntier = "gold"\nmodels = ["*"]\nservices = ["*"]\n'
        f'keys = [{{ sha256 = "{digest("key-t")}" }}]\n{limits}\n',
    )


def on(port: int, files: dict[str, bytes]) -> dict[str, bytes]:
    return {name: data.replace(b'127.0.0.1:1"', f'127.0.0.1:{port}"'.encode()) for name, data in files.items()}


class Desk:
    """The tenant `t` in front of an embedded limiter, without a network."""

    def __init__(self, limits: str, **options: object) -> None:
        self.limiter = EmbeddedLimiter(**options)  # type: ignore[arg-type]
        self.load(limits)
        self.now = 100.0

    def load(self, limits: str) -> None:
        self.snapshot: Snapshot = compile_documents(tenant_t(limits))
        self.tenant: Tenant = self.snapshot.tenants["t"]

    def target(self, model: str = "m") -> Target:
        return resolve("POST", f"/v2/models/{model}/infer", "", self.tenant, RouteTable(self.snapshot.routes))

    def take(self, model: str = "m", size: int = 0):  # type: ignore[no-untyped-def]
        return self.limiter.acquire(self.tenant, self.target(model), size, self.now)

    def refused(self, model: str = "m", size: int = 0) -> Refused:
        with pytest.raises(Refused) as caught:
            self.take(model, size)
        return caught.value
