"""Adds a key to a tenant's document and changes nothing else in it, not even a comment.

A TOML document is edited as text, then both texts are read and compared: unless the new one means exactly the old one
plus the key, nothing is written.
"""

import fcntl
import os
import re
import tempfile
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from oriel_cli.errors import CommandFailed
from oriel_policies.documents import Snapshot, compile_documents
from oriel_policies.errors import BadDocument


def key_table(digest: str, *, name: str = "", expires: datetime | None = None, tier: str = "") -> dict[str, Any]:
    """A key as a document holds it: the SHA-256, and what is given of the rest."""
    given = {"name": name, "expires": expires, "tier": tier}
    return {"sha256": digest, **{field: value for field, value in given.items() if value}}


def in_toml(key: dict[str, Any]) -> str:
    """The inline table of a `key_table`."""
    fields = [
        f"{field} = {value:%Y-%m-%dT%H:%M:%SZ}" if isinstance(value, datetime) else f'{field} = "{value}"'
        for field, value in key.items()
    ]
    return f"{{ {', '.join(fields)} }}"


def add_key(path: Path, tenant: str, key: dict[str, Any]) -> int:
    """Add a `key_table` to `tenant` in the document `path`, at once or not at all. Return how many keys of its name the
    tenant has now. Raises CommandFailed, also if a gateway would refuse the document's folder with the key in it.
    """
    with _alone(path):
        after = _add_key(path, tenant, key)
    return sum(other.tenant.name == tenant and other.name == key.get("name", "") for other in after.keys.values())


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Lock the document's folder: of two writers at once, one would lose its key."""
    try:
        folder = os.open(path.resolve().parent, os.O_RDONLY)
    except OSError as error:
        raise CommandFailed(f"'{path}' cannot be read: {error.strerror}") from error
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _add_key(path: Path, tenant: str, key: dict[str, Any]) -> Snapshot:
    try:
        with path.open(encoding="utf-8", newline="") as file:  # line ends as they are
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandFailed(f"'{path}' cannot be read: {getattr(error, 'strerror', None) or 'not UTF-8'}") from error
    changed = _in_lines(text, tenant, key) if path.suffix == ".ndjson" else _in_toml(text, tenant, key)
    if changed is None:
        raise CommandFailed(
            f"'{path}' has no tenant {tenant!r} in a form that can be edited safely: run this without --write and add "
            "the line by hand"
        )
    after = _compiled(path, changed)
    _replace(path, changed)
    return after


def _compiled(path: Path, text: str) -> Snapshot:
    """Compile the document's folder with this text in the document's place. Raises CommandFailed."""
    from oriel_gateway.documents.source import FolderSource

    try:
        return compile_documents({**FolderSource(path.parent).read(), path.name: text.encode()})
    except BadDocument as bad:
        raise CommandFailed(f"{bad} (the key is not written: a gateway would refuse these policies)") from bad


def _in_lines(text: str, tenant: str, key: dict[str, Any]) -> str | None:
    lines = text.split("\n")
    for number, line in enumerate(lines):
        try:
            table = msgspec.json.decode(line) if line.strip() else None
        except msgspec.DecodeError:
            continue
        if isinstance(table, dict) and table.get("name") == tenant:
            keys = table.setdefault("keys", [])
            if not isinstance(keys, list):
                return None
            keys.append(key)
            lines[number] = msgspec.json.encode(table).decode()
            return "\n".join(lines)
    return None


def _in_toml(text: str, tenant: str, key: dict[str, Any]) -> str | None:
    try:
        wanted = tomllib.loads(text)
        table = wanted["tenants"][tenant]
        table.setdefault("keys", []).append(key)
    except (tomllib.TOMLDecodeError, KeyError, TypeError, AttributeError):
        return None
    entry = in_toml(key)
    name = re.escape(tenant)
    header = re.compile(rf"""^[ \t]*\[[ \t]*tenants[ \t]*\.[ \t]*(?:{name}|"{name}"|'{name}')[ \t]*\][^\n]*\n?""", re.M)
    for found in header.finditer(text):
        start = found.end()
        following = re.compile(r"^[ \t]*\[", re.M).search(text, start)
        end = following.start() if following else len(text)
        keys = re.compile(r"^[ \t]*keys[ \t]*=[ \t]*\[", re.M).search(text, start, end)
        if keys is not None:
            comma = "" if text[keys.end() :].lstrip()[:1] == "]" else ", "
            changed = f"{text[: keys.end()]}{entry}{comma}{text[keys.end() :]}"
        else:
            line_end = "" if text[:start].endswith("\n") else "\n"
            changed = f"{text[:start]}{line_end}keys = [{entry}]\n{text[start:]}"
        if _same(changed, wanted, tenant):
            return changed
    return None


def _same(changed: str, wanted: dict[str, Any], tenant: str) -> bool:
    """Tell whether the text means `wanted`, in any order of the tenant's keys."""
    try:
        got = tomllib.loads(changed)
        for document in (got, wanted):
            document["tenants"][tenant]["keys"].sort(key=lambda key: str(key["sha256"]))
    except (tomllib.TOMLDecodeError, KeyError, TypeError):
        return False
    return got == wanted


def _replace(path: Path, text: str) -> None:
    """Replace the document at once: a reader sees the old one or the new one."""
    try:
        old = path.stat()
        descriptor, name = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.resolve().parent)
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as file:
                file.write(text)
                if (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(file.fileno(), old.st_uid, old.st_gid)  # the gateway may run as someone else than we
                os.fchmod(file.fileno(), old.st_mode & 0o777)
            os.replace(name, path.resolve())
        except OSError:
            os.unlink(name)
            raise
    except OSError as error:
        raise CommandFailed(f"'{path}' cannot be written: {error.strerror}") from error
