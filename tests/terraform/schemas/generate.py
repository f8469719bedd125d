#!/usr/bin/env python3
"""Write the schemas beside this file: of every provider the types that the .tf files use, from packages of npm.

    tests/terraform/schemas/generate.py                      # `npm pack` of each exact version; 140 MB once
    tests/terraform/schemas/generate.py --packages FOLDER    # from .tgz files that are there already

To be run after a .tf file uses a type it did not use before; tests never do, they have no network. The packages are
frozen upstream (cdktf is no longer made): the providers' later versions have no package.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # tests/

from terraform.harness import used_types  # noqa: E402
from terraform.schemas.convert import converted  # noqa: E402

PACKAGES = (
    ("aws", "21.22.1"),
    ("google", "16.12.1"),
    ("azurerm", "14.23.1"),
    ("kubernetes", "12.1.1"),
    ("helm", "12.1.2"),
)


def wanted() -> set[str]:
    """The types of terraform/."""
    return used_types(HERE.parents[2] / "terraform")


def written(document: dict[str, Any]) -> str:
    """JSON with one type in a line, so that a difference says which changed."""
    ((source, schemas),) = document["provider_schemas"].items()

    def compact(value: Any) -> str:
        return json.dumps(value, separators=(",", ":"), sort_keys=True)

    def types(kind: str) -> str:
        lines = [f"{json.dumps(name)}:{compact(schema)}" for name, schema in sorted(schemas[kind].items())]
        return f'"{kind}":{{\n' + ",\n".join(lines) + "}"

    body = ",\n".join(
        [f'"provider":{compact(schemas["provider"])}', *map(types, ("resource_schemas", "data_source_schemas"))]
    )
    return (
        f'{{"format_version":"1.0",\n"source":{compact(document["source"])},\n'
        f'"provider_schemas":{{{json.dumps(source)}:{{\n{body}}}}}}}\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--packages", type=Path)
    folder = parser.parse_args().packages
    with tempfile.TemporaryDirectory() as fetched:
        for name, version in PACKAGES:
            if folder is None:
                package = f"@cdktf/provider-{name}@{version}"
                subprocess.run(["npm", "pack", "--silent", package], cwd=fetched, check=True, stdout=subprocess.DEVNULL)
            file = f"cdktf-provider-{name}-{version}.tgz"
            document = converted((folder or Path(fetched)) / file, wanted())
            text = written(document)
            out = HERE / f"{name}-{document['source']['provider_version']}.json"
            out.write_text(text)
            sys.stdout.write(f"{out.name}: {len(text) / 1000:.0f} kB\n")


if __name__ == "__main__":
    main()
