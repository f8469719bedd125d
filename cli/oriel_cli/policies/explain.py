"""`oriel policies explain` prints what would apply to a call with a credential, never the credential itself."""

import argparse
import asyncio
import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from time import time

from oriel_cli.errors import CommandFailed
from oriel_policies.documents import ApiKey, Snapshot, compile_documents
from oriel_policies.errors import BadDocument
from oriel_policies.promise.explain import ExplainedCall, explain
from oriel_wire.objects.errors import BadStoreUrl

KEY_VARIABLE = "ORIEL_KEY"
_MAX_KEY = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `explain`."""
    who = parser.add_mutually_exclusive_group()
    who.add_argument("--key", help=f"API key or token; - reads it from standard input; default: ${KEY_VARIABLE}")
    who.add_argument("--tenant", help="instead of a credential: as if one of this tenant's had come")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model")
    what.add_argument("--service")
    parser.add_argument("--version", default="", help="of the model")
    parser.add_argument("--header", action="append", default=[], metavar="NAME:VALUE", help="may be repeated")
    parser.add_argument("--policies", default="policies", metavar="DIR|URL", help="default %(default)s")
    parser.add_argument("--json", action="store_true", help="for machines")


def read(where: str) -> Mapping[str, bytes]:
    """Read the files that a gateway would read, from a folder or an object store. Raises CommandFailed."""
    from oriel_gateway.documents.source import FolderSource

    try:
        if "://" in where:
            return asyncio.run(_fetched(where))
        return FolderSource(Path(where)).read()
    except BadStoreUrl as error:
        raise CommandFailed(str(error)) from error
    except BadDocument as bad:
        raise CommandFailed(f"'{where}': {bad.reason}") from bad


def snapshot_of(where: str) -> Snapshot:
    """Compile the documents of a folder or an object store. Raises CommandFailed."""
    try:
        return compile_documents(read(where))
    except BadDocument as bad:
        raise CommandFailed(str(bad)) from bad


async def _fetched(url: str) -> Mapping[str, bytes]:
    from oriel_gateway.app import mirror_of
    from oriel_gateway.documents.source import FolderSource, store_location
    from oriel_gateway.documents.stored import StoreFailed

    mirror = mirror_of(store_location(url), None)
    try:
        await mirror.start()
        return FolderSource(mirror.folder).read()
    except StoreFailed as error:
        raise CommandFailed(str(error)) from error
    finally:
        await mirror.close_all()


def run(args: argparse.Namespace) -> int:
    """Print one line per step of the decision; return 0 if the call would go to a pool, 1 if it would be refused."""
    try:
        documents = read(args.policies)
        snapshot = compile_documents(documents)
    except CommandFailed as failed:
        raise CommandFailed(f"{failed}; say with --policies where the documents are") from failed
    except BadDocument as bad:
        raise CommandFailed(f"{bad} (`oriel policies check` names all mistakes)") from bad
    headers = {}
    for line in args.header:
        name, colon, value = line.partition(":")
        if not colon:
            raise CommandFailed("--header takes NAME:VALUE")
        headers[name.strip().lower()] = value.strip()
    if args.tenant is not None:
        tenant = snapshot.tenants.get(args.tenant)
        if tenant is None:
            raise CommandFailed(f"no tenant is named {args.tenant!r}")
        key: ApiKey | None = ApiKey(tenant=tenant, expires_at=None)
    else:
        key = _identify(snapshot, _credential(args.key))
    call = ExplainedCall(model=args.model, service=args.service, version=args.version, headers=headers)
    steps = explain(snapshot, key, call, now=time(), documents=documents)
    refused = steps[-1].refused
    if args.json:
        listed = [{"room": step.stage, "says": step.says, "refused": step.refused or None} for step in steps]
        print(json.dumps({"served": not refused, "reason": refused or None, "steps": listed}))
    else:
        for step in steps:
            print(f"{step.stage:<9} {step.says}{f'  -> refused: {step.refused}' if step.refused else ''}")
    return 1 if refused else 0


def _credential(given: str | None) -> str:
    if given == "-":
        given = sys.stdin.readline(_MAX_KEY + 2)
    elif given is None:
        given = os.environ.get(KEY_VARIABLE)
    if not given or not given.strip():
        raise CommandFailed(
            f"the caller is missing: pass --key KEY, --key - (from standard input), --tenant T or set ${KEY_VARIABLE}"
        )
    return given.strip()


def _identify(snapshot: Snapshot, credential: str) -> ApiKey | None:
    digest = hashlib.sha256(credential.encode("utf-8", "surrogateescape")).digest()
    key = snapshot.keys.get(digest)
    if key is not None or not snapshot.issuers:
        return key
    from oriel_gateway.identity.keys import looks_like_token

    if not looks_like_token(credential):
        return None
    from oriel_gateway.identity.tokens import explain_token

    found, why = explain_token(snapshot, credential, digest)
    if found is None:
        raise CommandFailed(f"the token is not accepted: {why}")
    return found
