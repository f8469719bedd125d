"""Speed and memory of fetching a model from an object store, beside curl.

    .venv/bin/python benchmarks/store_fetch.py [--size-mb 500] [--rounds 7] [--json FILE]

moto's server (build/stores, made by `make test`) holds one object, uploaded in parts of 64 MiB as vendors' tools do.
By turns (A B A B), in one run and onto one disk: `curl` gets the object whole (`curl_s`); a RemoteStore with an empty
cache fetches the version, with the checksums of its manifest, up to the path that a runtime would open (`oriel_s`). A
third, `curl_ranges_s`, is curl with eight ranges at once: what parts cost moto, which reads the object anew for each.

RSS growth: the most resident memory of this process during a fetch, less what it was before the first.

Prints JSON; exit status 1 if the median speed is less than 70 % of curl's, or RSS grows by more than 64 MiB. The speed
is judged from 500 MB and three rounds on: of a small object the manifest and the index are most of the time.
"""

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness.processes import ROOT

sys.path += [str(ROOT / "tests" / "conformance"), str(ROOT)]

from object_stores import BUCKET, Moto, client_of

from oriel_inference.stores.cache import Cache
from oriel_inference.stores.remote import RemoteStore
from oriel_wire.objects.s3 import S3Client

KEY = "repo/large/1/model.onnx"
PART = 64 << 20
SHARE, RSS_MIB = 0.70, 64
JUDGED_MB, JUDGED_ROUNDS = 500, 3


async def upload(size: int) -> None:
    client, _ = client_of(f"s3://{BUCKET}/repo")
    assert isinstance(client, S3Client)
    raw = await client._open()
    where = {"Bucket": BUCKET, "Key": KEY}
    upload_id = (await raw.create_multipart_upload(**where))["UploadId"]
    parts, block = [], os.urandom(1 << 20)
    for number, start in enumerate(range(0, size, PART), start=1):
        body = (block * (PART >> 20))[: min(PART, size - start)]
        made = await raw.upload_part(**where, UploadId=upload_id, PartNumber=number, Body=body)
        parts.append({"ETag": made["ETag"], "PartNumber": number})
    await raw.complete_multipart_upload(**where, UploadId=upload_id, MultipartUpload={"Parts": parts})
    await client.close()


def curl(url: str, folder: Path, size: int, ranges: int = 1) -> float:
    """Seconds."""
    step = -(-size // ranges)
    command = ["curl", "--silent", "--show-error", "--fail", "--noproxy", "*", "--parallel-max", str(ranges)]
    command += ["--parallel", "--parallel-immediate"] if ranges > 1 else []
    for index in range(ranges):
        part = ["--range", f"{index * step}-{min(size, (index + 1) * step) - 1}"] if ranges > 1 else []
        command += [*(["--next", "--silent", "--fail"] if index else []), *part, "-o", str(folder / str(index)), url]
    began = time.perf_counter()
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    took = time.perf_counter() - began
    assert sum(path.stat().st_size for path in folder.iterdir()) == size, "curl did not get the object"
    return took


def oriel(folder: Path, size: int) -> tuple[float, int]:
    """Seconds of the fetch, and the most resident memory during it."""
    client, prefix = client_of(f"s3://{BUCKET}/repo")
    store = RemoteStore(client, prefix, Cache(folder, max_bytes=2 * size), shown=f"s3://{BUCKET}")
    try:
        store.models()
        Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
        began = time.perf_counter()
        path = store.artifact("large", 1, "model.onnx")
        took = time.perf_counter() - began
        assert path.stat().st_size == size
        return took, status("VmHWM")
    finally:
        store.close()


def status(name: str) -> int:
    """Bytes, of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) << 10
    raise KeyError(name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mb", type=int, default=500, help="10**6 bytes each")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    size = args.size_mb * 10**6
    server = Moto()
    with tempfile.NamedTemporaryFile() as log:
        server.start(Path(log.name), os.getpid())
    server.make_bucket()
    os.environ.update(server.environment(server.port), NO_PROXY="127.0.0.1")
    curls: list[float] = []
    ranges: list[float] = []
    ours: list[float] = []
    peaks: list[int] = []
    load = os.getloadavg()[0]
    try:
        asyncio.run(upload(size))
        with tempfile.TemporaryDirectory() as top:

            def fresh() -> Path:
                shutil.rmtree(Path(top, "x"), ignore_errors=True)
                Path(top, "x").mkdir()
                return Path(top, "x")

            oriel(fresh(), size)  # imports, and the connection's first use
            before = status("VmRSS")
            for _ in range(args.rounds):
                curls.append(curl(server.address(KEY), fresh(), size))
                took, peak = oriel(fresh(), size)
                ours.append(took)
                peaks.append(peak)
            ranges += [curl(server.address(KEY), fresh(), size, ranges=8) for _ in range(3)]
    finally:
        server.close()
    share = statistics.median(curls) / statistics.median(ours)
    growth = (max(peaks) - before) / (1 << 20)
    found = {
        "size_mb": args.size_mb,
        "curl_s": [round(each, 3) for each in curls],
        "oriel_s": [round(each, 3) for each in ours],
        "curl_ranges_s": [round(each, 3) for each in ranges],
        "curl_mb_per_s": round(args.size_mb / statistics.median(curls)),
        "oriel_mb_per_s": round(args.size_mb / statistics.median(ours)),
        "share_of_curl": round(share, 3),
        "rss_growth_mib": round(growth, 1),
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
    }
    text = json.dumps(found, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")
    judged = args.size_mb >= JUDGED_MB and args.rounds >= JUDGED_ROUNDS
    if not judged:
        print(f"not judged: speed; it takes {JUDGED_MB} MB and {JUDGED_ROUNDS} rounds", file=sys.stderr)
    return int((judged and share < SHARE) or growth > RSS_MIB)


if __name__ == "__main__":
    sys.exit(main())
