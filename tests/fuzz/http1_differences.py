"""Write docs/http-differences.md: what Oriel's gateway, nginx and h11 make of the same bytes. Needs nginx on PATH.

    PYTHONPATH=wire:policies:gateway:cli:tests .venv/bin/python tests/fuzz/http1_differences.py

The gateway and nginx (proxy_pass, with the configuration below and nothing else) stand in front of the same scripted
upstream, which answers 200 and keeps what reached it. `test_http1_differences` compares the page with what happens.
"""

import asyncio
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap

from oriel_cli.up.units import free_ports

if __package__:
    from ..gateway.stack import Seen, Upstream, documents, gateway, upstream
    from ..waiting import until
    from .http1 import with_h11
    from .http1_cases import CASES, Case
else:  # run as a script
    from gateway.stack import Seen, Upstream, documents, gateway, upstream
    from http1 import with_h11
    from http1_cases import CASES, Case
    from waiting import until

PAGE = Path(__file__).resolve().parents[2] / "docs" / "http-differences.md"
NGINX = shutil.which("nginx")
TICK_S = 0.01
QUIET_TICKS = 40  # in each of them this process, which is client, gateway and upstream, reads whatever has come
TOGETHER_TICKS = 600  # nginx is another process, and the machine may have other work
# How the page begins the lists of cases in which all three agree -> the first digit of Oriel's status.
ALIKE = {"Read by all three: ": "2", "Refused by all three: ": "4"}
_SHORT = {"/v2/models/digits/infer": "…/infer"}


async def ask(port: int, data: bytes, quiet_ticks: int = QUIET_TICKS) -> str:
    """Send bytes; returns the statuses of the answers, and whether the connection was closed. It ends when nothing has
    come for `quiet_ticks` ticks.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    got, closed, quiet = b"", False, 0
    while not closed and quiet < quiet_ticks:
        reading = asyncio.ensure_future(reader.read(65536))
        while quiet < quiet_ticks and not (await asyncio.wait((reading,), timeout=TICK_S))[0]:
            quiet += 1
        if not reading.done():
            reading.cancel()
            await asyncio.wait((reading,))
            break
        quiet = 0
        piece = b"" if reading.exception() else reading.result()
        got += piece
        closed = not piece
    writer.transport.abort()
    statuses = [found.decode() for found in re.findall(rb"HTTP/1\.1 ([0-9]{3}) ", got)]
    statuses = [status for status in statuses if status != "100"]
    if not statuses:
        return "closed" if closed else "waits"
    return ", ".join([*statuses, "close"] if closed else statuses)


def seen(up: Upstream) -> str:
    """Summarise what reached the upstream."""
    found = []
    for request in up.seen:
        method, target, _ = request.head.split("\r\n")[0].split(" ")
        for long, short in _SHORT.items():
            target = target.replace(long, short)
        target = target if len(target) < 40 else target[:20] + "…"
        body = f" {len(request.body)} B" if request.body else ""
        found.append(f"{method} {target}{body}" if target not in ("/v2", "…/infer") else f"{target}{body}")
    return "; ".join(found)


def told(said: str, reached: str) -> str:
    return f"{said} ({reached})" if reached else said


async def by_gateway(case: Case) -> str:
    """Return the gateway's outcome."""
    async with upstream() as up, gateway(documents([up.port])) as (port, _):
        return told(await ask(port, case.data), seen(up))


def by_h11(case: Case) -> str:
    """Return h11's outcome, as a server that reads bodies and keeps connections."""
    requests, refusal = with_h11(case.data)
    up = Upstream()
    up.seen = [Seen(f"{method} {target} HTTP/1.1".encode("latin-1"), body) for method, target, _, body in requests]
    said = ", ".join(["200"] * len(requests) + ([str(refusal), "close"] if refusal else [])) or "waits"
    return told(said, seen(up))


def listens(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


async def by_nginx(cases: Sequence[Case]) -> list[str]:
    """Return nginx's outcome for each case; one process serves a port per case."""
    assert NGINX is not None
    ups = [upstream() for _ in cases]
    opened = [await each.__aenter__() for each in ups]
    ports = free_ports("127.0.0.1", len(cases))
    servers = "\n".join(
        f"server {{ listen 127.0.0.1:{port}; location / {{ proxy_pass http://127.0.0.1:{up.port}; }} }}"
        for port, up in zip(ports, opened, strict=True)
    )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "nginx.conf").write_text(
            f"daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log crit;\n"
            "events { worker_connections 4096; }\n"
            f"http {{ access_log off; client_body_temp_path {folder}/b; proxy_temp_path {folder}/p;\n"
            f"fastcgi_temp_path {folder}/f; uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;\n"
            f"proxy_http_version 1.1; proxy_set_header Connection '';\n{servers}\n}}\n"
        )
        process = subprocess.Popen([NGINX, "-p", folder, "-c", f"{folder}/nginx.conf"], stderr=subprocess.DEVNULL)
        try:
            await until(lambda: listens(ports[-1]))
            said = await asyncio.gather(
                *(ask(port, case.data, TOGETHER_TICKS) for port, case in zip(ports, cases, strict=True))
            )
        finally:
            process.terminate()
            process.wait(60)
        found = [told(each, seen(up)) for each, up in zip(said, opened, strict=True)]
    for each in ups:
        await each.__aexit__(None, None, None)
    return found


def agree(one: str, other: str) -> bool:
    """Whether two outcomes have the same statuses and the same requests upstream. Whether the connection is kept is
    shown on the page, but not compared.
    """

    def plain(said: str) -> tuple[list[str], str]:
        words, _, reached = said.partition(" (")
        return [word for word in words.split(", ") if word != "close"], reached

    return plain(one) == plain(other)


def sentences(why: str) -> list[str]:
    """Split a reason into its sentences."""
    return re.split(r"(?<=[.?]) (?=[A-Zhn])", why) if why else []


def page(rows: Sequence[tuple[Case, str, str, str]], version: str) -> str:
    """Return the whole document."""
    lines = [
        "# HTTP/1.1: what Oriel refuses, beside nginx and h11",
        "",
        f"Written by `tests/fuzz/http1_differences.py` with {version} (`proxy_pass`, defaults) and h11; do not edit.",
        "A cell is the statuses of the answers, `close` if the connection ends then, `waits` if the message is taken",
        "as not complete, and in brackets what reached the upstream (`/v2` and `…/infer`, and the bytes of the body).",
        "h11 is a parser: its 200 means that it read a request, and who uses it closes. `[n]` is a reason of several",
        "rows, listed at the end.",
        "",
    ]
    counted = Counter(sentence for case, *_ in rows for sentence in sentences(case.why))
    repeated = [sentence for sentence, count in counted.items() if count > 1]
    for group in dict.fromkeys(case.group for case, *_ in rows):
        lines += [f"## {group.capitalize()}", "", "| case | Oriel | nginx | h11 | why |", "|---|---|---|---|---|"]
        for case, ours, nginx, h11 in rows:
            if case.group == group and case.why:
                told = sentences(case.why)
                why = " ".join(f"[{repeated.index(each) + 1}]" if each in repeated else each for each in told)
                cells = [cell.replace("|", "\\|") for cell in (case.name, ours, nginx, h11, why)]
                lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
        for begin, first in ALIKE.items():
            names = [case.name for case, ours, *_ in rows if case.group == group and not case.why and ours[0] == first]
            if names:
                lines += [*wrap(begin + "; ".join(names) + ".", 116, break_on_hyphens=False), ""]
    lines += ["## Reasons of several rows", ""]
    for number, why in enumerate(repeated, start=1):
        lines += wrap(f"{number}. {why}", 116, subsequent_indent="   ", break_on_hyphens=False)
    return "\n".join([*lines, ""])


async def compare() -> list[tuple[Case, str, str, str]]:
    """Run every case through all three."""
    ours = await asyncio.gather(*map(by_gateway, CASES))
    return list(zip(CASES, ours, await by_nginx(CASES), map(by_h11, CASES), strict=True))


def main() -> int:
    if NGINX is None:
        sys.stderr.write("this needs nginx on PATH\n")
        return 2
    version = subprocess.run([NGINX, "-v"], capture_output=True, text=True, check=True).stderr.strip().split(": ")[1]
    rows = asyncio.run(compare())
    PAGE.write_text(page(rows, version))
    wrong = 0
    for case, ours, nginx, h11 in rows:
        if (agree(ours, nginx) and agree(ours, h11)) == bool(case.why):
            sys.stderr.write(f"{case.group}: {case.name}: {ours} | {nginx} | {h11} | {case.why or 'not explained'}\n")
            wrong = 1
    return wrong


if __name__ == "__main__":
    sys.exit(main())
