"""The command line as a person meets it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from oriel_cli import main as main_module
from oriel_cli.main import COMMANDS, main

ROOT = Path(__file__).resolve().parents[2]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(words)
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1, "a refusal is one line on stderr"
    return code, captured.err


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",), ("help",)])
def test_the_overview_names_every_command(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    assert main(words) == 0
    listed = capsys.readouterr().out
    assert all(re.search(rf"^  {name} +\w", listed, re.MULTILINE) for name in COMMANDS)


def test_the_overview_imports_no_unit_and_nothing_heavy() -> None:
    code = (
        "import sys; from oriel_cli.main import main; main(['--help']);"
        "heavy = {'asyncio', 'numpy', 'grpc', 'starlette', 'oriel_gateway', 'oriel_logic', 'oriel_inference'};"
        "sys.exit(','.join(heavy & set(sys.modules)) or 0)"
    )
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_every_command_has_a_help(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0 and f"usage: oriel {command}" in capsys.readouterr().out


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_an_unknown_flag_is_one_line(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--helpp"])
    said = capsys.readouterr()
    code = 1 if command == "inference tritonserver" else 2  # as Triton's own
    assert ended.value.code == code and said.out == "" and said.err.count("\n") == 1
    assert said.err.startswith(f"oriel {command}: unknown flag --helpp, did you mean --help?")


def test_a_flag_of_a_subcommand_is_not_taken_for_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["models", "ls", "--jsn"])
    assert "did you mean --json?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["up", "--bogus"])
    assert capsys.readouterr().err.startswith("oriel up: unknown flag --bogus ("), "--host is not near"
    with pytest.raises(SystemExit):
        main(["models", "ls", "--url"])
    assert capsys.readouterr().err.startswith("oriel models ls: --url: expected one argument")


@pytest.mark.parametrize("word", ["fly", "deploy"])
def test_an_unknown_command_is_one_line(capsys: pytest.CaptureFixture[str], word: str) -> None:
    code, line = refused(capsys, word)
    assert code == 2 and repr(word) in line and "--help" in line and "did you mean" not in line


@pytest.mark.parametrize("words", ["versoin: version", "logic nwe x: logic new", "loigc new x: logic new"])
def test_a_misspelt_command_gets_the_nearest(capsys: pytest.CaptureFixture[str], words: str) -> None:
    typed, _, meant = words.partition(": ")
    code, line = refused(capsys, *typed.split())
    assert code == 2 and f"did you mean '{meant}'?" in line


@pytest.mark.parametrize(
    ("package", "remedy"),
    [
        ("onnxruntime", "pip install 'oriel-serving[cpu]'\n"),
        ("grpc", "pip install 'oriel-serving[tools]'\n"),
        ("uvloop", "pip install oriel-serving\n"),
    ],
)
def test_a_missing_package_is_one_line_with_the_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, package: str, remedy: str
) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {package!r}", name=f"{package}.capi")

    monkeypatch.setattr(main_module.importlib, "import_module", missing)
    code, line = refused(capsys, "inference")
    assert code == 2 and package in line and remedy in line and "make clean setup" in line


def test_a_bug_in_our_own_imports_is_not_called_a_missing_package(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError("No module named 'oriel_gateway.lost'", name="oriel_gateway.lost")

    monkeypatch.setattr(main_module.importlib, "import_module", missing)
    with pytest.raises(ModuleNotFoundError):
        main(["gateway"])


def test_the_version_is_printed_with_the_build(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0 and re.fullmatch(r"oriel [\w.]+ \(pure Python\)\n", capsys.readouterr().out)
    assert main(["--version"]) == 0


def test_good_documents_are_summed_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["policies", "check", str(ROOT / "policies" / "examples")]) == 0
    assert capsys.readouterr().out.startswith("good: 3 tenants")


@pytest.mark.parametrize(("classes", "hints"), [([""], 1), (["cpu"], 0), (["", "gpu"], 0)])
def test_a_price_of_devices_without_a_class_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, classes: list[str], hints: int
) -> None:
    text = "".join(
        f'[prices.x{at}]\nclass = "{name}"\ncurrency = "EUR"\nvalid_from = 2026-01-01\ndevice_hour = 4\n'
        for at, name in enumerate(classes)
    )
    (tmp_path / "prices.toml").write_text(text)
    assert main(["policies", "check", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("prices.x0: device_hour without a class is only for servers") == hints


def test_a_folder_without_documents_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, line = refused(capsys, "policies", "check", str(tmp_path))
    assert code == 1 and "holds no .toml document" in line
    code, line = refused(capsys, "policies", "explain", "--tenant", "t", "--model", "m", "--policies", str(tmp_path))
    assert code == 1 and "holds no .toml document; say with --policies where the documents are" in line
