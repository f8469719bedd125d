"""Attacks by tenants with small limits on a running platform: `python benchmarks/soak.py hostile`.

    [--only WORD] [--quiet-s 2] [--out benchmarks/results]

A gateway, an inference server and a logic server in processes of their own; this process attacks them, each time twice.
First alone: what a hostile request costs the three servers in processor time, over what they cost when idle. Then
beside a canary, another process that asks every 50 ms for `/v2/health/live` and makes one call of another tenant. It
begins `--quiet-s` before the attack, so that the table shows what the machine alone costs. Each attack says in its
first line what it sends, and in its last ones what is wanted beside what is wanted of all of them:

    every answer to the canary and of `/v2/health/live` comes within 500 ms,
    no call of the canary is refused,
    a hostile request costs at most 50 ms of processor time. Where a request makes a server do what it is for (run user
    code, replace a process that it broke, convert 53 MiB) this is shown in brackets and not judged.

Ends with status 1 if a promise is broken. --out: write a page of the results there.
"""

import argparse
import asyncio
import os
import re
import signal
import socket
import struct
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path

from harness.environments import commit, machine
from harness.pages import conditions, table, write_page
from harness.processes import cpu_s
from tests.wire.h2.blocks import literal
from tests.wire.http2_attacks import request_head

from gateway_bench.canary import Call, Sample, canary
from gateway_bench.hostile_platform import HOST, MIB, Rig, platform, small
from oriel_wire.h2.frames import DATA, END_HEADERS, END_STREAM, HEADERS, PREFACE, SETTINGS, frame

BOUND_MS, CPU_MS = 500.0, 50.0
CROWD = "authorization: Bearer crowd"
INFER = b"/inference.GRPCInferenceService/ModelInfer"


class H2:
    """A client over HTTP/2 that sends frames as they are given and reads all that comes."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection((HOST, port))
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock.sendall(PREFACE + frame(SETTINGS, 0, 0) + frame(SETTINGS, 1, 0))
        self.ended = threading.Event()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with suppress(OSError):
            source = self.sock.makefile("rb")
            while len(start := source.read(9)) == 9:
                source.read(int.from_bytes(start[:3], "big"))
                if int.from_bytes(start[5:], "big") and (start[3] == 3 or start[4] & END_STREAM):
                    self.ended.set()
        self.ended.set()

    def begin(self, stream: int, tenant: str, data: bytes, *fields: tuple[bytes, bytes]) -> None:
        head = request_head(INFER) + b"".join(literal(*each) for each in fields)
        head += literal(b"authorization", f"Bearer {tenant}".encode())
        self.sock.sendall(frame(HEADERS, END_HEADERS, stream, head))
        for start in range(0, len(data), 16384):
            self.sock.sendall(frame(DATA, 0, stream, data[start : start + 16384]))

    def bytewise(self, stream: int, data: bytes) -> None:
        for count, each in enumerate(data):
            if self.ended.is_set():
                print(f"    refused after {count} of {len(data)} bytes that came one by one")
                return
            with suppress(ConnectionError):
                self.sock.sendall(frame(DATA, 0, stream, bytes((each,))))


def small_frames(count: int, *, compressed: bool = False) -> Callable[[Rig], int]:
    """Many fields that name no model, and then one byte in each frame."""

    def attack(rig: Rig) -> int:
        client, fields = H2(rig.grpc), b"\x18\x00" * 30_000
        if compressed:
            packer = zlib.compressobj(9, wbits=31)
            data = packer.compress(b"\x18\x00" * 32_000) + packer.flush(zlib.Z_FULL_FLUSH)
            client.begin(1, "small", b"\x01" + struct.pack(">I", 65_000) + data, (b"grpc-encoding", b"gzip"))
            client.bytewise(1, b"\x00\x00\x00\xff\xff" * (count // 5))
        else:
            client.begin(1, "small", b"\x00" + struct.pack(">I", 65_400) + fields)
            client.bytewise(1, b"\x18\x00" * (count // 2))
        client.ended.wait(15.0)
        client.sock.close()
        return 1

    return attack


def endless_text(kilobytes: int) -> Callable[[Rig], int]:
    """A text of escaped quotes that never ends, below brackets."""

    def attack(rig: Rig) -> int:
        text = b'{"model":"double","x":' + b"[" * 65 + b'"' + b'\\"' * (500 * kilobytes)
        status, said = rig.post("/v1/chat/completions", "small", text)
        rig.want(status == 400, f"a text without end was answered {status}: {said[:200]!r}")
        return 1

    return attack


def announced(tenant: str, claims: int) -> Callable[[Rig], int]:
    """Messages that announce 64 MiB, of which 13 bytes come."""

    def attack(rig: Rig) -> int:
        client = H2(rig.grpc)
        for number in range(claims):
            client.begin(1 + 2 * number, tenant, b"\x00" + struct.pack(">I", 64 * MIB - 64) + b"\x0a\x06double")
        time.sleep(6.0)
        client.sock.close()
        return claims

    return attack


def empty_pool(rig: Rig) -> int:
    """Heads that announce 64 MiB each, for a pool without a server."""
    head = f"POST /v2/models/empty/infer HTTP/1.1\r\nhost: x\r\ncontent-length: {64 * MIB}\r\n{CROWD}\r\n\r\n"
    socks = [socket.create_connection((HOST, rig.http)) for _ in range(3)]
    for sock in socks:
        sock.sendall(head.encode())
    time.sleep(6.0)
    for sock in socks:
        sock.close()
    return len(socks)


def full_queue(rig: Rig) -> int:
    """One tenant calls a model of one permit over 1,250 connections."""

    async def one(end_s: float) -> int:
        count = 0
        reader, writer = await asyncio.open_connection(HOST, rig.http)
        body = small()
        head = f"POST /v2/models/slow/infer HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n{CROWD}\r\n\r\n"
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while time.monotonic() < end_s:
                writer.write(head.encode() + body)
                answer = (await reader.readuntil(b"\r\n\r\n")).lower()
                found = re.search(rb"content-length: (\d+)", answer)
                await reader.readexactly(int(found[1]) if found else 0)
                count += 1
                if not answer.startswith(b"http/1.1 200"):
                    await asyncio.sleep(1.0)
        writer.close()
        return count

    async def all_of_them() -> int:
        end_s = time.monotonic() + 8.0
        tasks = [asyncio.create_task(one(end_s)) for _ in range(1250)]
        done, late = await asyncio.wait(tasks, timeout=12.0)
        for task in late:
            task.cancel()
        return sum(task.result() for task in done) + len(late)

    return asyncio.run(all_of_them())


def large_json(rig: Rig) -> int:
    """Four bodies of 53 MiB at once."""
    body = small(53 * MIB // 4)
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda _: rig.post("/v2/models/double/infer", "crowd", body)[0], range(4)))
    print("   ", answers)
    return 4


def log_mib(pid: int) -> float:
    return os.stat(f"/proc/{pid}/fd/2").st_size / MIB


def printing(rig: Rig) -> int:
    """Three calls of a service that prints 50 MB each."""
    before, begun = log_mib(rig.pids["logic"]), time.monotonic()
    answers = [rig.post("/v1/services/prints", "crowd")[0] for _ in range(3)]
    more = log_mib(rig.pids["logic"]) - before
    print("   ", answers, f"log: {more:.2f} MiB more")
    most = 2 * (time.monotonic() - begun) * 64 / 1024 + 0.5
    rig.want(more < most, f"the log grew by {more:.1f} MiB: 64 KiB a second of two workers are {most:.1f}")
    return 3


def breaking(rig: Rig) -> int:
    """Four calls of a service that breaks the process that it runs in."""
    answers = [rig.post("/v1/services/breaks", "crowd")[0] for _ in range(4)]
    time.sleep(2.0)
    after = [rig.post("/v1/services/well", "canary")[0] for _ in range(8)]
    print("   ", answers, after)
    rig.want(after == [200] * 8, f"a service beside a broken one was answered {after}")
    return 4


def runs(pid: int) -> bool:
    """Return whether there is such a process, and it has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def forking(rig: Rig) -> int:
    """Ten calls of a service that leaves a process behind; then the logic server is asked to end."""
    said = [rig.post("/v1/services/forks", "crowd") for _ in range(10)]
    children = [int(re.sub(rb"\D", b"", body)) for status, body in said if status == 200]
    os.kill(rig.pids["logic"], signal.SIGTERM)
    end = time.monotonic() + 20.0
    while runs(rig.pids["logic"]) and time.monotonic() < end:
        time.sleep(0.1)
    left = [child for child in children if runs(child)]
    print("   ", [status for status, _ in said], f"{len(left)} processes left")
    rig.want(not left, f"{len(left)} processes of services outlived the logic server")
    for child in left:
        os.kill(child, signal.SIGKILL)
    return 10


LARGE = Call(body=small(50_000))
OWN_WORK = frozenset(("large_json", "printing", "breaking", "forking"))
CASES: dict[str, tuple[Callable[[Rig], int], Call]] = {
    **{f"gRPC message, {n} one-byte frames": (small_frames(n), Call(body=small())) for n in (1000, 5000)},
    "the same compressed, 400": (small_frames(400, compressed=True), Call(body=small())),
    **{f"text without end, {n} KB": (endless_text(n), Call(body=small())) for n in (48, 900)},
    "64 MiB announced, bronze": (announced("small", 3), LARGE),
    "64 MiB announced, gold": (announced("small_gold", 4), LARGE),
    "64 MiB announced, empty pool": (empty_pool, Call(path="/v2/models/empty/infer", body=b"{}", held_ms=1000)),
    "1,250 connections": (full_queue, Call(body=small(), tenant="quiet", path="/v2/models/slow/infer", every_s=0.3)),
    "JSON of 53 MiB": (large_json, Call(tenant="first", body=small(600_000), every_s=0.5)),
    "service that prints": (printing, Call(path="/v1/services/well", body=b"")),
    "service that breaks its process": (breaking, Call(path="/v1/services/well", body=b"")),
    "service that forks": (forking, Call(body=small())),
}
HEADING = ("attack", "requests", "CPU ms of one: inference, logic, gateway", "call before", "call", "health", "refused")


def used_ms(rig: Rig) -> dict[str, float]:
    """Return the processor time of each server so far, with that of processes that have ended."""
    return {unit: 1e3 * cpu_s(pid, ended=True) for unit, pid in rig.pids.items()}


def alone(rig: Rig, name: str, quiet_s: float) -> tuple[int, list[float]]:
    """Run an attack without a canary: how many requests it made, and what one cost each server, in milliseconds."""
    attack, _ = CASES[name]
    idle, idle_s = used_ms(rig), time.monotonic()
    time.sleep(quiet_s)
    before, before_s = used_ms(rig), time.monotonic()
    count = attack(rig)
    time.sleep(0.5)
    after, after_s = used_ms(rig), time.monotonic()
    share = (after_s - before_s) / (before_s - idle_s)
    spent = [after[unit] - before[unit] - share * (before[unit] - idle[unit]) for unit in before]
    cost = [max(0.0, each) / count for each in spent]
    if attack.__name__ not in OWN_WORK:
        rig.want(sum(cost) <= CPU_MS, f"a request costs {sum(cost):.0f} ms of processor time")
    time.sleep(1.5)  # a tenant of one request a second has its share again
    return count, cost


def beside(rig: Rig, name: str, quiet_s: float) -> tuple[list[float], str]:
    """Run an attack beside the canary: its worst milliseconds (before, a call, health), and how many were refused."""
    attack, call = CASES[name]
    mine, other = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=canary, args=(rig.http, call, other), daemon=True)
    process.start()
    mine.recv()
    quiet_s += time.monotonic()
    time.sleep(max(0.0, quiet_s - time.monotonic()))
    begun = time.monotonic()
    attack(rig)
    time.sleep(0.5)
    mine.send("end")
    samples: list[Sample] = mine.recv()
    process.join()

    def worst(health: bool, during: bool) -> float:
        return max((ms for at, kind, ms, *_ in samples if kind is health and (at >= begun) is during), default=0.0)

    found = [worst(False, False), worst(False, True), worst(True, True)]
    refused = [
        (status, said) for at, health, _, status, said in samples if at >= begun and not health and status != 200
    ]
    count = sum(not health and at >= begun for at, health, *_ in samples)
    for most, what in zip(found[1:], ("a call of another tenant", "/v2/health/live"), strict=True):
        rig.want(most <= BOUND_MS, f"{what} took {most:.0f} ms")
    rig.want(not refused, f"{len(refused)} of {count} calls of another tenant were refused: {refused[:1]}")
    rig.want(count > 0, "the canary made no call")
    return found, f"{len(refused)} of {count}"


def measured(rig: Rig, name: str, quiet_s: float) -> tuple[tuple[str, ...], list[str]]:
    """Run one attack twice. Return its row of the table, and what it broke."""
    rig.wrong.clear()
    if name == "service that forks":  # it ends the logic server, so it runs once
        (before, call, health), refused = beside(rig, name, quiet_s)
        count, cost = 10, list[float]()
    else:
        count, cost = alone(rig, name, quiet_s)
        (before, call, health), refused = beside(rig, name, quiet_s)
    spent = ", ".join(f"{each:.1f}" for each in cost)
    judged = CASES[name][0].__name__ not in OWN_WORK
    row = (
        name,
        f"{count:,}",
        spent if judged else f"({spent})",
        *(f"{ms:.0f}" for ms in (before, call, health)),
        refused,
    )
    print(*row, sep=" | ", flush=True)
    print(*(f"    BROKEN: {each}" for each in rig.wrong), sep="\n", end="\n" if rig.wrong else "", flush=True)
    return row, list(rig.wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="attacks whose name has this word")
    parser.add_argument("--quiet-s", type=float, default=2.0, help="before each attack")
    parser.add_argument("--out", type=Path, help="a folder for a page of the results")
    args = parser.parse_args()
    where = machine(os.cpu_count() or 1)
    print(*HEADING, sep=" | ")
    with platform() as rig:
        found = {name: measured(rig, name, args.quiet_s) for name in CASES if args.only in name}
    if args.out:
        held = conditions(where, commit(), "worst of all answers of the canary; processor time of one run")
        about = "`python benchmarks/soak.py hostile`, whose help says what each attack is and what is wanted."
        rows = [row for row, _ in found.values()]
        broken = [f"- {name}: {each}" for name, (_, wrong) in found.items() for each in wrong]
        text = table(HEADING, rows) + "\n\nBroken promises:\n\n" + ("\n".join(broken) or "none") + "\n"
        write_page(
            args.out, "hostile", "Attacks by tenants", f"{held}\n\n{about}", text, {"rows": rows, "broken": broken}
        )
    return 1 if any(wrong for _, wrong in found.values()) else 0
