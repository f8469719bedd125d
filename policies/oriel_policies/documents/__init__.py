"""Policy documents (TOML) and the snapshot they compile to: what was promised to whom, at one moment."""

from oriel_policies.documents.compile import compile_documents
from oriel_policies.documents.promises import (
    Allowance,
    ApiKey,
    Http,
    Issuer,
    Pool,
    RateLimit,
    Route,
    Selector,
    Snapshot,
    Split,
    Tenant,
    Tier,
)

__all__ = [
    "Allowance",
    "ApiKey",
    "Http",
    "Issuer",
    "Pool",
    "RateLimit",
    "Route",
    "Selector",
    "Snapshot",
    "Split",
    "Tenant",
    "Tier",
    "compile_documents",
]
