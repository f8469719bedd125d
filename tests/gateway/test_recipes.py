"""The recipes of CONTRIBUTING.md for rules about requests: each names all the places, and they are enough.

A copy of the product is edited as its recipe says, and refuses over every protocol.
"""

import json
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..patched import ROOT, output_of

WAYS = ("HTTP/1.1", "a recognised head", "HTTP/2", "gRPC")
Edits = Mapping[str, Sequence[tuple[str, str]]]

FITS = "    gate = gateway.pools[target.pool]\n"
REFUSAL: Edits = {
    "gateway/oriel_gateway/ingress/judging.py": [
        (
            FITS,
            f'{FITS}    if view.header("x-embargo"):\n        raise Refused(Outcome.TIER_NOT_ALLOWED, "an embargo")\n',
        ),
        ("errors import Refused\n", "errors import Outcome, Refused\n"),
    ]
}

MONTH = "    requests_per_month: int | None = None\n"
LIMIT: Edits = {
    "policies/oriel_policies/documents/schema.py": [
        (MONTH, f"{MONTH}    requests_per_minute: int | None = None\n    minute_burst: int | None = None\n")
    ],
    "policies/oriel_policies/bounds/kinds.py": [
        (
            "LIMIT_KINDS = (\n",
            """LIMIT_KINDS = (
    LimitKind(
        field="requests_per_minute",
        burst="minute_burst",
        name="requests-minute",
        counts=Counts.REQUESTS,
        seconds=60.0,
        sentence="{amount:g} requests per minute, bursts of {burst}",
    ),
""",
        )
    ],
}

TIER = "    route: str | None = None\n    tier: str | None = None\n"
HEADER = f"{TIER}    team: str | None = None\n"
FIXED = "    if not route.headers and (not route.split"
SCOPE: Edits = {
    "policies/oriel_policies/documents/schema.py": [(TIER, HEADER)],
    "policies/oriel_policies/documents/promises.py": [
        (TIER, HEADER),
        ("        if self.route is not None:\n", "        if self.team is not None:\n            return True\n"
                                                 "        if self.route is not None:\n"),
    ],
    "gateway/oriel_gateway/routing/targets.py": [
        (FIXED, f"    if any(each.selector.team for each in tenant.allowances):\n        pass\n    el{FIXED.strip()}"),
        (
            "            target = self._made[route, side] = _made(self._make, route, side)\n        return target\n",
            """            target = self._made[route, side] = _made(self._make, route, side)
        teams = (None, header("x-team"))
        return replace(target, allowances=tuple(a for a in target.allowances if a.selector.team in teams))
""",
        ),
    ],
}  # fmt: skip


def refused(folder: Path, edits: Edits, header: str, limit: str = "") -> dict[str, str]:
    program = f"from tests.gateway.four_protocols import main; main({header!r}, {limit!r})"
    found: dict[str, str] = json.loads(output_of(folder, edits, program))
    return found


def test_a_new_refusal_in_the_one_place_is_seen_over_every_protocol(tmp_path: Path) -> None:
    assert refused(tmp_path, REFUSAL, "x-embargo") == dict.fromkeys(WAYS, "tier_not_allowed")


def test_a_new_limit_needs_its_row_and_its_field(tmp_path: Path) -> None:
    limit = "limit = { requests_per_minute = 1, minute_burst = 1 }"
    assert refused(tmp_path, LIMIT, "x-any", limit) == dict.fromkeys(WAYS, "rate_limited")


def test_a_scope_by_header_needs_three_files(tmp_path: Path) -> None:
    limit = 'limits = [{ team = "1", requests_per_s = 0.001, burst = 1 }]'
    assert len(SCOPE) == 3
    assert refused(tmp_path, SCOPE, "x-team", limit) == dict.fromkeys(WAYS, "rate_limited")
    others = "from tests.gateway.four_protocols import passed; passed('x-other', " + repr(limit) + ")"
    assert output_of(tmp_path, {}, others) == "200\n"


def test_the_recipe_names_every_file_that_names_a_limit() -> None:
    units = ("wire", "policies", "gateway", "logic", "inference", "cli", "tools", "docs")
    for name in ("compute_ms_per_month", "compute-month"):
        listed = subprocess.run(("git", "grep", "-l", name, "--", *units), cwd=ROOT, capture_output=True, text=True)
        recipe = (ROOT / "CONTRIBUTING.md").read_text().split("## Add a limit\n")[1].split("\n## ")[0]
        named = set(re.findall(r"`((?:policies|gateway|tests)/[a-z_/]+\.[a-z]+)`|\]\((docs/[a-z-]+\.md)\)", recipe))
        assert set(listed.stdout.split()) <= {first or second for first, second in named}
