"""The bounds of every number in the documents: the least and the most are taken, one step beyond each is refused."""

import math
import re

import pytest

from oriel_policies.documents import compile_documents
from oriel_policies.documents.reading import nearest
from oriel_policies.errors import BadDocument

TIER = "[tiers.gold]\nband = 0\ntarget_ms = 100\n"
POOL = "[pools.p]\nendpoints = ['a:1']\n"
SCALING = TIER + "[pools.p]\ndiscover = 'dns:a:1'\n[pools.p.scaling]\n"
ISSUER = "[issuers.i]\nissuer = 'https://i'\naudience = ['a']\njwks = 'https://i/keys'\n"
ROUTE = POOL + "[pools.q]\nendpoints = ['b:1']\n[[routes]]\nmodel = 'm'\n"
ROLLED = ROUTE + "split = [{ pool = 'p', weight = 1 }, { pool = 'q', weight = 1 }]\n"
TENANT = TIER + "[tenants.t]\ntier = 'gold'\nkeys = [{ sha256 = '%s' }]\n" % ("0" * 64)
PRICE = "[prices.x]\nclass = 'gpu'\ncurrency = 'EUR'\nvalid_from = 2026-11-01\n"
DAY_MS = 86_400_000
COUNTED = 10**12
UP, DOWN = math.inf, -math.inf


def whole(least: int | None, most: int | None) -> tuple[list[float], list[float]]:
    """Return the numbers that are taken and those that are refused, for whole numbers."""
    ends = [end for end in (least, most) if end is not None]
    return list(ends), [*([] if least is None else [least - 1]), *([] if most is None else [most + 1])]


def real(least: float, most: float) -> tuple[list[float], list[float]]:
    """Return the same for other numbers, both ends included."""
    return [least, most], [math.nextafter(least, DOWN), math.nextafter(most, UP)]


def between(least: float, most: float) -> tuple[list[float], list[float]]:
    """Return the same for other numbers, without the ends."""
    return [math.nextafter(least, UP), math.nextafter(most, DOWN)], [least, most]


NUMBERS = [
    ("[tiers.gold]\ntarget_ms = 1\nband = #", whole(0, 255)),
    ("[tiers.gold]\nband = 0\ntarget_ms = #", whole(1, DAY_MS // 4)),
    ("[tiers.gold]\nband = 0\ntarget_ms = 7\ngive_up_ms = #", whole(7, DAY_MS)),
    (TIER + "stream_max_ms = 50\nstream_idle_ms = #", whole(1, 50)),
    (TIER + "stream_idle_ms = 50\nstream_max_ms = #", whole(50, DAY_MS)),
    (TIER + "stream_idle_ms = 50\ntoken_ms = #", whole(1, 50)),
    (TIER + "objective = #", between(0.0, 1.0)),
    (POOL + "max_inflight = #", whole(1, None)),
    (POOL + "max_streams = #", whole(0, None)),
    (POOL + "max_queue = #", whole(0, None)),
    (POOL + "max_queue_bytes = #", whole(0, None)),
    (POOL + "max_body_bytes = #", whole(0, None)),
    (POOL + "max_response_bytes = #", whole(1, None)),
    (POOL + "connect_timeout_ms = #", whole(1, DAY_MS)),
    (POOL + "idle_timeout_ms = #", whole(1, DAY_MS)),
    (POOL + "probe_interval_ms = #", whole(1, DAY_MS)),
    ("[pools.p]\nendpoints = ['a:#']", whole(1, 65535)),
    (TIER + POOL + "triton_priorities = { gold = # }", whole(1, 2**31 - 1)),
    (SCALING + "maximum = 5\nminimum = #", whole(0, 5)),
    (SCALING + "minimum = 3\nmaximum = #", whole(3, 10_000)),
    (SCALING + "minimum = 0\nmaximum = #", whole(1, 10_000)),
    (SCALING + "minimum = 0\nmaximum = 5\nspare = #", whole(0, 5)),
    (SCALING + "minimum = 0\nmaximum = 5\nstart_ms = #", whole(1000, DAY_MS)),
    (SCALING + "minimum = 0\nmaximum = 5\nkeep_alive_ms = #", whole(1000, DAY_MS)),
    (SCALING + "minimum = 0\nmaximum = 5\ncapacity = #", real(0.001, 1_000_000.0)),
    (SCALING + "minimum = 0\nmaximum = 5\nmiss_share = #", between(0.0, 1.0)),
    (SCALING + "minimum = 0\nmaximum = 5\nhold_ms = #", whole(0, DAY_MS)),
    (SCALING + "minimum = 0\nmaximum = 5\ntier_hold_ms = { gold = # }", whole(0, DAY_MS)),
    (SCALING + "minimum = 0\nmaximum = 5\nweights = { gold = # }", real(0.0, 1.0)),
    (
        SCALING + "minimum = 0\nmaximum = 5\n[[pools.p.scaling.schedule]]\nfrom = '08:00'\nto = '18:00'\nminimum = #",
        whole(1, 5),
    ),
    (ISSUER + "leeway_s = #", whole(0, 600)),
    (ISSUER + "refresh_s = #", whole(1, 86_400)),
    (ROUTE + "pool = 'p'\ndeterministic = true\ncache_s = #", real(0.0, 86_400.0)),
    (ROUTE + "pool = 'p'\nidempotent = true\nhedge_ms = #", whole(0, 600_000)),
    (ROUTE + "pool = 'p'\nshadow = { pool = 'q', percent = # }", ([5e-324, 100.0], [0.0, math.nextafter(100.0, UP)])),
    (ROUTE + "split = [{ pool = 'p', weight = 1 }, { pool = 'q', weight = # }]", real(0.0, 1e6)),
    (ROLLED + "rollback = { canary = 'q', min_calls = # }", whole(20, 1_000_000)),
    (ROLLED + "rollback = { canary = 'q', margin = # }", ([0.0, math.nextafter(1.0, DOWN)], [-5e-324, 1.0])),
    (ROLLED + "rollback = { canary = 'q', agreement = # }", ([0.0, math.nextafter(1.0, DOWN)], [-5e-324, 1.0])),
    (ROLLED + "rollback = { canary = 'q', compare_percent = # }", real(0.0, 100.0)),
    (TENANT + "weight = #", real(0.001, 1000.0)),
    (TENANT + "limit = { requests_per_s = # }", real(1e-6, 1e6)),
    (TENANT + "limit = { requests_per_s = 1.0, burst = # }", whole(1, 10**6)),
    (TENANT + "limit = { bytes_per_s = # }", whole(1, COUNTED)),
    (TENANT + "limit = { bytes_per_s = 5, bytes_burst = # }", whole(1, COUNTED)),
    (TENANT + "limit = { tokens_per_minute = # }", whole(1, COUNTED)),
    (TENANT + "limit = { tokens_per_minute = 5, tokens_burst = # }", whole(1, COUNTED)),
    *(
        (TENANT + "limit = { " + field + " = # }", whole(1, COUNTED))
        for field in (
            "concurrency",
            "requests_per_day",
            "requests_per_month",
            "compute_ms_per_day",
            "compute_ms_per_month",
        )
    ),
    (PRICE + "device_hour = #", whole(0, 10**9)),
    (PRICE + "cpu_core_hour = #", whole(0, 10**9)),
    (PRICE + "gib_out = #", whole(0, 10**9)),
    (PRICE + "million_tokens_in = #", whole(0, 10**9)),
    (PRICE + "million_tokens_out = #", whole(0, 10**9)),
    (TENANT + "budgets = [{ unit = 'tokens', period = 'day', amount = # }]", whole(1, 10**15)),
    (
        TENANT + PRICE
        + "[tenants.u]\ntier = 'gold'\nbudgets = [{ unit = 'EUR', period = 'day', amount = '#' }]",
        whole(None, 10**9),
    ),
    (
        TENANT + "budgets = [{ unit = 'tokens', period = 'day', amount = 5, warn = # }]",
        ([5e-324, 1.0], [0.0, math.nextafter(1.0, UP)]),
    ),
]  # fmt: skip


@pytest.mark.parametrize(("text", "numbers"), NUMBERS, ids=[text.splitlines()[-1][-60:] for text, _ in NUMBERS])
def test_the_ends_of_a_range_are_taken_and_what_is_beyond_is_refused(
    text: str, numbers: tuple[list[float], list[float]]
) -> None:
    taken, refused = numbers
    for number in taken:
        compile_documents({"a.toml": text.replace("#", str(number)).encode()})
    for number in refused:
        with pytest.raises(BadDocument) as caught:
            compile_documents({"a.toml": text.replace("#", str(number)).encode()})
        field = re.search(r"(\w+) = #", text)
        assert field is None or field[1] in str(caught.value)


WINDOW = "[[pools.p.scaling.schedule]]\nfrom = '08:00'\nto = '18:00'\nminimum = 1\n"
CURRENCIES = [PRICE.replace("prices.x", f"prices.{name}").replace("EUR", name) for name in ("EUR", "USD", "GBP", "CHF")]
BUDGETS = [
    f"{{ unit = '{unit}', period = '{period}', amount = 1 }}"
    for unit in ("EUR", "USD", "GBP", "CHF", "tokens")
    for period in ("day", "month")
]


@pytest.mark.parametrize(
    ("text", "entries", "most"),
    [
        (ROUTE + "split = [#]", ["{ pool = 'p', weight = 1 }, "] * 65, 64),
        (SCALING + "minimum = 0\nmaximum = 5\n#", [WINDOW] * 51, 50),
        (TENANT + "budgets = [#]\n" + "".join(CURRENCIES), [f"{each}, " for each in BUDGETS[:9]], 8),
    ],
)
def test_a_list_is_as_long_as_its_bound_and_not_longer(text: str, entries: list[str], most: int) -> None:
    compile_documents({"a.toml": text.replace("#", "".join(entries[:most])).encode()})
    with pytest.raises(BadDocument, match=f"at most {most} "):
        compile_documents({"a.toml": text.replace("#", "".join(entries)).encode()})


def test_a_few_known_names_are_listed_and_many_are_not() -> None:
    names = {f"{letter}{letter}" for letter in "bcdfghjklmnp"}
    assert nearest("zzzzzz", names, list_all=True) == f": there are {', '.join(sorted(names))}"
    assert nearest("zzzzzz", {*names, "qq"}, list_all=True) == "" == nearest("zzzzzz", names)
    assert nearest("zzzzzz", set(), list_all=True) == ""


def test_a_name_is_looked_for_among_500_names_and_by_128_letters() -> None:
    names = {f"name-{number}" for number in range(500)}
    assert "did you mean" in nearest("name-10x", names)
    assert nearest("name-10x", {*names, "one-more"}) == ""
    assert nearest("n" * 128, {"n" * 127}) and not nearest("n" * 129, {"n" * 128})


@pytest.mark.parametrize(
    "text", [PRICE + "device_hour = '#'", TENANT + "budgets = [{ unit = 'tokens', period = 'day', amount = '#' }]"]
)
def test_an_amount_that_is_none_is_named_by_its_first_40_letters(text: str) -> None:
    said = "abcdefghij" * 6
    with pytest.raises(BadDocument) as caught:
        compile_documents({"a.toml": text.replace("#", said).encode()})
    assert caught.value.reason == f"{said[:40]!r} is not an amount"


@pytest.mark.parametrize("amount", ["0.000000001", "999999999.999999999"])
def test_money_has_nine_decimals_and_not_ten(amount: str) -> None:
    priced, budgeted = (
        PRICE + "device_hour = '#'\n",
        TENANT + PRICE + "[tenants.u]\ntier = 'gold'\nbudgets = [{ unit = 'EUR', amount = '#' }]",
    )
    nano = int(amount.replace(".", ""))
    assert compile_documents({"a.toml": priced.replace("#", amount).encode()}).prices["x"].device_hour == nano
    found = compile_documents({"a.toml": budgeted.replace("#", amount).encode()})
    assert found.tenants["u"].budgets[0].amount == nano
    for text in (priced, budgeted):
        with pytest.raises(BadDocument, match="nine decimals"):
            compile_documents({"a.toml": text.replace("#", f"{amount}1").encode()})
