"""`oriel keys new`: the key works, and a document it is written into keeps everything else."""

import hashlib
import os
import re
import stat
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from shutil import copytree

import msgspec
import pytest

from oriel_cli.errors import CommandFailed
from oriel_cli.main import main
from oriel_cli.policies.key_documents import add_key, key_table
from oriel_cli.policies.keys import expiry
from oriel_policies.documents import Snapshot, compile_documents

ROOT = Path(__file__).parents[2]
TOML = (
    """# Our tenants. Do not lose this line.
[tiers.gold]
band = 0
target_ms = 100

[tenants.none]   # has no key yet
tier = "gold"

[tenants.one]
tier = "gold"
keys = [{ sha256 = "%s" }]  # the first
models = ["a"]

[tenants.many]
models = ["keys = [", "[tenants.one]"]
tier = "gold"
keys = [
  # old
  { sha256 = "%s" },
]

[tenants.empty]
tier = "gold"
keys = []
""".replace('"keys = [", "[tenants.one]"', '"x"')
    % ("1" * 64, "2" * 64)
)


def compiled(path: Path) -> Snapshot:
    return compile_documents({path.name: path.read_bytes()})


def shown(capsys: pytest.CaptureFixture[str]) -> bytes:
    (key,) = re.findall(r"oriel_\S+", capsys.readouterr().out)
    return hashlib.sha256(key.encode()).digest()


@pytest.mark.parametrize("tenant", ["none", "one", "many", "empty"])
def test_a_key_is_written_into_a_document(tmp_path: Path, capsys: pytest.CaptureFixture[str], tenant: str) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(TOML)
    path.chmod(0o640)
    before = compiled(path)
    words = ["keys", "new", "--tenant", tenant, "--name", "ci", "--expires", "90d", "--write", str(path)]
    assert main(words) == 0
    after = compiled(path)
    new = after.keys[shown(capsys)]
    assert new.tenant.name == tenant and new.name == "ci" and new.expires_at is not None
    assert 89 < (new.expires_at - datetime.now(UTC).timestamp()) / 86400 <= 90
    assert set(before.keys) < set(after.keys) and len(after.keys) == len(before.keys) + 1
    text = path.read_text()
    assert all(line.split("#")[-1] in text for line in TOML.splitlines() if "#" in line)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640 and [p.name for p in tmp_path.iterdir()] == ["tenants.toml"]


def test_a_key_is_written_into_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tenants.ndjson"
    (tmp_path / "tiers.toml").write_text("[tiers.gold]\nband = 0\ntarget_ms = 100\n")
    lines = ['{"name":"a","tier":"gold"}', "", '{"name":"b","tier":"gold","keys":[{"sha256":"%s"}]}' % ("1" * 64)]
    path.write_text("\n".join(lines))
    assert main(["keys", "new", "--tenant", "b", "--expires", "2099-01-01", "--write", str(path)]) == 0
    first, empty, last = path.read_text().split("\n")
    assert [first, empty] == lines[:2]
    keys = msgspec.json.decode(last)["keys"]
    assert keys[1] == {"sha256": shown(capsys).hex(), "expires": "2099-01-01T00:00:00Z"}


@pytest.mark.parametrize(
    "text", ["tenants = { t = { tier = 'gold' } }\n", "[tenants]\nt.tier = 'gold'\n", "[tenants.u]\n"]
)
def test_what_cannot_be_edited_safely_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(text)
    assert main(["keys", "new", "--tenant", "t", "--write", str(path)]) == 1
    out, err = capsys.readouterr()
    assert path.read_text() == text and "oriel_" not in out and "by hand" in err


def test_the_line_is_one_a_document_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "new", "--tenant", "t", "--name", "a b", "--expires", "4w"]) == 0
    out = capsys.readouterr().out
    line = next(line.strip() for line in out.splitlines() if "keys =" in line)
    document = f"[tiers.g]\nband = 0\ntarget_ms = 1\n[tenants.t]\ntier = 'g'\n{line}\n"
    (key,) = compile_documents({"a.toml": document.encode()}).keys.values()
    assert key.name == "a b" and key.expires_at is not None


@pytest.mark.parametrize("words", [[], ["--write"]])
def test_a_key_of_a_lower_tier(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    path = tmp_path / "a.toml"
    document = "[tiers.g]\nband = 0\ntarget_ms = 1\n[tiers.b]\nband = 1\ntarget_ms = 1\n[tenants.t]\ntier = 'g'\n"
    path.write_text(document)
    assert main(["keys", "new", "--tenant", "t", "--tier", "b", *words, *([str(path)] if words else [])]) == 0
    if not words:
        out = capsys.readouterr().out
        path.write_text(document + next(line.strip() for line in out.splitlines() if "keys =" in line))
    (key,) = compiled(path).keys.values()
    assert (key.tenant.name, key.tenant.tier.name) == ("t", "b")


@pytest.mark.parametrize(
    ("tier", "reason"),
    [
        ("gold", "tenants.toml: tenants.cedar.keys[0].tier: 'gold' is above the tenant's 'bronze'"),
        ("platinum", "tenants.toml: tenants.cedar.keys[0].tier: no tier is named 'platinum'"),
    ],
)
def test_a_key_with_which_the_policies_are_refused_is_not_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tier: str, reason: str
) -> None:
    copytree(ROOT / "policies" / "examples", tmp_path, dirs_exist_ok=True)
    path = tmp_path / "tenants.toml"
    before = path.read_bytes()
    assert main(["keys", "new", "--tenant", "cedar", "--tier", tier, "--write", str(path)]) == 1
    out, err = capsys.readouterr()
    assert reason in err and "oriel_" not in out and path.read_bytes() == before


def test_a_second_key_of_a_name_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tenants.toml"
    path.write_text(TOML)
    words = ["keys", "new", "--tenant", "none", "--name", "ci", "--write", str(path)]
    assert main(words) == 0 and "named" not in capsys.readouterr().out
    assert main(words) == 0 and "tenant none now has 2 keys named 'ci'" in capsys.readouterr().out


def test_expiry() -> None:
    now = datetime(2026, 1, 1, 12, 0, 0, 5, tzinfo=UTC)
    assert expiry("12h", now) == datetime(2026, 1, 2, tzinfo=UTC)
    assert expiry("1w", now) == datetime(2026, 1, 8, 12, tzinfo=UTC)
    assert expiry("2027-01-31", now) == datetime(2027, 1, 31, tzinfo=UTC)
    assert expiry("2027-01-31T01:00:00+02:00", now) == datetime(2027, 1, 30, 23, tzinfo=UTC)
    for text in ("0d", "90", "d", "-1d", "2025-01-01", "soon"):
        with pytest.raises(CommandFailed):
            expiry(text, now)


@pytest.mark.parametrize("words", [["--write", "x.toml"], ["--name", 'a"b'], ["--name", "a\nb"], ["--tier", 'a"b']])
def test_wrong_words_are_refused_before_a_key_is_made(capsys: pytest.CaptureFixture[str], words: list[str]) -> None:
    assert main(["keys", "new", *words]) == 1
    assert "oriel_" not in capsys.readouterr().out


def test_keys_written_at_the_same_time_are_all_there(tmp_path: Path) -> None:
    """A regression: of twelve keys that were shown only five worked, because each writer replaced changes it had not
    read.
    """
    path = tmp_path / "tenants.toml"
    path.write_text(TOML)
    digests = [f"{number:064x}" for number in range(12)]
    with ThreadPoolExecutor(12) as pool:
        list(pool.map(lambda digest: add_key(path, "none", key_table(digest)), digests))
    assert all(digest in path.read_text() for digest in digests)


def test_line_ends_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "tenants.toml"
    (tmp_path / "tiers.toml").write_text("[tiers.gold]\nband = 0\ntarget_ms = 100\n")
    path.write_bytes(b'[tenants.a]\r\ntier = "gold"\r\n# last\r\n')
    add_key(path, "a", key_table("0" * 64))
    assert path.read_bytes().endswith(b'tier = "gold"\r\n# last\r\n')


@pytest.mark.skipif(os.geteuid() != 0, reason="only root writes what belongs to others")
def test_a_document_keeps_its_owner(tmp_path: Path) -> None:
    """A regression: when root added a key, the document became root's, and a gateway without root's rights lost its
    tenants.
    """
    path = tmp_path / "tenants.toml"
    path.write_text(TOML)
    os.chown(path, 1234, 1235)
    add_key(path, "none", key_table("0" * 64))
    assert (path.stat().st_uid, path.stat().st_gid) == (1234, 1235)
