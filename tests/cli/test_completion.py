"""The scripts of `oriel completion`: run in bash, and checked in the other shells as far as those can parse them."""

import shutil
import subprocess
from pathlib import Path

import pytest

from oriel_cli.completion import SHELLS
from oriel_cli.main import COMMANDS, main

CALL = """source "$1"
shift
COMP_WORDS=(oriel "$@")
COMP_CWORD=$(( ${#COMP_WORDS[@]} - 1 ))
_shtab_oriel 2>/dev/null
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the scripts of all shells into a folder, one file per shell."""
    folder = tmp_path_factory.mktemp("completion")
    for shell in SHELLS:
        with pytest.MonkeyPatch.context() as patch, (folder / shell).open("w") as out:
            patch.setattr("sys.stdout", out)
            assert main(["completion", shell]) == 0
    return folder


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["vers"], {"version"}),
        (["lo"], {"load", "logic"}),
        (["logic", "n"], {"new"}),
        (
            ["models", ""],
            {"ls", "load", "unload", "stats", "placement", "check", "compare", "import", "quality", "reference"},
        ),
        (["gateway", "--admin-p"], {"--admin-port", "--admin-pages"}),
        (["gateway", "--admin-pages", ""], {"token", "loopback"}),
        (["load", "--arrivals", "b"], {"bursty"}),
        (["completion", ""], set(SHELLS)),
        (
            [
                "",
            ],
            {name for name in COMMANDS if " " not in name},
        ),
    ],
)
def test_bash_completes_commands_flags_and_values(scripts: Path, words: list[str], found: set[str]) -> None:
    done = subprocess.run(
        ["bash", "-c", CALL, "bash", str(scripts / "bash"), *words], capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) == found


@pytest.mark.parametrize("shell", SHELLS)
def test_each_script_is_read_by_its_shell_and_knows_every_command(scripts: Path, shell: str) -> None:
    text = (scripts / shell).read_text()
    assert all(word in text for name in COMMANDS for word in name.split())
    assert "--admin-pages" in text or "admin-pages" in text
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    done = subprocess.run([shell, "-n", str(scripts / shell)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
