"""A small model server as a process of its own, for tests that kill, stop and resume it.

Usage: python pod.py PORT WORK_MS SLOTS HOST

It answers an inference after WORK_MS with its process id, SLOTS at a time, and prints one line per execution. A body
"size N" is answered with N bytes. All other requests, such as probes and the repository index, are answered at once and
do not count as executions.
"""

import asyncio
import os
import sys
import time


def timeout_ms(head: str) -> int:
    return next((int(line[19:]) for line in head.split("\r\n") if line.startswith("x-oriel-timeout-ms:")), 60_000)


async def serve(port: int, work_s: float, slots: int, host: str) -> None:
    free = asyncio.Semaphore(slots)

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
                length = next((int(line[15:]) for line in head.split("\r\n") if line.startswith("content-length:")), 0)
                body = await reader.readexactly(length)
                if head.partition(" http/")[0].endswith("/infer"):
                    # Nothing is executed for a caller that has left, as in any server that notices this.
                    left = asyncio.ensure_future(reader.read(1))
                    due = time.monotonic() + timeout_ms(head) / 1000.0
                    async with free:
                        await asyncio.wait((left,), timeout=work_s)
                    left.cancel()
                    await asyncio.wait((left,))
                    # After SIGCONT the process runs its timers before it has read which callers left meanwhile.
                    for _ in range(3):
                        await asyncio.sleep(0)
                    # Nothing may come between this check and the work: a caller that left meanwhile would be worked
                    # for.
                    if not left.cancelled() or reader.at_eof() or time.monotonic() > due:
                        return
                    os.write(1, b"ran " + body + b"\n")
                answer = bytes(int(body[5:])) if body.startswith(b"size ") else str(os.getpid()).encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(answer), answer))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(one, host, port)
    os.write(1, b"port %d\n" % server.sockets[0].getsockname()[1])
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(
        serve(int(sys.argv[1]), float(sys.argv[2]) / 1000.0, int(sys.argv[3]), (sys.argv[4:] or ["127.0.0.1"])[0])
    )
