"""Documents are compiled by a child process: what it refuses, how it ends, and what it reuses of the last
compilation.
"""

import asyncio
import json
import os
import sys
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from oriel_gateway.documents import compiler
from oriel_gateway.documents.compiler import FolderCompiler
from oriel_gateway.documents.source import FolderSource
from oriel_policies.errors import BadDocument
from oriel_wire.process.helper import Helper

from ..waiting import until
from .reloading import compile_folder, write
from .stack import digest, documents


async def test_documents_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(BadDocument, match=r"no \.toml document"):
        await compile_folder(tmp_path)
    with pytest.raises(BadDocument, match="cannot be read"):
        await compile_folder(tmp_path / "missing")
    (tmp_path / "a.toml").write_bytes(b"x = 1\n" * 3_000_000)
    with pytest.raises(BadDocument, match="larger than"):
        await compile_folder(tmp_path)
    assert FolderSource(tmp_path / "missing").stamp() == ()


async def test_a_byte_order_mark_before_a_document_is_no_part_of_it(tmp_path: Path) -> None:
    write(tmp_path, {name: b"\xef\xbb\xbf" + data for name, data in documents([1]).items()})
    tenant = {"name": "line", "tier": "gold", "models": ["*"], "keys": [{"sha256": digest("line")}]}
    (tmp_path / "tenants.ndjson").write_bytes(b"\xef\xbb\xbf" + json.dumps(tenant).encode() + b"\n")
    snapshot = await compile_folder(tmp_path)
    assert snapshot.tiers.keys() == {"gold", "bronze"}


def test_a_folder_that_cannot_be_used_is_named_by_its_path(tmp_path: Path) -> None:
    for folder, reason in ((tmp_path / "nope", "the folder cannot be read: "), (tmp_path, "the folder holds no .toml")):
        with pytest.raises(BadDocument) as caught:
            FolderSource(folder).read()
        assert str(caught.value).startswith(f"{folder}: {reason}")


async def test_too_many_documents_are_refused(tmp_path: Path) -> None:
    for number in range(257):
        (tmp_path / f"{number}.toml").touch()
    with pytest.raises(BadDocument, match="more than 256 documents"):
        await compile_folder(tmp_path)


async def test_a_compiler_that_hangs_or_dies_is_named_and_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cold_children: None
) -> None:
    write(tmp_path, documents([1]))
    with FolderCompiler(tmp_path, timeout_s=0.001) as folder, pytest.raises(BadDocument, match="took more than"):
        await folder.compile()
    monkeypatch.setattr(compiler, "CHILD", "oriel_gateway.no_such_module")
    with pytest.raises(BadDocument, match="ended with code 1: .*No module named"):
        await compile_folder(tmp_path)
    monkeypatch.setattr(compiler, "CHILD", "this")  # a child that writes something else
    with pytest.raises(BadDocument, match="an answer that cannot be read|ended with code 0"):
        await compile_folder(tmp_path)


async def test_reloading_that_is_cancelled_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cold_children: None
) -> None:
    write(tmp_path, documents([1]))
    started: list[Helper] = []

    def helper(*given: Any, **options: Any) -> Helper:
        started.append(Helper(*given, **options))
        return started[0]

    monkeypatch.setattr(compiler, "Helper", helper)
    compiling = asyncio.ensure_future(compile_folder(tmp_path))
    await until(lambda: started and started[0].pid)
    compiling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await compiling
    assert started[0].pid is None
    monkeypatch.undo()
    assert (await compile_folder(tmp_path)).tenants["g"].name == "g"


async def test_compiling_needs_no_place_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> None:
        raise OSError(30, "Read-only file system")

    write(tmp_path, documents([1]))
    monkeypatch.setattr(compiler.tempfile, "TemporaryFile", full)
    if hasattr(os, "memfd_create"):
        assert len((await compile_folder(tmp_path)).tenants) == 3
    monkeypatch.delattr(os, "memfd_create", raising=False)
    with pytest.raises(BadDocument, match="a temporary file .* cannot be made: Read-only"):
        await compile_folder(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    with pytest.raises(BadDocument, match="cannot start the compiling process: No such file"):
        await compile_folder(tmp_path)


async def test_a_key_of_many_is_revoked_and_rotated_without_compiling_the_others(tmp_path: Path) -> None:
    """To compile a hundred thousand tenants takes 2 to 7 s, during which a revoked key would still be served."""
    lines = [
        json.dumps({"name": f"n{n}", "tier": "gold", "keys": [{"sha256": digest(f"k{n}")}], "models": ["*"]})
        for n in range(200)
    ]
    write(tmp_path, documents([1]) | {"tenants.ndjson": "\n".join(lines).encode()})
    with FolderCompiler(tmp_path) as folder:
        whole = await folder.compile()
        lines[7] = lines[7].replace(digest("k7"), digest("new"))
        write(tmp_path, {"tenants.ndjson": "\n".join(lines).encode()})
        first = await folder.compile()
        lines.append("{")
        write(tmp_path, {"tenants.ndjson": "\n".join(lines).encode()})
        with pytest.raises(BadDocument, match="tenants.ndjson:201: not JSON"):
            await folder.compile()
        lines[-1] = ""
        write(tmp_path, {"tenants.ndjson": "\n".join(lines[100:]).encode()})
        second = await folder.compile()
    old, new, last = (sha256(key.encode()).digest() for key in ("k7", "new", "k199"))
    assert old in whole.keys and old not in first.keys and first.keys[new].tenant.name == "n7"
    assert new not in second.keys and second.keys[last].tenant.name == "n199" and len(second.tenants) == 103
    assert old in whole.keys  # the snapshot in force stays whole as long as it is used


async def test_a_compiler_that_dies_of_what_was_before_begins_from_nothing(tmp_path: Path) -> None:
    write(tmp_path, documents([1]))
    with FolderCompiler(tmp_path) as folder:
        await folder.compile()
        assert folder._last is not None
        os.truncate(folder._last.fileno(), 9)
        with pytest.raises(BadDocument, match="ended with code 1: .*not a packed snapshot"):
            await folder.compile()
        assert len((await folder.compile()).tenants) == 3
