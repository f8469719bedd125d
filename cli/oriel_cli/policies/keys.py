"""`oriel keys new`: makes an API key. The key is shown once; documents hold only its SHA-256."""

import argparse
import hashlib
import re
import secrets
from datetime import UTC, datetime, timedelta
from pathlib import Path

from oriel_cli.errors import CommandFailed
from oriel_cli.policies.key_documents import add_key, in_toml, key_table

KEY_BYTES = 32
_LASTS = re.compile(r"([1-9][0-9]{0,4})([hdw])\Z")
_UNITS = {"h": "hours", "d": "days", "w": "weeks"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._@-]{0,127}\Z")
_TIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}\Z")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    new = actions.add_parser("new", help="print a fresh key once, and the line for tenants.toml that accepts it")
    new.add_argument("--tenant", help="whose key it will be; needed for --write")
    new.add_argument("--name", default="", help="what explanations call it, such as the machine that uses it")
    new.add_argument("--expires", metavar="90d", help="hours, days or weeks from now (12h, 90d, 4w), or a date")
    new.add_argument("--tier", default="", help="by which its calls are served, instead of the tenant's; a lower one")
    new.add_argument(
        "--write", type=Path, metavar="FILE", help="also add it to the tenant in this document (.toml or .ndjson)"
    )


def run(args: argparse.Namespace) -> int:
    if args.name and not _NAME.match(args.name):
        raise CommandFailed("a name must have 1 to 128 letters, digits, blanks, dots, dashes, underscores or @")
    expires = expiry(args.expires, datetime.now(UTC)) if args.expires else None
    if args.tier and not _TIER.match(args.tier):
        raise CommandFailed(f"--tier {args.tier[:40]!r} cannot be the name of a tier")
    key, digest = new_key()
    table = key_table(digest, name=args.name, expires=expires, tier=args.tier)
    namesakes = 0
    if args.write is not None:
        if not args.tenant:
            raise CommandFailed("--write needs --tenant NAME, the tenant that gets the key")
        # Before the key is shown: what was shown has to work.
        namesakes = add_key(args.write, args.tenant, table)
    print(f"key (shown once, give it to the tenant):\n  {key}\n")
    if args.write is not None:
        print(f"added to tenant {args.tenant} in {args.write}; a gateway that watches it takes it within a second")
        if args.name and namesakes > 1:
            print(f"tenant {args.tenant} now has {namesakes} keys named {args.name!r}: remove those that are not used")
        return 0
    whose = f"[tenants.{args.tenant}]" if args.tenant else "the tenant"
    print(f"for {whose} in tenants.toml:\n  keys = [{in_toml(table)}]")
    return 0


def new_key() -> tuple[str, str]:
    """A fresh key of 256 random bits and the lower-case hex SHA-256 of its UTF-8 bytes."""
    key = f"oriel_{secrets.token_urlsafe(KEY_BYTES)}"
    return key, hashlib.sha256(key.encode()).hexdigest()


def expiry(text: str, now: datetime) -> datetime:
    """`90d` from `now`, or an ISO date or time (UTC unless it says otherwise). Raises CommandFailed."""
    match = _LASTS.match(text)
    try:
        if match:
            return (now + timedelta(**{_UNITS[match[2]]: int(match[1])})).replace(microsecond=0)
        moment = datetime.fromisoformat(text)
    except (ValueError, OverflowError) as error:
        raise CommandFailed(
            f"--expires {text[:40]!r} is neither a duration such as 90d nor a date such as 2027-01-31"
        ) from error
    moment = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).astimezone(UTC).replace(microsecond=0)
    if moment <= now:
        raise CommandFailed("--expires is in the past")
    return moment
