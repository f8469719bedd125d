"""A tenant in front of a limiter. It does what the ingresses do: acquire, wait for the answer, settle."""

import asyncio
from hashlib import sha256
from time import monotonic

from oriel_gateway.errors import Refused
from oriel_gateway.limits import Grant, Limiter
from oriel_gateway.routing.targets import resolve
from oriel_policies.documents import compile_documents
from oriel_policies.promise.routing import RouteTable


def documents(limits: str) -> dict[str, bytes]:
    return {
        "all.toml": f"""
[tiers.gold]
band = 0
target_ms = 2000
[pools.p]
endpoints = ["127.0.0.1:1"]
[[routes]]
model = "*"
pool = "p"
[[routes]]
service = "*"
pool = "p"
[tenants.t]
tier = "gold"
models = ["*"]
services = ["*"]
keys = [{{ sha256 = "{sha256(b"k").hexdigest()}" }}]
{limits}
""".encode()
    }


class Call:
    """A call that waits for its grant."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def granted(self) -> None:
        self.answer.set_result(None)

    def refuse(self, refused: Refused) -> None:
        self.answer.set_exception(refused)


class Desk:
    def __init__(self, limiter: Limiter, limits: str) -> None:
        self.limiter = limiter
        self.snapshot = compile_documents(documents(limits))
        self.tenant = self.snapshot.tenants["t"]
        self._targets = {model: self._target(model) for model in ("m", "big")}
        self.waits: list[float] = []  # seconds that calls waited for their ledger
        self.tried = 0

    def _target(self, model: str):  # type: ignore[no-untyped-def]
        return resolve("POST", f"/v2/models/{model}/infer", "", self.tenant, RouteTable(self.snapshot.routes))

    async def take(self, model: str = "m", size: int = 0) -> Grant:
        """Acquire a grant and wait until it is ready. After Refused nothing is held."""
        now = monotonic()
        grant = self.limiter.acquire(self.tenant, self._targets[model], size, now)
        assert grant is not None
        if not grant.ready:
            call = Call()
            grant.waiter = call
            try:
                await call.answer
            except Refused:
                grant.settle(0, False, monotonic())
                raise
            finally:
                self.waits.append(monotonic() - now)
        return grant

    async def reserve(self, tokens: int) -> Grant:
        """Reserve tokens for a call of the OpenAI API as `shared.special` does. After Refused nothing is held."""
        routes = RouteTable(self.snapshot.routes)
        target = resolve("POST", "/v1/chat/completions", "", self.tenant, routes)
        grant = self.limiter.acquire(self.tenant, target, 0, monotonic())
        assert grant is not None and grant.ready
        try:
            self.limiter.reserve_tokens(grant, self.tenant, target, tokens, monotonic())
            if not grant.ready:
                call = Call()
                grant.waiter = call
                await call.answer
        except Refused:
            grant.settle(0, False, monotonic())
            raise
        return grant

    async def admitted(self, model: str = "m", size: int = 0) -> bool:
        """Make one call that ends at once; returns whether it was admitted."""
        self.tried += 1
        try:
            grant = await self.take(model, size)
        except Refused:
            return False
        grant.settle(1000, True, monotonic())
        return True

    async def press(self, seconds: float, *, every_s: float = 0.001, at_once: int = 2) -> int:
        """Make more calls than the limit allows for `seconds`; returns how many were admitted."""
        count = 0
        end = monotonic() + seconds
        while monotonic() < end:
            count += sum(await asyncio.gather(*(self.admitted() for _ in range(at_once))))
            await asyncio.sleep(every_s)
        return count
