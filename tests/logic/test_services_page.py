"""docs/logic-services.md, followed as a reader does: files are saved, commands run, and print what the page says."""

import re
import shutil
from pathlib import Path

import pytest

from oriel_logic.loading.folder_config import FolderConfig

from .pages import follow

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "logic-services.md").read_text()


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_the_page_as_a_reader_follows_it(tmp_path: Path) -> None:
    follow(PAGE, tmp_path)


def test_every_setting_is_on_the_page() -> None:
    table = PAGE.partition("| setting | default |")[2].partition("\n\n")[0]
    named = [name for line in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", line.split("|")[1])]
    assert sorted(named) == sorted(FolderConfig.__struct_fields__)
