"""The canary of `hostile.py`: a process that asks a gateway again and again and says how long each answer took."""

import http.client
import threading
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

__all__ = ["Call", "Sample", "canary"]

HOST, EVERY_S = "127.0.0.1", 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A call of the canary.

    held_ms: the call has to wait so long for its answer, which then says that no server came.
    """

    body: bytes
    tenant: str = "canary"
    path: str = "/v2/models/double/infer"
    every_s: float = EVERY_S
    held_ms: float = 0.0


Sample = tuple[float, bool, float, int, bytes]  # begun at, is of health, milliseconds, status, refusal


def ask(port: int, call: Call | None, going: threading.Event, out: list[Sample]) -> None:
    """Ask again and again, on one connection while it lasts. call: None for the health of the gateway."""
    connection = http.client.HTTPConnection(HOST, port, timeout=60)
    headers = {"authorization": f"Bearer {call.tenant}"} if call else {}
    if call and call.held_ms:
        headers["x-request-timeout-ms"] = f"{call.held_ms:.0f}"
    while not going.wait(call.every_s if call else EVERY_S):
        begun, status, said = time.monotonic(), 0, b""
        try:
            if call:
                connection.request("POST", call.path, call.body, headers)
            else:
                connection.request("GET", "/v2/health/live")
            answer = connection.getresponse()
            status, said = answer.status, answer.read()
        except (OSError, http.client.HTTPException) as broken:
            said = repr(broken).encode()
            connection.close()
        spent_ms = 1e3 * (time.monotonic() - begun)
        if call and call.held_ms and status in (502, 503, 504) and spent_ms > 0.8 * call.held_ms:
            status, spent_ms = 200, max(0.0, spent_ms - call.held_ms)
        out.append((begun, call is None, spent_ms, status, b"" if status == 200 else said[:300]))


def canary(port: int, call: Call, pipe: Connection) -> None:
    """Ask until anything comes over the pipe; then send the samples. Sends a word when there are some."""
    going, out = threading.Event(), list[Sample]()
    threads = [threading.Thread(target=ask, args=(port, each, going, out)) for each in (call, None)]
    for thread in threads:
        thread.start()
    while len({health for _, health, *_ in list(out)}) < 2:
        time.sleep(0.05)
    pipe.send("ready")
    pipe.recv()
    going.set()
    for thread in threads:
        thread.join()
    pipe.send(out)
