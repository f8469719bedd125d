"""Results of checks."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

EXPIRY_WARNING_S = 30 * 86400.0
MAX_SKEW_S = 30.0  # half of what a token may be off


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check. check: its name. what: a sentence about it. fix: the remedy, "" for none."""

    status: Literal["ok", "warn", "fail"]
    check: str
    what: str
    fix: str = ""


good, warn, fail = partial(Finding, "ok"), partial(Finding, "warn"), partial(Finding, "fail")
