"""Runs the demo's model generator in a process of its own: `onnx` is imported here and in no unit.

python -m oriel_cli.demo.generate GENERATOR... FOLDER: FOLDER appears whole or not at all.
"""

import runpy
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path


def generate(generators: Sequence[Path], folder: Path) -> None:
    """Call `write(Path)` of each script and move the result to `folder`, unless that exists by then."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        for generator in generators:
            runpy.run_path(str(generator))["write"](fresh)
        if not folder.exists():
            try:
                fresh.rename(folder)
            except OSError:
                # Another first run was faster: rename(2) onto its non-empty folder is refused.
                if not folder.is_dir():
                    raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


if __name__ == "__main__":
    try:
        generate([Path(each) for each in sys.argv[1:-1]], Path(sys.argv[-1]))
    except ModuleNotFoundError as missing:
        sys.exit(
            f"oriel: the package {missing.name!r} is missing: run 'make clean setup', "
            "or pip install 'oriel-serving[demo]'"
        )
    except OSError as refused:
        sys.exit(f"oriel: the demo models cannot be written ({refused.strerror}): free space or set ORIEL_STATE")
