"""From the repositories that were named to stores: folders, and object stores behind caches."""

import os
import re
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path

from oriel_inference.errors import LoadFailed
from oriel_inference.stores import ModelStore
from oriel_inference.stores.cache import Cache
from oriel_inference.stores.local import LocalStore
from oriel_inference.stores.objects import client_of, location_of
from oriel_inference.stores.remote import RemoteStore

__all__ = ["cache_folder", "open_stores"]


def cache_folder() -> Path:
    """Where versions of remote repositories are kept unless it is said."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base, "oriel", "models")


def open_stores(
    repositories: Sequence[Path | str],
    cache: Path | None,
    *,
    max_cache_bytes: int,
    in_use: Callable[[], Collection[str]],
) -> list[ModelStore]:
    """A store for each: a path is a folder, text is the URL of an object store. Nothing is sent yet.

    max_cache_bytes: of all caches together, in equal parts. in_use: identities of what serves. Raises LoadFailed, and
    then nothing is left open.
    """
    remote = [each for each in repositories if isinstance(each, str)]
    root = cache or cache_folder()
    places = [location_of(each) for each in remote]
    for url, place in zip(remote, places, strict=True):
        if places.count(place) > 1:
            raise LoadFailed(f"--model-repository {url} is given twice")
    stores: list[ModelStore] = []
    with ExitStack() as opened:
        for each in repositories:
            if isinstance(each, Path):
                stores.append(LocalStore(each))
                continue
            client, prefix = client_of(each)
            held = Cache(root / _folder(each), max_bytes=max_cache_bytes // len(remote), in_use=in_use)
            opened.callback(held.close)
            stores.append(RemoteStore(client, prefix, held, shown=each))
        opened.pop_all()
    return stores


def _folder(url: str) -> str:
    """A name for its cache: another one for another place, and one that tells people which."""
    location = location_of(url)
    readable = re.sub(r"[^A-Za-z0-9-]", "-", f"{location.kind}-{location.bucket}")[:64]
    return f"{readable}-{blake2b(repr(location).encode(), digest_size=8).hexdigest()}"
