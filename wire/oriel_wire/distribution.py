"""The installed distribution, which contains all units in one version."""

__all__ = ["NAME", "installed_version"]

NAME = "oriel-serving"


def installed_version() -> str:
    """The version of the distribution, or "unknown" in a source tree that is not installed."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import, and not always needed

    try:
        return version(NAME)
    except PackageNotFoundError:
        return "unknown"
