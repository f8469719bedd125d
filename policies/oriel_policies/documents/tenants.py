"""Checks the tables of tenants, with their keys and limits."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from datetime import UTC, datetime

from msgspec.structs import astuple

from oriel_policies.bounds.kinds import LIMIT_KINDS, Counts
from oriel_policies.documents.budgets import budget_allowance
from oriel_policies.documents.promises import (
    TOKEN_SERVICES,
    Allowance,
    ApiKey,
    Limit,
    Selector,
    Served,
    Tenant,
    Tier,
    fits,
    served_by,
)
from oriel_policies.documents.reading import nearest
from oriel_policies.documents.schema import KeyTable, LimitTable, ScopedLimitTable, ServiceTiers, TenantTable
from oriel_policies.errors import BadDocument

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")
_PATTERN = re.compile(r"[A-Za-z0-9._*-]{1,128}\Z")
_GRANT = re.compile(r"[A-Za-z0-9._:@/*-]{1,128}\Z")  # models of OpenAI servers may be called "org/name:tag"
_SHA256 = re.compile(r"[0-9a-f]{64}\Z")
_SCOPES = {"operator"}
_MAX_PATTERNS = 8192  # patterns of models are sent to logic servers in a header


class Tenants:
    """The tenants of a set that are checked so far. compiled: the compiled tenants by name; keys: the keys by the
    SHA-256 of the credential.

    routes: the names of all routes; None if they are not known, because one of them is wrong. currencies: the
    currencies of the prices; None if they are not known.
    """

    def __init__(
        self,
        tiers: Mapping[str, Tier],
        bad_tiers: set[str],
        routes: Collection[str] | None,
        currencies: Collection[str] | None = None,
    ) -> None:
        self._routes = routes
        self._currencies = currencies
        self._tiers = tiers
        self._bad_tiers = bad_tiers
        self.compiled: dict[str, Tenant] = {}
        self.keys: dict[bytes, ApiKey] = {}
        self.served: Served = {}
        # Thousands of tenants have the same numbers and patterns: each is checked once.
        self._limits: dict[tuple[object, ...], tuple[Allowance, ...]] = {}
        self._patterns: dict[tuple[str, ...], tuple[str, ...]] = {}

    def add(self, file: str, path: str, name: str, tenant: TenantTable) -> None:
        """Check and add one tenant. Raises BadDocument; then nothing of it is added but the keys before the bad one."""
        unique(file, path, name, self.compiled)
        tier = self._tier(file, f"{path}.tier", tenant.tier)
        models = self._checked(file, f"{path}.models", tenant.models)
        services = self._checked(file, f"{path}.services", tenant.services)
        for scope in tenant.scopes:
            if scope == "delegate":
                gone = "the scope 'delegate' is gone: remove it and this key; services call models by tickets"
                raise BadDocument(file, f"{path}.scopes", f'{gone} (docs/scaling.md, "Models behind logic services")')
            if scope not in _SCOPES:
                raise BadDocument(
                    file, f"{path}.scopes", f"no scope is named {scope!r}{nearest(scope, _SCOPES, list_all=True)}"
                )
        compiled = Tenant(
            name=name,
            tier=tier,
            weight=tenant.weight,
            allowances=self._allowances(file, path, tenant),
            scopes=frozenset(tenant.scopes),
            models=models,
            services=services,
            service_tiers=self._service_tiers(file, path, tenant.service_tiers) or ServiceTiers(),
        )
        self._add_keys(file, path, compiled, tenant.keys)
        self.compiled[name] = compiled

    def _allowances(self, file: str, path: str, tenant: TenantTable) -> tuple[Allowance, ...]:
        allowances = []
        if tenant.limit is not None:
            numbers = astuple(tenant.limit)
            if not (tenant.limits or tenant.budgets) and (known := self._limits.get(numbers)) is not None:
                return known
            allowances.append(_allowance(file, f"{path}.limit", "all", Selector(), tenant.limit))
            if not tenant.limits:
                self._limits[numbers] = tuple(allowances)
        for number, limit in enumerate(tenant.limits):
            allowance = _scoped(file, f"{path}.limits[{number}]", limit, self._routes)
            if limit.tier is not None:
                self._tier(file, f"{path}.limits[{number}].tier", limit.tier)
            if any(other.name == allowance.name for other in allowances):
                raise BadDocument(
                    file, f"{path}.limits[{number}]", f"{allowance.name} has a limit already: put both into one"
                )
            allowances.append(allowance)
        budgets = budget_allowance(file, f"{path}.budgets", tenant.budgets, self._currencies)
        if budgets is not None:
            allowances.append(budgets)
        return tuple(allowances)

    def _tier(self, file: str, path: str, name: str) -> Tier:
        known_tier(file, path, name, self._tiers, self._bad_tiers)
        # The tier's own table is wrong, so the set is refused and this value is never used.
        return self._tiers.get(name) or Tier(name=name, band=0, target_s=1.0, give_up_s=1.0)

    def _by_key(self, file: str, path: str, key: KeyTable, tenant: Tenant) -> Tenant:
        """The tenant with the tier of one of its keys, and with the tiers that its calls may ask for."""
        service_tiers = self._service_tiers(file, path, key.service_tiers)
        if key.tier is None:
            if key.above_tenant:
                raise BadDocument(file, f"{path}.above_tenant", "above_tenant needs a tier, and the key has none")
            return served_by(tenant, tenant.tier, self.served, service_tiers=service_tiers)
        tier, own = self._tier(file, f"{path}.tier", key.tier), tenant.tier
        if tier.above(own) and not key.above_tenant and self._tiers.keys() >= {tier.name, own.name}:
            reason = f"{tier.name!r} is above the tenant's {own.name!r}: add above_tenant = true if that is meant"
            raise BadDocument(file, f"{path}.tier", reason)
        return served_by(tenant, tier, self.served, service_tiers=service_tiers)

    def _service_tiers(self, file: str, path: str, table: ServiceTiers | None) -> ServiceTiers | None:
        """Return the tiers that calls may ask for, checked."""
        for name in ("flex", "priority"):
            if table is not None and (tier := getattr(table, name)):
                self._tier(file, f"{path}.service_tiers.{name}", tier)
        return table

    def _checked(self, file: str, path: str, patterns: list[str]) -> tuple[str, ...]:
        names = tuple(patterns)
        known = self._patterns.get(names)
        if known is None:
            if sum(map(len, names)) > _MAX_PATTERNS:
                raise BadDocument(
                    file,
                    path,
                    f"the patterns may have at most {_MAX_PATTERNS} characters together: use * to shorten them",
                )
            for pattern in names:
                check_pattern(file, path, pattern, _GRANT)
            known = self._patterns[names] = names
        return known

    def _add_keys(self, file: str, path: str, compiled: Tenant, keys: Sequence[KeyTable]) -> None:
        for number, key in enumerate(keys):
            if not _SHA256.match(key.sha256):
                raise BadDocument(file, f"{path}.keys[{number}]", "sha256 has to be 64 lower-case hex digits")
            digest = bytes.fromhex(key.sha256)
            if digest in self.keys:
                reason = f"this key belongs to tenant {self.keys[digest].tenant.name} already"
                raise BadDocument(file, f"{path}.keys[{number}]", reason)
            by_key = self._by_key(file, f"{path}.keys[{number}]", key, compiled)
            self.keys[digest] = ApiKey(tenant=by_key, expires_at=epoch(key.expires), name=key.name)


def unique(file: str, path: str, name: str, known: Mapping[str, object]) -> None:
    """Raises BadDocument unless `name` is a name and new."""
    if not _NAME.match(name):
        raise BadDocument(file, path, "a name must have 1 to 128 letters, digits, dots, dashes, underscores")
    if name in known:
        raise BadDocument(file, path, "defined twice")


def _scoped(file: str, path: str, limit: ScopedLimitTable, routes: Collection[str] | None) -> Allowance:
    scopes = {scope.name: getattr(limit, scope.name) for scope in fields(Selector)}
    named = [(scope, pattern) for scope, pattern in scopes.items() if pattern is not None]
    if len(named) != 1:
        raise BadDocument(
            file, path, "a scoped limit must name one model, service, route or tier; for all calls use `limit`"
        )
    ((scope, pattern),) = named
    if scope in ("model", "service"):
        check_pattern(file, path, pattern)
    elif scope == "route" and routes is not None and pattern not in routes:
        reason = f"no route is named {pattern!r}{nearest(pattern, set(routes), list_all=True)}"
        raise BadDocument(file, f"{path}.route", reason)
    in_vain = scope == "model" or (scope == "service" and not any(fits(pattern, name) for name in TOKEN_SERVICES))
    for kind in LIMIT_KINDS:
        if in_vain and kind.counts is Counts.TOKENS and getattr(limit, kind.field) is not None:
            services = ", ".join(sorted(TOKEN_SERVICES))
            raise BadDocument(file, f"{path}.{kind.field}", f"only calls of the services {services} take tokens")
    return _allowance(file, path, f"{scope}:{pattern}", Selector(**{scope: pattern}), limit)


def _allowance(file: str, path: str, name: str, selector: Selector, table: LimitTable) -> Allowance:
    limits = []
    for kind in LIMIT_KINDS:
        amount = getattr(table, kind.field)
        if amount is None:
            continue
        burst = 0
        if kind.burst:
            given = getattr(table, kind.burst)
            burst = amount if given is None else given
        if not kind.least <= amount <= kind.most or (kind.burst and not 1 <= burst <= kind.most_burst):
            raise BadDocument(file, path, kind.allowed)
        limits.append(Limit(field=kind.field, amount=amount, burst=burst))
    if not limits:
        raise BadDocument(file, path, "this limit sets no bound: add one, or remove the limit")
    return Allowance(name=name, selector=selector, limits=tuple(limits))


def epoch(moment: datetime | None) -> float | None:
    """Seconds since 1970; a time without a zone is UTC."""
    if moment is None:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def known_tier(file: str, path: str, name: str, tiers: Mapping[str, Tier], bad_tiers: set[str]) -> None:
    """Raises BadDocument unless `name` is a tier's, or one whose own table is wrong, which is reported there."""
    if name not in tiers and name not in bad_tiers:
        raise BadDocument(file, path, f"no tier is named {name!r}{nearest(name, tiers, list_all=True)}")


def check_pattern(file: str, path: str, pattern: str, allowed: re.Pattern[str] = _PATTERN) -> None:
    """Raises BadDocument unless `pattern` can name models or services."""
    if not allowed.match(pattern):
        raise BadDocument(file, path, f"{pattern!r} is not a name or a pattern with *")
