"""`oriel engines ls|build|verify|push|pull|rm`: the compiled artefacts (engines) of models in a folder, without a
server.

`build` makes them ahead of a deployment, on a machine like those that will serve; `push` and `pull` carry them there
through an object store.
"""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from oriel_cli.errors import CommandFailed
from oriel_cli.table import columns
from oriel_policies.artefacts.devices import Target, lacking, parse_targets
from oriel_policies.artefacts.fingerprint import key_of
from oriel_policies.artefacts.lifecycle import RefusalKind
from oriel_policies.artefacts.retirement import StoredArtefact
from oriel_wire.objects.client import location_of
from oriel_wire.objects.errors import ObjectStoreError
from oriel_wire.objects.opening import open_client, open_writer
from oriel_wire.process.flags import number
from oriel_wire.process.shared_settings import cache_folder

Folder = Any  # ArtefactFolder; the command line names units lazily

SHOWN_DIGITS = 12
MIN_PREFIX = 6
_COMPARE = "to compare its outputs with those of its model, give --model-repository"
_REBUILD = "`oriel engines build --again` makes it anew"
_ADVICE = {
    RefusalKind.OUTPUTS_DIFFER: "no server uses it: remove it with `oriel engines rm`, or allow larger errors with the "
    "parameter oriel.compile.tolerance",
    RefusalKind.NOT_COMPARED: "configure a model_warmup with inputs that the model takes",
    RefusalKind.TIMED_OUT: "give a larger --artefact-build-secs",
    RefusalKind.OUT_OF_MEMORY: "give a larger --artefact-build-memory",
    RefusalKind.NO_SPACE: "try again when there is room",
    RefusalKind.CHANGED: "try again",
}
_UNITS = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_whole_bytes = number(int, 1, (1 << 50) - 1)


def _targets(text: str) -> list[Target]:
    try:
        return parse_targets(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, text: str) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = actions.add_parser(name, help=text, description=f"{text}.")
        made.add_argument(
            "--artefact-folder",
            type=Path,
            default=None,
            metavar="DIR",
            help="where the artefacts are (default: ~/.cache/oriel/artefacts)",
        )
        made.add_argument("--json", action="store_true", help="print JSON")
        return made

    action("ls", "list the artefacts of the folder, and what was refused")
    build = action("build", "build the artefacts of a model repository's models, as a server would")
    verify = action("verify", "compare artefacts with their checksums; with a repository, their outputs as well")
    for made in (build, verify):
        made.add_argument(
            "--model-repository",
            type=Path,
            required=made is build,
            metavar="DIR",
            help="folder of models; those whose configuration has the parameter oriel.compile count",
        )
        made.add_argument(
            "--artefact-build-secs",
            type=number(float, 1, 86_400),
            default=600.0,
            metavar="S",
            help="time for one build, and for one check of its outputs (default 600)",
        )
        made.add_argument(
            "--artefact-build-memory",
            type=_whole_bytes,
            default=0,
            metavar="N",
            help="address space of the process that builds or checks (default: 2 GiB and 8 times the model's files)",
        )
    build.add_argument("models", metavar="MODEL", nargs="*", help="only these (default: all that ask for an artefact)")
    build.add_argument("--again", action="store_true", help="remove what is there, and any refusal, first")
    build.add_argument(
        "--for",
        dest="targets",
        type=_targets,
        default=[],
        metavar="DEVICE,...",
        help="for these devices, as nvidia-l4,a100 or cpu: builds what this machine can, and says what the others take",
    )
    verify.add_argument("fingerprints", metavar="FINGERPRINT", nargs="*", help="only these, or their beginnings")
    pushed = action("push", "store artefacts in an object store, for other machines like this one")
    pulled = action("pull", "fetch the artefacts that fit this machine from an object store")
    for made in (pushed, pulled):
        made.add_argument("url", metavar="URL", help="s3://bucket/prefix, gs://bucket/prefix, az://account/name/prefix")
    pushed.add_argument("fingerprints", metavar="FINGERPRINT", nargs="*", help="only these, or their beginnings")
    pulled.add_argument("--all", action="store_true", help="also those that do not fit this machine")
    remove = action("rm", "remove artefacts and refusals; servers keep what they have loaded")
    remove.add_argument("fingerprints", metavar="FINGERPRINT", nargs="*", help="these, or their beginnings")
    remove.add_argument("--refused", action="store_true", help="all refusals: the next load tries again")
    remove.add_argument("--all", action="store_true", help="everything")


def run(args: argparse.Namespace) -> int:
    from oriel_inference.artefacts.folder import ArtefactFolder
    from oriel_inference.errors import LoadFailed

    root = args.artefact_folder or cache_folder("artefacts")
    folder = ArtefactFolder(root, max_bytes=0)
    if args.action not in ("build", "pull") and not root.is_dir():
        if args.artefact_folder is not None:
            raise CommandFailed(f"{str(root)!r} is not a folder")
        return _print(args, [])
    try:
        actions = {"ls": _ls, "build": _build, "verify": _verify, "push": _push, "pull": _pull, "rm": _rm}
        return actions[args.action](folder, args)
    except LoadFailed as failure:
        raise CommandFailed(failure.reason) from failure
    except ObjectStoreError as error:
        raise CommandFailed(str(error)) from error
    except OSError as error:
        raise CommandFailed(f"the artefact folder {str(root)!r} cannot be used: {error.strerror}") from error


def _ls(folder: Folder, args: argparse.Namespace) -> int:
    stored = {each.fingerprint: each for each in folder.stored()}
    lines = [_line(folder, fingerprint, stored.get(fingerprint)) for fingerprint in _known(folder)]
    if not lines:
        return _print(args, [])
    heading = ("FINGERPRINT", "MODEL", "COMPILER", "BYTES", "AGE", "STATE", "REASON")
    rows = [
        (
            each["fingerprint"][:SHOWN_DIGITS],
            f"{each['model']}/{each['version']}" if each["version"] else each["model"] or "-",
            each["compiler"] or "-",
            each["bytes"] or "-",
            _age(each["used_s_ago"]),
            each["state"],
            each["reason"],
        )
        for each in lines
    ]
    return _print(args, lines, columns(heading, rows, right=range(3, 5)))


def _build(folder: Folder, args: argparse.Namespace) -> int:
    from oriel_inference.artefacts.offline import build_ahead, compilations
    from oriel_inference.artefacts.process import ArtefactRefused
    from oriel_inference.errors import LoadFailed

    lines: list[dict[str, Any]] = []
    for name, compilation in compilations(args.model_repository, args.models):
        if isinstance(compilation, str):
            lines.append({"model": name, "state": "failed", "reason": compilation})
            continue
        elsewhere = _elsewhere(compilation, args.targets)
        lines += [{"model": name, "for": device, "state": "elsewhere", "reason": why} for device, why in elsewhere]
        if args.targets and len(elsewhere) == len(args.targets):
            continue

        def progress(phase: str, seconds: float, name: str = name) -> None:
            print(f"{name}: {phase}{f', for {seconds:.0f} s' if seconds >= 1 else ''}", file=sys.stderr, flush=True)

        try:
            outcome, manifest = build_ahead(compilation, folder, _bounds(args), progress, again=args.again)
        except (ArtefactRefused, LoadFailed) as refused:
            lines.append({"model": name, "state": "refused", "reason": refused.reason})
            continue
        lines.append(
            {
                "model": name,
                "state": outcome,
                "reason": manifest.errors,
                "fingerprint": key_of(manifest.key).fingerprint,
                "bytes": manifest.size_bytes,
                "build_s": manifest.build_s,
            }
        )
    texts = [
        each["model"]
        + (f" for {each['for']}" if "for" in each else "")
        + f": {each['state']}"
        + (f" {each['fingerprint'][:SHOWN_DIGITS]}, {each['bytes']} bytes" if "fingerprint" in each else "")
        + (f", {each['reason']}" if each["reason"] else "")
        for each in lines
    ]
    wrong = any(each["state"] in ("failed", "refused", "elsewhere") for each in lines)
    return _print(args, lines, texts, "no model asks for an artefact") or int(wrong)


def _elsewhere(compilation: Any, targets: Sequence[Target]) -> list[tuple[str, str]]:
    """Return the devices for which this machine cannot build, each with what that takes."""
    from oriel_inference.errors import LoadFailed

    compiler = compilation.compiler
    found: list[tuple[str, str]] = []
    for target in targets:
        try:
            why = lacking(target, compiler.name, compiler.identity(compilation.place.options).device)
        except LoadFailed as missing:
            why = missing.reason
        if why:
            found.append((target.name, why))
    return found


def _verify(folder: Folder, args: argparse.Namespace) -> int:
    from oriel_inference.artefacts.folder import ArtefactDamaged
    from oriel_inference.artefacts.offline import compilations, unfit, verify_outputs

    compared = args.model_repository is not None
    stored = [each.fingerprint for each in folder.stored()]
    wanted = _chosen(stored, args.fingerprints) if args.fingerprints else sorted(stored)
    found: dict[str, dict[str, Any]] = {}
    for fingerprint in wanted:
        state, reason = "whole", "its files have their checksums"
        advice = "no model of the repository has it, so no outputs were compared" if compared else _COMPARE
        try:
            manifest = folder.find(fingerprint)
            if manifest is None:
                continue
            folder.copy(fingerprint, manifest, None)
            if why := unfit(key_of(manifest.key)):
                state, reason, advice = "unfit", why, ""
        except ArtefactDamaged as damaged:
            state, reason, advice = "damaged", str(damaged), "a server that needs it removes it and builds it again"
        found[fingerprint] = {"fingerprint": fingerprint, "state": state, "reason": reason, "advice": advice}
    if compared:
        for name, compilation in compilations(args.model_repository):
            if isinstance(compilation, str):
                raise CommandFailed(f"{name}: {compilation}")
            try:
                one = verify_outputs(compilation, folder, _bounds(args))
            except ArtefactDamaged:
                continue  # it is in the list already
            if one.fingerprint in wanted or not args.fingerprints:
                found.pop(one.fingerprint, None)
                found[f"{one.fingerprint} {name}"] = {"fingerprint": one.fingerprint, **_verified(name, one)}
    return _print_states(args, found.values(), "damaged", "disagrees", "failed")


def _verified(name: str, one: Any) -> dict[str, str]:
    """Return state, reason and advice for the artefact of one model, whose outputs were to be compared."""
    if not one.text:
        reason = f"there is no artefact of {name} for this machine"
        return {"state": "absent", "reason": reason, "advice": "`oriel engines build` makes it"}
    found = f"with {name}: {one.text}; tolerance {one.tolerance}"
    if one.refused is None:
        return {"state": "agrees", "reason": found, "advice": ""}
    if one.refused is RefusalKind.OUTPUTS_DIFFER:
        return {"state": "disagrees", "reason": found, "advice": _ADVICE[RefusalKind.OUTPUTS_DIFFER]}
    reason = f"its outputs could not be compared with {name}: {one.text}"
    return {"state": "failed", "reason": reason, "advice": _ADVICE.get(one.refused, _REBUILD)}


def _push(folder: Folder, args: argparse.Namespace) -> int:
    from oriel_inference.artefacts.objects import push

    stored = sorted(each.fingerprint for each in folder.stored())
    chosen = _chosen(stored, args.fingerprints) if args.fingerprints else stored
    location = location_of(args.url)

    async def copy() -> list[Any]:
        client, writer = open_client(location), open_writer(location)
        try:
            found = [await push(folder, client, writer, location.prefix, each) for each in chosen]
            return [each for each in found if each is not None]
        finally:
            await client.close()
            await writer.close()

    return _print_states(args, map(asdict, asyncio.run(copy())), "damaged")


def _pull(folder: Folder, args: argparse.Namespace) -> int:
    from oriel_inference.artefacts.objects import pull

    if wrong := folder.open():
        raise CommandFailed(wrong)
    location = location_of(args.url)

    async def copy() -> list[Any]:
        client = open_client(location)
        try:
            return [each async for each in pull(folder, client, location.prefix, everything=args.all)]
        finally:
            await client.close()

    return _print_states(args, map(asdict, asyncio.run(copy())), "damaged")


def _print_states(args: argparse.Namespace, found: Iterable[dict[str, Any]], *wrong: str) -> int:
    lines = list(found)
    texts = [
        f"{each['fingerprint'][:SHOWN_DIGITS]}: {each['state']}"
        + (f", {each['reason']}" if each["reason"] else "")
        + (f"; {each['advice']}" if each.get("advice") else "")
        for each in lines
    ]
    return _print(args, lines, texts) or int(any(each["state"] in wrong for each in lines))


def _rm(folder: Folder, args: argparse.Namespace) -> int:
    if not (args.fingerprints or args.refused or args.all):
        raise CommandFailed("say which artefacts to remove: fingerprints, --refused or --all")
    known = _known(folder)
    chosen = known if args.all else _chosen(known, args.fingerprints)
    if args.refused:
        chosen = sorted({*chosen, *folder.refusals()})
    lines = [{"fingerprint": each, "state": "removed"} for each in chosen if folder.remove(each)]
    return _print(args, lines, [f"{each['fingerprint'][:SHOWN_DIGITS]} is removed" for each in lines])


def _line(folder: Folder, fingerprint: str, stored: StoredArtefact | None) -> dict[str, Any]:
    from oriel_inference.artefacts.folder import ArtefactDamaged
    from oriel_inference.artefacts.offline import unfit

    line: dict[str, Any] = {
        "fingerprint": fingerprint,
        "model": "",
        "version": 0,
        "compiler": "",
        "bytes": 0,
        "used_s_ago": None,
        "state": "stored",
        "reason": "",
        "key": {},
    }
    if stored is not None:
        line |= {"bytes": stored.size_bytes, "used_s_ago": max(0.0, round(time.time() - stored.used_s, 1))}
    try:
        manifest = folder.find(fingerprint)
    except ArtefactDamaged as damaged:
        return line | {"state": "damaged", "reason": str(damaged)}
    if manifest is not None:
        key = key_of(manifest.key)
        line |= {
            "model": manifest.model,
            "version": manifest.version,
            "compiler": key.compiler,
            "reason": manifest.errors,
            "key": manifest.key,
        }
        if reason := unfit(key):
            line |= {"state": "unfit", "reason": reason}
    elif (refused := folder.refusal(fingerprint)) is not None:
        line |= {
            "model": refused.model,
            "compiler": refused.key["compiler"],
            "state": "refused",
            "reason": f"{refused.kind.value}: {refused.reason}",
            "key": refused.key,
        }
    return line


def _known(folder: Folder) -> list[str]:
    return sorted({*(each.fingerprint for each in folder.stored()), *folder.refusals()})


def _chosen(known: Iterable[str], given: Sequence[str]) -> list[str]:
    """Return the one fingerprint that begins with each given text. Raises CommandFailed if there is none or more."""
    chosen = []
    known = list(known)
    for text in given:
        matches = [each for each in known if each.startswith(text)]
        if len(text) < MIN_PREFIX or len(matches) != 1:
            why = "there is none" if not matches else f"{len(matches)} begin with it"
            why = why if len(text) >= MIN_PREFIX else f"give at least {MIN_PREFIX} characters"
            raise CommandFailed(f"artefact {text[:64]!r}: {why}")
        chosen += matches
    return chosen


def _bounds(args: argparse.Namespace) -> Any:
    from oriel_inference.artefacts.process import BuildBounds

    return BuildBounds(seconds=args.artefact_build_secs, memory_bytes=args.artefact_build_memory)


def _print(
    args: argparse.Namespace, lines: Sequence[dict[str, Any]], texts: Sequence[str] = (), none: str = "no artefacts"
) -> int:
    print(json.dumps(list(lines)) if args.json else "\n".join(texts or [none]))
    return 0


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    size, unit = next(each for each in _UNITS if seconds >= each[0] or each[0] == 1)
    return f"{seconds / size:.0f} {unit}"
