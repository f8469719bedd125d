"""Finds the demo's files, in the installed package or else in the checkout around it, and generates its models."""

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from oriel_cli.state import state_folder
from oriel_wire.errors import StartFailed

# Plain and documented: the demo policies refuse to be served anywhere but on loopback.
DEMO_KEYS = {"gold": "oriel-demo-gold", "silver": "oriel-demo-silver", "bronze": "oriel-demo-bronze"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoAssets:
    """Folders of the demo. generators: the scripts that write the generated models; generated: the folder for generated
    files.
    """

    policies: Path
    services: tuple[Path, ...]
    models: Path
    digits: Path
    generators: tuple[Path, ...]
    generated: Path

    @property
    def prepare(self) -> Sequence[str]:
        """Return the command that generates the models; empty if they are there."""
        if self.generated.is_dir():
            return ()
        return [sys.executable, "-P", "-m", "oriel_cli.demo.generate", *map(str, self.generators), str(self.generated)]


def find() -> DemoAssets:
    """Find the demo's files. Raises StartFailed if this installation has none."""
    package = Path(__file__).resolve().parents[1]
    roots = [(package / "_demo" / "examples", package / "_demo" / "policies")]
    # A checkout's packages are in cli/oriel_cli, and compiled in build/run/oriel_cli.
    roots += [(each / "examples", each / "policies" / "examples") for each in package.parents[1:3]]
    for examples, policies in roots:
        generators = (examples / "models_mlp.py",)
        if policies.is_dir() and all(each.is_file() for each in generators):
            break
    else:
        raise StartFailed("the demo's files are missing: run it from a checkout or reinstall the package")
    version = hashlib.sha256(b"".join(each.read_bytes() for each in generators)).hexdigest()[:12]
    return DemoAssets(
        policies=policies,
        services=(examples / "services",),
        models=examples / "models",
        digits=examples / "digits",
        generators=generators,
        generated=state_folder() / f"demo-models-{version}",
    )
