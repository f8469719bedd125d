"""Checks the budgets of tenants."""

from collections.abc import Collection
from decimal import Decimal, InvalidOperation

from oriel_policies.bounds.calendar import Period
from oriel_policies.documents.promises import Allowance, Selector
from oriel_policies.documents.reading import nearest
from oriel_policies.documents.schema import BudgetTable
from oriel_policies.errors import BadDocument
from oriel_policies.metering.budgets import UNITS, Budget, scale_of

MOST_BUDGETS = 8
_MOST = 10**9


def budget_allowance(
    file: str, path: str, tables: list[BudgetTable], currencies: Collection[str] | None
) -> Allowance | None:
    """Check the budgets of one tenant. currencies: the currencies of the prices; None if they are not known. Raises
    BadDocument.
    """
    if len(tables) > MOST_BUDGETS:
        raise BadDocument(file, path, f"at most {MOST_BUDGETS} budgets are allowed, and there are {len(tables)}")
    budgets: dict[str, Budget] = {}
    for number, table in enumerate(tables):
        found = _budget(file, f"{path}[{number}]", table, currencies)
        if found.name in budgets:
            reason = f"there is a budget in {found.unit} per {found.period} already"
            raise BadDocument(file, f"{path}[{number}]", reason)
        budgets[found.name] = found
    if not budgets:
        return None
    return Allowance(name="budgets", selector=Selector(), budgets=tuple(budgets.values()))


def _budget(file: str, path: str, table: BudgetTable, currencies: Collection[str] | None) -> Budget:
    unit = table.unit
    if unit not in UNITS and currencies is not None and unit not in currencies:
        known = {*UNITS, *currencies}
        reason = f"{unit!r} is neither a unit nor the currency of a price{nearest(unit, known, list_all=True)}"
        raise BadDocument(file, f"{path}.unit", reason)
    try:
        amount = Decimal(str(table.amount))
    except InvalidOperation as error:
        raise BadDocument(file, f"{path}.amount", f"{str(table.amount)[:40]!r} is not an amount") from error
    most = 10**15 if unit == "tokens" else _MOST
    units = amount * scale_of(unit) if amount.is_finite() and abs(amount) <= most else Decimal(0)
    if units < 1 or units != units.to_integral_value():
        decimals = "a whole number" if unit == "tokens" else "with at most nine decimals"
        raise BadDocument(file, f"{path}.amount", f"must be above 0 and at most {most}, {decimals}")
    return Budget(unit=unit, amount=int(units), period=Period(table.period), warn=table.warn, stop=table.stop)
