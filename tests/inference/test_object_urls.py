"""The URLs of repositories on the command line, the caches of their stores, and checksums."""

from io import BytesIO
from pathlib import Path

import pytest

from oriel_cli.arguments import Parser
from oriel_inference import command
from oriel_inference.errors import LoadFailed
from oriel_inference.stores import opening
from oriel_inference.stores.checksums import CRC32C, CRC64NVME, checksums


def test_the_flag_takes_folders_and_urls(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="oriel inference")
    command.add_arguments(parser)
    words = ["--model-repository", "/m", "--model-repository=s3://bucket/a", "--model-cache", "/c"]
    args = parser.parse_args([*words, "--model-cache-bytes", "1048576"])
    assert args.model_repository == [Path("/m"), "s3://bucket/a"] and args.model_cache == Path("/c")
    assert args.max_cache_bytes == 1 << 20
    for wrong in (["--model-repository", "ftp://x/y"], [*words, "--model-cache-bytes", "1"]):
        with pytest.raises(SystemExit):
            parser.parse_args(wrong)
    assert "'ftp' is not a known object store" in capsys.readouterr().err


def test_each_place_has_a_cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    urls = ["s3://bucket/a", "s3://bucket/b", "s3://http://127.0.0.1:9/bucket/a"]
    stores = opening.open_stores(urls, None, max_cache_bytes=3 << 20, in_use=tuple)
    with pytest.raises(LoadFailed, match="another server"):
        opening.open_stores(urls[2:], None, max_cache_bytes=3 << 20, in_use=tuple)
    for store in stores:
        store.close()  # type: ignore[attr-defined]  # of a RemoteStore
    names = [each.name for each in (tmp_path / "oriel/models").iterdir()]
    assert len(names) == 3 and all(name.startswith("s3-bucket-") for name in names)


@pytest.mark.parametrize(
    ("algorithm", "value"),
    [
        ("crc32", "cbf43926"),
        ("crc32c", "e3069283"),
        ("crc64nvme", "ae8b14860a799888"),
        ("md5", "25f9e794323b453885f5181f1b624d0b"),
    ],
)
def test_checksums_have_their_published_check_values(algorithm: str, value: str) -> None:
    assert checksums(BytesIO(b"123456789"), (algorithm, "sha3")) == {algorithm: value}


@pytest.mark.parametrize("kind", [CRC32C, CRC64NVME])
def test_a_checksum_does_not_depend_on_how_the_bytes_come(kind: type[CRC32C] | type[CRC64NVME]) -> None:
    data = bytes(range(256)) * 1100 + b"odd"
    whole, pieces, single = kind(), kind(), kind()
    whole.update(data)
    for start in range(0, len(data), 777):
        pieces.update(data[start : start + 777])
    for start in range(0, len(data), 100):
        single.update(data[start : start + 100])  # too short for lanes
    assert whole.hexdigest() == pieces.hexdigest() == single.hexdigest()
