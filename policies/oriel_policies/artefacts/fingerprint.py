"""The fingerprint of a compiled artefact: a digest of everything that its bytes, or their meaning, may depend on.

Two artefacts with the same fingerprint are interchangeable. One whose fingerprint differs is never loaded.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

DIGITS = 40  # hexadecimal digits of a fingerprint: 160 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtefactKey:
    """The parts of a fingerprint, each as text.

    model: digest of the model's files.
    compiler, compiler_version: also where a compiler accepts artefacts of another version.
    device: compute capability of the GPU, or instruction sets of the CPU, that its machine code is for.
    driver: major versions of the driver and of its libraries; "" on a CPU.
    profiles: shapes that it was compiled for; "" if it takes all that the model takes.
    precision: datatype in which it computes.
    options: everything else that the compiler was given.
    compatibility: level up to which it may be used beyond its device and version; "" for not at all.
    """

    model: str
    compiler: str
    compiler_version: str
    device: str
    driver: str = ""
    profiles: str = ""
    precision: str = ""
    options: str = ""
    compatibility: str = ""

    @property
    def fingerprint(self) -> str:
        """Return the digest of all parts: equal if and only if all of them are."""
        digest = hashlib.sha256()
        for name, value in self.parts().items():
            for text in (name, value):
                encoded = text.encode("utf-8", "surrogatepass")
                digest.update(len(encoded).to_bytes(8, "big"))
                digest.update(encoded)
        return digest.hexdigest()[:DIGITS]

    def parts(self) -> dict[str, str]:
        """Return name -> value of every part."""
        return asdict(self)


def is_fingerprint(text: str) -> bool:
    """Return whether the text has the form of a fingerprint."""
    return len(text) == DIGITS and all(each in "0123456789abcdef" for each in text)


def key_of(parts: Mapping[str, object]) -> ArtefactKey:
    """Return the key that has these parts, as its own `parts` gives them. Raises ValueError if they are no key's."""
    names = {field.name for field in fields(ArtefactKey)}
    texts = {name: value for name, value in parts.items() if isinstance(value, str)}
    if set(parts) != names or set(texts) != names:
        raise ValueError("these are not the parts of a fingerprint")
    return ArtefactKey(**texts)
