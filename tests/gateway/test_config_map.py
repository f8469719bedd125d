"""Documents in a ConfigMap: the mount's files are links through `..data`, which is swapped for another folder."""

import os
from pathlib import Path

from oriel_gateway.admin.reload import Reloader
from oriel_gateway.documents.source import FolderSource

from .documents import changed
from .gate import INFER
from .reloading import compile_folder
from .stack import GOLD, Client, digest, documents, gateway, upstream


def publish(folder: Path, documents: dict[str, bytes]) -> None:
    """Publish documents as the kubelet does: no file is ever written again, and all of them change at once."""
    stamp = folder / f"..{len(list(folder.glob('..[0-9]*')))}"
    stamp.mkdir()
    for name, data in documents.items():
        (stamp / name).write_bytes(data)
    (folder / "..data_tmp").symlink_to(stamp.name)
    os.replace(folder / "..data_tmp", folder / "..data")
    for name in documents:
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")


async def test_a_config_map_is_taken_up_when_it_is_swapped(tmp_path: Path) -> None:
    async with upstream() as up:
        files = documents([up.port])
        publish(tmp_path, files)
        source = FolderSource(tmp_path)
        assert sorted(source.read()) == sorted(files), "neither ..data nor what it leads to is a document of its own"
        async with gateway(files) as (port, core), Client(port) as client:
            seen = source.stamp()
            reloader = Reloader(core, source.stamp, lambda: compile_folder(tmp_path), seen=seen)
            assert (await client.ask(INFER)).status == 200
            publish(tmp_path, changed(files, digest(GOLD), digest("new")))
            assert source.stamp() not in (seen, ())
            await reloader.poll()
            assert (await client.ask(INFER)).status == 401
            assert (await client.ask(INFER, key="new")).status == 200
