"""Prints the state of `oriel up` once everything is ready: for people, or as one line of JSON."""

import json
import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oriel_cli.state import DEFAULT_ADMIN_PORT
from oriel_cli.table import columns
from oriel_cli.up.demo_assets import DEMO_KEYS, DemoAssets
from oriel_cli.up.scaled import ScaledUnit
from oriel_cli.up.unit import Unit
from oriel_wire.distribution import installed_version, is_compiled

PURE = "this is the pure Python build; images and the wheel that `make wheel` builds are compiled: docs/images.md"
Models = Sequence[Mapping[str, Any]]


def as_json(units: Sequence[Unit], models: Models, assets: DemoAssets | None, *, traces: str, took_s: float) -> str:
    """Write one line of JSON: version, pid, start_s, demo, traces (URL), units (pid, state, addresses) and models."""
    return json.dumps(
        {
            "version": installed_version(),
            "pid": os.getpid(),
            "start_s": round(took_s, 3),
            "demo": assets is not None,
            "traces": traces,
            "units": [
                {
                    "unit": unit.name,
                    "pid": unit.pid,
                    "state": unit.state,
                    "addresses": {label: str(address) for label, address in unit.spec.addresses.items()},
                }
                for unit in units
            ],
            "models": models,
        }
    )


def change_as_json(unit: ScaledUnit) -> str:
    """Write one line of JSON about a scaled unit: how many of its processes are in which state now."""
    numbers = {"running": "ready", "starting": "starting", "restarting": "restarting", "stopping": "stopping"}
    counted = {word: unit.count(state) for word, state in numbers.items()}
    return json.dumps({"unit": unit.name, "state": unit.summary, **counted, "most": len(unit.units)})


def as_text(units: Sequence[Unit], models: Models, assets: DemoAssets | None, *, traces: str, took_s: float) -> str:
    """Write the tables of units and models; of a demo (`assets`) also commands to try what it serves."""
    del traces
    lines = ["", f"oriel {installed_version()} is up after {took_s:.1f} s", *([] if is_compiled() else [PURE]), ""]
    lines += [*_unit_lines(units), "", _pages(units[0])]
    if models:
        lines += ["", *_model_lines(models)]
    if assets is not None:
        lines += ["", "try, in another terminal:", *_commands(units, assets)]
    return "\n".join([*lines, "", "Ctrl-C stops everything."])


def _pages(gateway: Unit) -> str:
    base = f"{gateway.spec.scheme}://{gateway.spec.addresses['http']}"
    served = f"what the gateway serves, to read and to try: {base}/docs (start page {base}/)"
    console = f"http://{gateway.spec.addresses['admin']}/console"
    return f"{served}\nwhat it does, to watch: {console} (in a terminal: oriel top)"


def _unit_lines(units: Sequence[Unit]) -> list[str]:
    rows = []
    for unit in units:
        if unit.spec.pool and unit.name != unit.spec.pool:
            continue  # all processes of a scaled unit share one row
        addresses = unit.spec.addresses
        processes = sum(each.spec.pool == unit.spec.pool for each in units) if unit.spec.pool else 0
        state = f"{unit.state}, up to {processes} by demand" if processes else unit.state
        others = ", ".join(f"{label} {address.port}" for label, address in addresses.items() if label != "http")
        rows.append((unit.name, f"{unit.spec.scheme}://{addresses['http']}", others, state, unit.pid or "-"))
    return columns(("unit", "address", "other ports", "state", "pid"), rows)


def _model_lines(models: Models) -> list[str]:
    rows = [
        (
            model.get("name") or "?",
            model.get("version") or "-",
            str(model.get("state", "?")).lower(),
            model.get("provider") or "-",
            _batching(model.get("batching")) if model.get("state") == "READY" else model.get("reason") or "-",
        )
        for model in models
    ]
    return columns(("model", "version", "state", "provider in use", "batching"), rows)


def _batching(batching: object) -> str:
    if not isinstance(batching, Mapping):
        return "off" if not batching else str(batching)
    if batching.get("enabled") is False:
        return "off"
    largest = batching.get("max_batch_size")
    return f"up to {largest} rows" if largest else "on"


def _commands(units: Sequence[Unit], assets: DemoAssets) -> list[str]:
    """Write commands for those of the demo's files that are served: others may have taken the place of some."""
    base, admin_port = f"http://{units[0].spec.addresses['http']}", units[0].spec.addresses["admin"].port
    curl = f"  curl -s -H 'authorization: Bearer {DEMO_KEYS['gold']}'"
    which = "" if admin_port == DEFAULT_ADMIN_PORT else f" --admin-port {admin_port}"
    words = {os.path.abspath(word) for unit in units for word in unit.spec.argv}
    known, digits, models = (str(each) in words for each in (assets.policies, assets.services[0], assets.models))
    picture = f"{curl} -i -H 'content-type: image/png' \\\n       --data-binary @{_short(assets.digits / '7.png')}"
    tried = {
        f"{curl} {base}/v1/services": not (digits and models),
        f"{picture} {base}/v1/services/digits": digits and models,
        f"{curl} \\\n       -d @{_short(assets.digits / '7.v2.json')} {base}/v2/models/digits/infer": models,
    }
    lines = [line for line, served in tried.items() if known and served]
    return [*lines, f"  {_oriel()} trace THE-X-REQUEST-ID{which}"]


def _oriel() -> str:
    script = Path(sys.executable).parent / "oriel"
    return "oriel" if shutil.which("oriel") or not script.exists() else _short(script)


def _short(path: Path) -> str:
    """Return `path` as a person in the current folder would type it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
