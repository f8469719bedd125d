"""The admin token of commands that ask a gateway's admin port: from the environment, or from a file that it names."""

from pathlib import Path

import pytest

from oriel_cli.admin import token_headers
from oriel_cli.errors import CommandFailed


def test_the_token_comes_from_the_environment_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ORIEL_ADMIN_TOKEN", raising=False)
    monkeypatch.delenv("ORIEL_ADMIN_TOKEN_FILE", raising=False)
    assert token_headers() == ()
    file = tmp_path / "token"
    monkeypatch.setenv("ORIEL_ADMIN_TOKEN_FILE", str(file))
    with pytest.raises(CommandFailed, match="ORIEL_ADMIN_TOKEN_FILE names cannot be read"):
        token_headers()
    file.write_text("of-the-file\n")
    assert token_headers() == (("authorization", "Bearer of-the-file"),)
    monkeypatch.setenv("ORIEL_ADMIN_TOKEN", "of-the-variable")
    assert token_headers() == (("authorization", "Bearer of-the-variable"),)
