"""Results of checks."""

from dataclasses import dataclass
from typing import Literal

EXPIRY_WARNING_S = 30 * 86400.0
MAX_SKEW_S = 30.0  # half of what a token may be off


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """check: name of the check; what: a sentence; fix: what to do, "" if nothing."""

    check: str
    status: Literal["ok", "warn", "fail"]
    what: str
    fix: str = ""


def good(check: str, what: str) -> Finding:
    return Finding(check=check, status="ok", what=what)


def warn(check: str, what: str, fix: str) -> Finding:
    return Finding(check=check, status="warn", what=what, fix=fix)


def fail(check: str, what: str, fix: str) -> Finding:
    return Finding(check=check, status="fail", what=what, fix=fix)
