"""What runtimes and models say, as it may be told to clients."""

import re

__all__ = ["without_folders"]

_FOLDERS = re.compile(r"(?<![\w.])/(?:[^\s\"'/]+/)+")


def without_folders(text: str) -> str:
    """One line that names files, but not where they are."""
    return " ".join(_FOLDERS.sub("", text).split())
