"""Documents for tests of the packed form."""

import dataclasses
from typing import Any

DOCUMENT = b"""
[tiers.gold]
band = 0
target_ms = 100
[tiers.free]
band = 1
target_ms = 200
[issuers.i]
issuer = "https://i"
audience = ["a"]
jwks = "https://i/keys"
[pools.p]
endpoints = ["127.0.0.1:1", "[::1]:2"]
triton_priorities = { gold = 1 }
place_models = true
[pools.q]
discover = "dns:a:1"
[pools.q.scaling]
minimum = 0
maximum = 3
weights = { free = 0.5 }
[[routes]]
model = "a*"
split = [{ pool = "p", weight = 1 }, { pool = "q", version = "2", weight = 3 }]
headers = { x = "y" }
[[routes]]
service = "*"
pool = "q"
deterministic = true
cache_s = 0.5
[http]
cors_origins = ["*"]
trusted_proxies = ["10.0.0.0/8", "::1/128"]
"""


def said(thing: Any) -> Any:
    """Convert a value to plain data, so that equal contents compare equal whatever classes hold them."""
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return {field.name: said(getattr(thing, field.name)) for field in dataclasses.fields(thing)}
    if isinstance(thing, list | tuple):
        return [said(each) for each in thing]
    return thing
