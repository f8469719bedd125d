"""What can be wrong with a promise.

PolicyError
└── BadDocument    a document does not say what it has to; names file, path in it and reason
"""

__all__ = ["BadDocument", "PolicyError"]


class PolicyError(Exception):
    """Root of this package's errors."""


class BadDocument(PolicyError):
    """file: as given to `compile_documents`; path: dotted, inside the document ("" for the whole).

    others: further mistakes of the same set. What a document holds may be long: path and reason are cut.
    """

    def __init__(self, file: str, path: str, reason: str) -> None:
        path, reason = _cut(path, 200), _cut(reason, 300)
        super().__init__(f"{file}: {path}: {reason}" if path else f"{file}: {reason}")
        self.file = file
        self.path = path
        self.reason = reason
        self.others: tuple[BadDocument, ...] = ()


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
