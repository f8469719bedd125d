"""Builds the pages as a site, strictly: `make docs` writes it to build/site.

The pages stay where they are, readable as plain files. They are copied, with the pictures and the files that they link
to, into a folder of the same shape, so that every link leads to the same place in both. Navigation is docs/README.md:
its headings are readers, its links their pages.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import reference

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / "build"
SOURCES = BUILD / "site-source"
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)")


def tracked(*patterns: str) -> list[Path]:
    """Return the files of the repository that match, relative to its root."""
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in listed.splitlines() if (ROOT / name).is_file()]


def linked(page: Path) -> set[Path]:
    """Return the files of the repository, other than pages, that a page links to."""
    targets = (target for target in LINK.findall((ROOT / page).read_text()) if "://" not in target)
    paths = {(ROOT / page.parent / target).resolve() for target in targets}
    return {path.relative_to(ROOT) for path in paths if path.is_file() and path.suffix != ".md"}


def gather() -> list[Path]:
    """Copy all pages and what they link to; return the pages."""
    shutil.rmtree(SOURCES, ignore_errors=True)
    pages = tracked("*.md")
    for name in {*pages, *(file for page in pages for file in linked(page))}:
        (SOURCES / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, SOURCES / name)
    (SOURCES / "docs" / "reference.md").write_text(reference.written())
    return pages


def navigation() -> list[dict[str, object]]:
    """Return the pages by reader, as docs/README.md lists them."""
    sections = (ROOT / "docs" / "README.md").read_text().split("\n## ")[1:]
    found: list[dict[str, object]] = [{"Oriel": "README.md"}]
    for section in sections:
        title, _, text = section.partition("\n")
        pages = [(SOURCES / "docs" / target).resolve().relative_to(SOURCES) for target in LINK.findall(text)]
        found.append({title: [str(page) for page in pages if page.suffix == ".md"]})
    found.append({"Reference": ["docs/reference.md", "docs/README.md", "CHANGELOG.md", "SECURITY.md"]})
    return found


def settings() -> str:
    """Return the builder's configuration."""
    return f"""[project]
site_name = "Oriel"
docs_dir = "site-source"
site_dir = "site"
use_directory_urls = false
nav = {inline(navigation())}

[project.theme]
variant = "modern"
features = ["navigation.sections", "navigation.top", "search.highlight", "content.code.copy"]
font = false

[[project.theme.palette]]
media = "(prefers-color-scheme: light)"
scheme = "default"

[[project.theme.palette]]
media = "(prefers-color-scheme: dark)"
scheme = "slate"

[project.plugins.search]

[project.plugins.offline]
"""


def inline(value: object) -> str:
    """Format texts, lists and tables as TOML in one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)} = {inline(each)}" for key, each in value.items()) + "}"
    return "[" + ", ".join(map(inline, value)) + "]" if isinstance(value, list) else json.dumps(value)


def main() -> int:
    builder = Path(sys.argv[1]).absolute()
    gather()
    (BUILD / "zensical.toml").write_text(settings())
    done = subprocess.run([builder, "build", "--clean", "--strict", "-f", "zensical.toml"], cwd=BUILD, check=False)
    if done.returncode:
        return 1
    sys.stdout.write(f"{BUILD / 'site' / 'index.html'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
