"""Policy documents (TOML) and the immutable snapshot that they compile to."""

from oriel_policies.documents.compile import compile_documents
from oriel_policies.documents.promises import (
    Allowance,
    ApiKey,
    Fallback,
    Http,
    Issuer,
    Limit,
    Pool,
    RateLimit,
    Route,
    Selector,
    Snapshot,
    Split,
    Tenant,
    Tier,
)
from oriel_policies.scaling.wanted import Scaling

__all__ = [
    "Allowance",
    "ApiKey",
    "Fallback",
    "Http",
    "Issuer",
    "Limit",
    "Pool",
    "RateLimit",
    "Route",
    "Scaling",
    "Selector",
    "Snapshot",
    "Split",
    "Tenant",
    "Tier",
    "compile_documents",
]
