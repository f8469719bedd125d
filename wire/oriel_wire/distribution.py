"""The installed distribution, which contains all units in one version, and which of its two builds it is."""

from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec

NAME = "oriel-serving"


def installed_version() -> str:
    """The version of the distribution, or "unknown" in a source tree that is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import, and not always needed

    try:
        return version(NAME)
    except PackageNotFoundError:
        return "unknown"


def is_compiled() -> bool:
    """Return whether the modules that every call runs through are compiled, as in images and published wheels.

    No library lies beside a source of a checkout: Python would import it and ignore what is edited in the source.
    """
    found = find_spec("oriel_wire.h1.response")
    return found is not None and (found.origin or "").endswith(tuple(EXTENSION_SUFFIXES))


def build() -> str:
    """The name of the build that runs, for people: "compiled" or "pure Python"."""
    return "compiled" if is_compiled() else "pure Python"
