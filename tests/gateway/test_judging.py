"""The order of judging stands once: a rule that is added to it holds for every protocol."""

import json
from pathlib import Path

from ..patched import output_of

JUDGING = "gateway/oriel_gateway/ingress/judging.py"
PLACE = "    gate = gateway.pools[target.pool]\n    view.fits(gate, target)\n"
RULE = """    if view.header("x-embargo") is not None:
        raise Refused(Outcome.TIER_NOT_ALLOWED, "an embargo")
"""


def test_a_new_refusal_in_the_one_place_is_seen_over_every_protocol(tmp_path: Path) -> None:
    edits = {
        JUDGING: [
            (PLACE, PLACE + RULE),
            ("from oriel_gateway.errors import Refused\n", "from oriel_gateway.errors import Outcome, Refused\n"),
        ]
    }
    program = "from tests.gateway.four_protocols import main; main('x-embargo')"
    ways = ("HTTP/1.1", "a recognised head", "HTTP/2", "gRPC")
    assert json.loads(output_of(tmp_path, edits, program)) == dict.fromkeys(ways, "tier_not_allowed")
