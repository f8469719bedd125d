"""The errors of this package.

PolicyError
├── BadDocument          a document is invalid; names the file, the path inside it and the reason
└── UnreadableRecords    published records of demand are of another version, or damaged
"""


class PolicyError(Exception):
    """Root of this package's errors."""


class BadDocument(PolicyError):
    """A document is invalid. file: the file's name as given to `compile_documents`; path: dotted, inside it ("" for the
    whole).

    others: further mistakes of the same set. Path and reason are truncated, as a document's text may be long.
    """

    def __init__(self, file: str, path: str, reason: str) -> None:
        path, reason = _cut(path, 200), _cut(reason, 300)
        super().__init__(f"{file}: {path}: {reason}" if path else f"{file}: {reason}")
        self.file = file
        self.path = path
        self.reason = reason
        self.others: tuple[BadDocument, ...] = ()


class UnreadableRecords(PolicyError):
    """Published records of demand are of another version, or damaged; see `scaling.unpack`."""


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
