"""The flags that several servers have, and the folders for files that outlive a server."""

import argparse
import os
from pathlib import Path

from oriel_wire.objects.client import Location, location_of
from oriel_wire.objects.errors import BadStoreUrl
from oriel_wire.process.flags import PLAIN, Flag, Group

TICKET_KEYS = "ORIEL_TICKET_KEYS"  # keys that sign the tickets of requests to logic servers
LOOPBACK = ("127.0.0.0/8", "::1")


def usage_flag(group: Group = PLAIN) -> dict[str, tuple[Flag, ...]]:
    """The metadata of the field that `usage_folder` fills."""
    return group.flag(
        "--usage",
        dest="usage",
        metavar="DIR",
        help="where the usage of tenants is recorded (default: ORIEL_STATE, else ~/.local/state/oriel); 'none' "
        "records nothing",
    )


def log_format_flag() -> dict[str, tuple[Flag, ...]]:
    """The metadata of a field whose value `oriel` has put into the environment before the command runs."""
    return PLAIN.flag(
        "--log-format",
        choices=("text", "json"),
        help="lines for people, or JSON (default: ORIEL_LOG_FORMAT, else text)",
    )


def usage_store_flag(group: Group = PLAIN) -> dict[str, tuple[Flag, ...]]:
    return group.flag(
        "--usage-store",
        type=object_store,
        metavar="URL",
        help="object store that takes the records of each minute: s3://bucket/prefix, gs://bucket/prefix, "
        "az://account/container/prefix (default: none, they stay in the folder)",
    )


def object_store(url: str) -> Location | None:
    """Return the object store that the value of a flag names, None for an empty one. Raises ArgumentTypeError."""
    try:
        return location_of(url) if url else None
    except BadStoreUrl as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def trusted_peer_flag(group: Group = PLAIN) -> dict[str, tuple[Flag, ...]]:
    return group.flag(
        "--trusted-peer",
        action="append",
        metavar="NETWORK",
        help="address or network whose deadline and tier headers count (repeatable; default: loopback)",
    )


def usage_folder(text: str | None) -> Path | None:
    """Return the folder of the usage ledger from the value of `--usage`; None if nothing is recorded."""
    return None if text == "none" else Path(text) if text else state_folder()


def state_folder() -> Path:
    """Return the folder for files that outlive a server: ORIEL_STATE, else one of the user's."""
    if state := os.environ.get("ORIEL_STATE"):
        return Path(state)
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / "oriel"


def cache_folder(name: str) -> Path:
    """Return a folder of this user for files that can be made again."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base, "oriel", name)
