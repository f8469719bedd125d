"""The commands of docs/logic-inputs.md, run against the services of that page, print what it says."""

import asyncio
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oriel_logic.bodies import audio
from oriel_logic.bodies.audio import Audio

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "logic-inputs.md").read_text()


def commands() -> list[tuple[str, str]]:
    """(command, what is printed beneath it)."""
    blocks = re.findall(r"^```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    parts = [part for block in blocks for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]]
    return [(part.partition("\n")[0], part.partition("\n")[2]) for part in parts]


@pytest.mark.skipif(not shutil.which("curl") or not shutil.which("file"), reason="needs curl and file")
async def test_the_commands_of_the_page_print_what_it_says(stack: Any, services: Any, tmp_path: Path) -> None:
    (source,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    logic = await stack(services(kinds=source))
    shutil.copy(ROOT / "examples/digits/7.png", tmp_path)
    (tmp_path / "beep.wav").write_bytes(audio.encode(Audio(np.full(4000, 0.5, np.float32), 8000)))
    np.save(tmp_path / "rows.npy", np.array([[1, 2, 3], [4, 5, 6]], np.float32))
    found = commands()
    assert len(found) > 12
    for command, said in found:
        process = await asyncio.create_subprocess_shell(
            command.replace("127.0.0.1:8090", f"127.0.0.1:{logic.port}"),
            cwd=tmp_path,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await process.communicate()
        printed = re.sub(r'"request_id":"[^"]*"', '"request_id":"..."', out.decode())
        assert printed.strip() == said.strip(), (command, err.decode())


def test_the_page_names_every_form() -> None:
    for name in ("PIL.Image.Image", "Audio", "NDArray", "Tensors", "Upload", "AsyncIterator", "bytes", "str"):
        assert PAGE.count(f"`{name}") >= 1, name
