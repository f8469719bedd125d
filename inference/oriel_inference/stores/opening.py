"""Opens the model repositories that the flags name: folders, and object stores behind caches."""

import re
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from hashlib import blake2b
from pathlib import Path

from oriel_inference.errors import LoadFailed
from oriel_inference.stores import ModelStore
from oriel_inference.stores.cache import Cache
from oriel_inference.stores.local import LocalStore
from oriel_inference.stores.remote import RemoteStore
from oriel_inference.stores.source import Source, load_failed
from oriel_wire.objects.client import Location, location_of
from oriel_wire.objects.errors import ObjectStoreError
from oriel_wire.objects.opening import open_client
from oriel_wire.process.shared_settings import cache_folder


def open_stores(
    repositories: Sequence[Path | str],
    cache: Path | None,
    *,
    max_cache_bytes: int,
    in_use: Callable[[], Collection[str]],
    links_to: Sequence[Path] = (),
) -> list[ModelStore]:
    """Open one store per repository: a path is a folder, a text is the URL of an object store. No request is sent yet.

    max_cache_bytes: limit of all caches together, in equal parts.
    in_use: returns the identities of the versions that serve.
    links_to: folders that links of local repositories may lead into.
    Raises LoadFailed, and then nothing is left open.
    """
    remote = [each for each in repositories if isinstance(each, str)]
    root = cache or cache_folder("models")
    try:
        locations = {url: location_of(url) for url in remote}
        clients = {url: open_client(location) for url, location in locations.items()}
    except ObjectStoreError as error:
        raise load_failed(error) from error
    for url in remote:
        if sum(locations[each] == locations[url] for each in remote) > 1:
            raise LoadFailed(f"--model-repository {url} is given twice")
    stores: list[ModelStore] = []
    with ExitStack() as opened:
        for each in repositories:
            if isinstance(each, Path):
                stores.append(LocalStore(each, links_to=links_to))
                continue
            location = locations[each]
            held = Cache(root / _folder(location), max_bytes=max_cache_bytes // len(remote), in_use=in_use)
            opened.callback(held.close)
            stores.append(RemoteStore(Source(clients[each]), location.prefix, held, shown=each))
        opened.pop_all()
    return stores


def _folder(location: Location) -> str:
    """Return the name of the location's cache folder: unique and readable."""
    readable = re.sub(r"[^A-Za-z0-9-]", "-", f"{location.kind}-{location.bucket}")[:64]
    return f"{readable}-{blake2b(repr(location).encode(), digest_size=8).hexdigest()}"
