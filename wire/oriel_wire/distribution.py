"""The installed distribution: all units come in one, with one version."""

__all__ = ["NAME", "installed_version"]

NAME = "oriel-serving"


def installed_version() -> str:
    """The version of the distribution, or "unknown" in a tree that was not installed."""
    from importlib.metadata import PackageNotFoundError, version  # slow to import, and the name is often enough

    try:
        return version(NAME)
    except PackageNotFoundError:
        return "unknown"
