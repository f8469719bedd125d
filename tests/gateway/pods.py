"""Model servers as processes of their own, and callers that keep a gateway in front of them busy."""

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic

from .stack import Client, documents

INFER = "/v2/models/digits/infer"
POD = Path(__file__).with_name("pod.py")
PROBED = 'probe = "/v2/health/ready"'


class Pod:
    """A model server in a process.

    ran: how often each body was executed there.
    ran_s: when each body was executed last, in monotonic seconds.
    """

    def __init__(self, process: Process, port: int) -> None:
        self.process = process
        self.port = port
        self.ran: Counter[bytes] = Counter()
        self.ran_s: dict[bytes, float] = {}

    async def read(self) -> None:
        """Count the executions that the process reports, until it ends."""
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            body = line.strip()
            self.ran[body] += 1
            self.ran_s[body] = monotonic()

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)


@asynccontextmanager
async def pod(work_ms: int = 5, port: int = 0, slots: int = 1_000_000, host: str = "127.0.0.1") -> AsyncIterator[Pod]:
    words = (str(port), str(work_ms), str(slots), host)
    process = await asyncio.create_subprocess_exec(sys.executable, str(POD), *words, stdout=PIPE)
    assert process.stdout is not None
    made = Pod(process, int((await process.stdout.readline()).split()[1]))
    reading = asyncio.create_task(made.read())
    try:
        yield made
    finally:
        if process.returncode is None:
            made.signal(signal.SIGKILL)
        await process.wait()
        await reading


def files(pods: list[Pod], *, idempotent: bool, probe: str = PROBED) -> dict[str, bytes]:
    text = documents([each.port for each in pods], max_inflight=16, pool=probe)["all.toml"]
    text = b"\n".join(line for line in text.split(b"\n") if not line.startswith(b"grpc_endpoints"))
    route = b'[[routes]]\nmodel = "*"\npool = "p"\n'
    return {"all.toml": text.replace(route, route + b"idempotent = true\n", 1) if idempotent else text}


class Load:
    """Callers that each send the next request as soon as the last one is answered.

    answers: per answer its time, its status, the body that was sent and the body that came back.
    goes_on: while it is cleared, no further call is made.
    """

    def __init__(self, port: int, callers: int, *, timeout_ms: int) -> None:
        self._port = port
        self._headers = f"x-request-timeout-ms: {timeout_ms}\r\n"
        self.answers: list[tuple[float, int, bytes, bytes]] = []
        self.going = True
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self._tasks = [asyncio.create_task(self._call(n)) for n in range(callers)]

    async def _call(self, caller: int) -> None:
        async with Client(self._port) as client:
            number = 0
            while self.going:
                await self.goes_on.wait()
                number += 1
                body = b"%d-%d" % (caller, number)
                reply = await client.ask(INFER, body, headers=self._headers)
                self.answers.append((monotonic(), reply.status, body, reply.body))
                assert reply.status not in (502, 503) or "retry-after" in reply.headers

    async def stop(self) -> Counter[int]:
        self.going = False
        await asyncio.gather(*self._tasks)
        return Counter(status for _, status, _, _ in self.answers)


async def ports_of(process: Process) -> int:
    assert process.stderr is not None
    async with asyncio.timeout(60):
        async for line in process.stderr:
            if b"on HTTP" in line:
                return int(line.split(b"on HTTP 127.0.0.1:")[1].split()[0])
    raise AssertionError("the gateway did not start")
