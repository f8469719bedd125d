"""Servers that benches start leave nothing behind."""

import os
import sys
from pathlib import Path

from harness.processes import serving, state_environment


def test_a_server_of_a_bench_adds_nothing_to_the_state_of_the_user(tmp_path: Path) -> None:
    file = tmp_path / "file"
    code = "import os, signal, sys; open(sys.argv[1], 'w').write(os.environ['ORIEL_STATE'] + '\\n'); signal.pause()"
    with serving([sys.executable, "-c", code, str(file)], lambda: file.exists() and file.read_text().endswith("\n")):
        folder = file.read_text().strip()
    assert folder == state_environment()["ORIEL_STATE"] != os.environ["ORIEL_STATE"]
    assert Path(folder).is_dir(), "it is kept for the next server, and removed at the end of the bench"
