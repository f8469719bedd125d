"""Policy documents in an object store, through an in-memory client: what is listed, fetched, and reported as an
error.
"""

from pathlib import Path

import pytest
from memory_objects import MemoryObjects

from oriel_gateway.documents.source import store_location
from oriel_gateway.documents.stored import Moved, StoredDocuments, StoreFailed

LOCATION = store_location("s3://bucket/p")


async def test_only_documents_directly_in_the_folder_are_listed_and_fetched(tmp_path: Path) -> None:
    keys = {"p/a.toml": b"one", "p/empty.toml": b"", "p/.hidden.toml": b"x", "p/notes/b.toml": b"x", "p/c.txt": b"x"}
    objects = MemoryObjects(keys | {"q/d.toml": b"x"})
    documents = StoredDocuments(LOCATION, objects)
    listed = await documents.listing()
    assert sorted(listed) == ["a.toml", "empty.toml"] and listed["a.toml"].size == 3
    for name, each in listed.items():
        await documents.fetch(name, each, tmp_path / name)
    assert (tmp_path / "a.toml").read_bytes() == b"one" and (tmp_path / "empty.toml").read_bytes() == b""
    assert [each[0] for each in objects.requests] == ["list", "read"], "an empty document needs no request"
    await documents.close()
    assert objects.closed


async def test_a_document_that_changed_since_the_listing_is_reported_as_moved(tmp_path: Path) -> None:
    objects = MemoryObjects({"p/a.toml": b"one"})
    documents = StoredDocuments(LOCATION, objects)
    listed = (await documents.listing())["a.toml"]
    objects.put("p/a.toml", b"two")
    with pytest.raises(Moved):
        await documents.fetch("a.toml", listed, tmp_path / "1")
    objects.remove("p/a.toml")
    with pytest.raises(Moved):
        await documents.fetch("a.toml", listed, tmp_path / "2")


async def test_a_store_that_breaks_off_denies_or_is_down_is_reported_as_failed(tmp_path: Path) -> None:
    objects = MemoryObjects({"p/a.toml": b"one"})
    documents = StoredDocuments(LOCATION, objects)
    listed = (await documents.listing())["a.toml"]
    objects.breaks = 1
    with pytest.raises(StoreFailed, match="the connection broke"):
        await documents.fetch("a.toml", listed, tmp_path / "1")
    objects.down = True
    with pytest.raises(StoreFailed, match="the store is down"):
        await documents.fetch("a.toml", listed, tmp_path / "2")
    with pytest.raises(StoreFailed, match="the store is down"):
        await documents.listing()


async def test_a_name_that_no_file_can_have_is_reported() -> None:
    documents = StoredDocuments(LOCATION, MemoryObjects({"p/a\tb.toml": b"x"}))
    with pytest.raises(StoreFailed, match="cannot be the name of a file"):
        await documents.listing()
