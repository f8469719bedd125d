""".dockerignore as Docker reads it: the last pattern that matches a path, or a folder that contains it, decides."""

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

__all__ = ["Ignore"]


class Ignore:
    """Decides which paths of the build context, relative to its root, reach the builder."""

    def __init__(self, text: str) -> None:
        self._rules: list[tuple[bool, re.Pattern[str]]] = []
        for line in text.splitlines():
            pattern = line.strip()
            if not pattern or pattern.startswith("#"):
                continue
            kept = pattern.startswith("!")
            self._rules.append((kept, _compiled(pattern.lstrip("!").strip("/"))))

    def lets_in(self, path: str) -> bool:
        pure = PurePosixPath(path)
        names = [str(each) for each in (pure, *pure.parents) if str(each) != "."]
        kept = True
        for keeps, pattern in self._rules:
            if any(pattern.fullmatch(name) for name in names):
                kept = keeps
        return kept

    def among(self, paths: Iterable[str]) -> list[str]:
        return [path for path in paths if self.lets_in(path)]


def _compiled(pattern: str) -> re.Pattern[str]:
    out = ""
    for part in re.split(r"(\*\*/|\*\*|\*|\?|\[[^\]]+\])", pattern):
        if part == "**/":
            out += "(?:.*/)?"
        elif part == "**":
            out += ".*"
        elif part == "*":
            out += "[^/]*"
        elif part == "?":
            out += "[^/]"
        elif part.startswith("[") and part.endswith("]"):
            out += part
        else:
            out += re.escape(part)
    return re.compile(out)
