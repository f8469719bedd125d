"""Locations of object stores: how URLs are parsed, what is refused, and which checksums of S3 count."""

import sys

import pytest

from oriel_wire.objects.client import Location, location_of
from oriel_wire.objects.errors import BadStoreUrl, ClientUnusable
from oriel_wire.objects.opening import open_client
from oriel_wire.objects.s3 import _checksum


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://bucket", Location(kind="s3", bucket="bucket", prefix="")),
        ("s3://bucket/a//b/", Location(kind="s3", bucket="bucket", prefix="a/b/")),
        (
            "s3://https://host:9000/bucket/a",
            Location(kind="s3", bucket="bucket", prefix="a/", endpoint="https://host:9000"),
        ),
        ("s3://http://host/bucket", Location(kind="s3", bucket="bucket", prefix="", endpoint="http://host")),
        ("s3://host:9000/bucket/a", Location(kind="s3", bucket="bucket", prefix="a/", endpoint="https://host:9000")),
        ("gs://bucket/a", Location(kind="gs", bucket="bucket", prefix="a/")),
        ("as://account/container/a", Location(kind="az", account="account", bucket="container", prefix="a/")),
        ("az://account/container", Location(kind="az", account="account", bucket="container", prefix="")),
    ],
)
def test_urls_as_triton_writes_them(url: str, expected: Location) -> None:
    assert location_of(url) == expected


@pytest.mark.parametrize(
    "url",
    [
        "http://bucket/a",
        "s3://",
        "s3:///a",
        "s3://bucket/a/../b",
        "s3://bucket/./b",
        "gs://bucket/a\u00adb",
        "s3://key:secret@host/bucket",
        "s3://https://user@host/bucket/a",
        "s3://bucket/a?versionId=3",
        "gs://bucket#x",
        "az://account",
        "s3://host:port/bucket",
        "s3://host:0/bucket",
        "s3://bucket/" + "a" * 1024,
        "s3://bucket/a\nb",
    ],
)
def test_urls_that_are_no_repository(url: str) -> None:
    with pytest.raises(BadStoreUrl) as caught:
        location_of(url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("url", ["s3://https://host:9000/bucket/a/b", "gs://bucket", "az://account/container/a"])
def test_a_location_is_shown_as_its_url(url: str) -> None:
    assert str(location_of(url)) == url and location_of(str(location_of(url))) == location_of(url)


@pytest.mark.parametrize(
    ("url", "below"),
    [
        ("s3://bucket/a", True),
        ("s3://bucket/a/b", True),
        ("s3://bucket", False),
        ("s3://bucket/ab", False),
        ("s3://other/a/b", False),
        ("gs://bucket/a/b", False),
        ("s3://https://host:9000/bucket/a/b", False),
    ],
)
def test_a_prefix_is_below_another_one(url: str, below: bool) -> None:
    assert location_of(url).is_below(location_of("s3://bucket/a")) is below


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "oriel_wire.objects.s3", None)
    with pytest.raises(ClientUnusable, match=r"pip install 'oriel-serving\[s3\]'"):
        open_client(location_of("s3://bucket/a"))


@pytest.mark.parametrize(
    ("head", "expected"),
    [
        ({}, ("md5", "25f9e794323b453885f5181f1b624d0b")),
        ({"ServerSideEncryption": "AES256"}, ("md5", "25f9e794323b453885f5181f1b624d0b")),
        ({"ServerSideEncryption": "aws:kms"}, None),  # then the ETag is no MD5
        ({"SSECustomerAlgorithm": "AES256"}, None),
        ({"ChecksumCRC64NVME": "rosUhgp5mIg="}, ("crc64nvme", "ae8b14860a799888")),
        ({"ChecksumCRC32": "y/Q5Jg==", "ServerSideEncryption": "aws:kms"}, ("crc32", "cbf43926")),
        ({"ChecksumCRC32": "y/Q5Jg==", "ChecksumType": "COMPOSITE", "ServerSideEncryption": "aws:kms"}, None),
        ({"ChecksumSHA256": "y/Q5Jg==-3", "ServerSideEncryption": "aws:kms"}, None),
    ],
)
def test_only_checksums_of_the_whole_object_count(head: dict[str, str], expected: tuple[str, str] | None) -> None:
    assert _checksum(head, "25f9e794323b453885f5181f1b624d0b") == expected
