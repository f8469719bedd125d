"""A unit for tests of the supervisor: it answers every path on one port.

Usage: python fake_unit.py PORT [fail | deaf | slow PIPE | child PIDFILE]

fail: does not start. deaf: never stops. slow: stops when it can read from PIPE. child: starts a process that ignores
signals, and writes its process id to PIDFILE.
"""

import asyncio
import contextlib
import subprocess
import sys
from pathlib import Path

from oriel_wire.errors import StartFailed
from oriel_wire.process.process import listen, run_unit

STUCK = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
BODY = b'[{"name": "sample", "version": "1"}]'
STOPPING = b'{"ready": false, "reason": "it is stopping, 2 call(s) under way"}'
stopping = False


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
        await reader.readuntil(b"\r\n\r\n")
        status, body = (b"503 Stopping", STOPPING) if stopping else (b"200 OK", BODY)
        writer.write(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))
        await writer.drain()
    writer.close()


def pass_gate(path: str) -> None:
    with open(path, "rb", 0) as gate:
        gate.read(1)


async def main(stop: asyncio.Event) -> None:
    port, how = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
    if how == "fail":
        raise StartFailed("the model is missing: add it")
    if how == "child":
        # A grandchild that ignores everything but SIGKILL, as a stuck worker would.
        stuck = (
            "import signal,time; signal.signal(15, signal.SIG_IGN); signal.signal(1, signal.SIG_IGN); time.sleep(600)"
        )
        child = subprocess.Popen([sys.executable, "-S", "-c", stuck])
        Path(sys.argv[3]).write_text(str(child.pid))
    sock = listen("127.0.0.1", port, "fake HTTP")
    server = await asyncio.start_server(answer, sock=sock)
    await stop.wait()
    global stopping
    stopping = True
    if how == "slow":
        await asyncio.to_thread(pass_gate, sys.argv[3])
    if how == "deaf":
        await asyncio.Event().wait()
    server.close()


if __name__ == "__main__":
    sys.exit(run_unit(main, unit="fake"))
