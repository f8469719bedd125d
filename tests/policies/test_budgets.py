"""Budgets: what some use is of one, and which documents have them."""

from dataclasses import replace
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oriel_policies.bounds.calendar import Period
from oriel_policies.bounds.kinds import Counts
from oriel_policies.bounds.limits import bounds, policy_item, state_item
from oriel_policies.documents import compile_documents
from oriel_policies.documents.packed import pack, unpack
from oriel_policies.errors import BadDocument
from oriel_policies.metering.budgets import Budget, Use, costs, spent
from oriel_policies.metering.prices import NANO, Price
from oriel_policies.promise.explain import ExplainedCall, explain

COUNT = st.integers(0, 10**15)
PRICES = [
    Price(name="base", device_class="", currency="EUR", valid_from="2026-01-01", million_tokens_in=NANO, gib_out=NANO),
    Price(name="gpu", device_class="gpu", currency="EUR", valid_from="2026-01-01", device_hour=3600 * NANO),
    Price(name="dear", device_class="gpu", currency="EUR", valid_from="2026-06-01", device_hour=7200 * NANO),
    Price(name="usd", device_class="gpu", currency="USD", valid_from="2026-01-01", device_hour=NANO),
]
DOCUMENT = """
[tiers.gold]
band = 0
target_ms = 2000
[pools.p]
endpoints = ["127.0.0.1:1"]
[[routes]]
model = "*"
pool = "p"
[prices.base]
currency = "EUR"
valid_from = 2026-01-01
million_tokens_in = 1
[tenants.t]
tier = "gold"
models = ["*"]
keys = [{ sha256 = "SHA" }]
""".replace("SHA", sha256(b"k").hexdigest())


def compiled(budgets: str) -> tuple[Budget, ...]:
    return compile_documents({"a.toml": f"{DOCUMENT}budgets = {budgets}\n".encode()}).tenants["t"].budgets


def test_money_is_counted_by_class_day_and_currency() -> None:
    use = Use(device_ns={"gpu": 2 * NANO, "unknown": 5 * NANO, "": NANO}, tokens_in=500_000, bytes_out=1 << 29)
    assert spent("EUR", use, PRICES, "2026-02-01") == 2 * NANO + NANO // 2 + NANO // 2
    assert spent("EUR", use, PRICES, "2026-06-01") == 4 * NANO + NANO
    assert spent("EUR", use, PRICES, "2025-12-31") == 0, "use without a price costs nothing"
    assert spent("USD", use, PRICES, "2026-02-01") == round(2 * NANO / 3600)
    assert spent("GBP", use, PRICES, "2026-02-01") == 0


def test_the_use_in_a_tier_with_a_price_of_its_own_costs_that() -> None:
    base = Price(name="base", device_class="", currency="EUR", valid_from="2026-02-01", million_tokens_out=2 * NANO)
    prices = [base, replace(base, name="gold", tier="gold", valid_from="2026-01-01", million_tokens_out=3 * NANO)]
    uses = [Use(tier=tier, tokens_out=10**6) for tier in ("gold", "bronze", "")]
    assert [spent("EUR", use, prices, "2026-03-01") for use in uses] == [3 * NANO, 2 * NANO, 2 * NANO]
    assert costs(uses, prices, "2026-03-01") == {"EUR": "7.000000000"}
    assert costs(uses, prices, "2026-01-05") == {"EUR": "3.000000000"}


@given(st.dictionaries(st.sampled_from(["", "gpu", "x"]), COUNT, max_size=3), COUNT, COUNT, COUNT)
def test_time_and_tokens_are_their_sums_and_money_never_shrinks(
    device_ns: dict[str, int], cpu_ns: int, tokens_in: int, tokens_out: int
) -> None:
    use = Use(device_ns=device_ns, cpu_ns=cpu_ns, tokens_in=tokens_in, tokens_out=tokens_out)
    more = Use(device_ns=device_ns, cpu_ns=cpu_ns, tokens_in=tokens_in + 10**6, tokens_out=tokens_out)
    assert spent("device_seconds", use, [], "2026-01-01") == sum(device_ns.values())
    assert spent("cpu_seconds", use, [], "2026-01-01") == cpu_ns
    assert spent("tokens", use, [], "2026-01-01") == tokens_in + tokens_out
    assert 0 <= spent("EUR", use, PRICES, "2026-02-01") < spent("EUR", more, PRICES, "2026-02-01")


def test_a_document_has_budgets_and_a_packed_one_the_same() -> None:
    text = (
        '[{ amount = "12.5", unit = "EUR" }, { amount = 5, unit = "tokens", period = "day", warn = 0.5, stop = false }]'
    )
    money, tokens = compiled(text)
    assert money == Budget(unit="EUR", amount=12_500_000_000, period=Period.MONTH)
    assert tokens == Budget(unit="tokens", amount=5, period=Period.DAY, warn=0.5, stop=False)
    assert (money.name, tokens.name) == ("budget-EUR-month", "budget-tokens-day")
    snapshot = compile_documents({"a.toml": f"{DOCUMENT}budgets = {text}\n".encode()})
    assert unpack(memoryview(pack(snapshot))).tenants["t"].budgets == (money, tokens)


@pytest.mark.parametrize(
    ("budget", "place", "says"),
    [
        ('{ amount = 1, unit = "EUX" }', ".unit", "did you mean 'EUR'"),
        ('{ amount = 1, unit = "EUR", period = "year" }', ".period", "year"),
        ('{ amount = 0, unit = "EUR" }', ".amount", "above 0"),
        ('{ amount = -1, unit = "EUR" }', ".amount", "above 0"),
        ('{ amount = "many", unit = "EUR" }', ".amount", "is not an amount"),
        ('{ amount = "1e400", unit = "EUR" }', ".amount", "above 0"),
        ('{ amount = "nan", unit = "EUR" }', ".amount", "above 0"),
        ('{ amount = 1.5, unit = "tokens" }', ".amount", "a whole number"),
        ('{ amount = "0.0000000001", unit = "EUR" }', ".amount", "nine decimals"),
        ('{ amount = 1, unit = "EUR", warn = 0 }', ".warn", "> 0"),
        ('{ amount = 1, unit = "EUR" }, { amount = 2, unit = "EUR" }', "", "already"),
    ],
)
def test_bad_budgets_are_refused_with_their_place(budget: str, place: str, says: str) -> None:
    with pytest.raises(BadDocument) as caught:
        compiled(f"[{budget}]")
    assert "tenants.t.budgets[" in str(caught.value) and f"]{place}:" in str(caught.value)
    assert says in str(caught.value)


def test_more_budgets_than_are_kept_are_refused() -> None:
    with pytest.raises(BadDocument, match="at most 8 budgets"):
        compiled(str([{"a": 1}] * 9).replace("{'a': 1}", '{ amount = 1, unit = "EUR" }'))


def test_only_budgets_that_stop_calls_admit_them_and_explain_tells_of_all() -> None:
    text = '[{ amount = "0.5", unit = "EUR" }, { amount = 7, unit = "tokens", stop = false }]'
    snapshot = compile_documents({"a.toml": f"{DOCUMENT}budgets = {text}\n".encode()})
    key = snapshot.keys[sha256(b"k").digest()]
    says = [step.says for step in explain(snapshot, key, ExplainedCall(model="m"), now=0.0) if step.stage == "limit"]
    assert says == [
        "budgets: 0.5 EUR a month, a warning from 80%, calls are refused once it is spent; "
        "7 tokens a month, a warning from 80%, calls go on once it is spent"
    ]
    only_told = text.replace('unit = "EUR"', 'unit = "EUR", stop = false')
    told = compile_documents({"a.toml": f"{DOCUMENT}budgets = {only_told}\n".encode()})
    tenant = told.tenants["t"]
    assert tenant.budgets and tenant.allowances_for("model", "m", "r") == ()
    assert len(snapshot.tenants["t"].allowances_for("model", "m", "r")) == 1
    steps = explain(told, told.keys[sha256(b"k").digest()], ExplainedCall(model="m"), now=0.0)
    assert any("calls go on" in step.says for step in steps)


def test_headers_name_a_budget_in_whole_units() -> None:
    snapshot = compile_documents({"a.toml": f'{DOCUMENT}budgets = [{{ amount = "12.5", unit = "EUR" }}]\n'.encode()})
    (bound,) = bounds(snapshot.tenants["t"].allowances[0])
    assert bound.counts is Counts.BUDGET and policy_item(bound, 86400.0) == '"budget-EUR-month";q=12;qu="EUR";w=86400'
    assert state_item(bound, 3_900_000_000.0, 9.5) == '"budget-EUR-month";r=3;t=10'
    assert state_item(bound, -1.0, 9.5) == '"budget-EUR-month";r=0;t=10'
