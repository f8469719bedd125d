"""Traffic of the gateway's clients: heads of HTTP/1.1 with `wrk`, gRPC calls with a generator of our own."""

import json
import subprocess
import sys
from pathlib import Path

from harness.load import Failed, Run, lua, post, wrk
from harness.processes import PEERS

__all__ = ["HEADS", "grpc_calls", "http_requests"]

PATH = "/v2/models/digits/infer"
KEY = "oriel-demo-gold"
HEADERS = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
# Heads of clients that differ in their fields, in the order of these, and in how they spell their names. `@` stands
# before what differs in every request; @state is a whole line that one request in four has.
IDS = "x-request-id: @id\r\ntraceparent: 00-@trace-@span-00\r\n@state"
KEYED = f"Authorization: Bearer {KEY}\r\nContent-Type: application/json\r\nContent-Length: @size\r\n"
BROWSER = "Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/142.0.0.0 Safari/537.36"
BALANCED = "X-Forwarded-For: @address\r\nX-Forwarded-Proto: https\r\n"
REQUESTS = (
    "Host: @host\r\nUser-Agent: python-requests/2.32.5\r\nAccept-Encoding: gzip, deflate\r\nAccept: */*\r\n"
    f"Connection: keep-alive\r\n{IDS}{KEYED}"
)
CLIENTS = (
    REQUESTS + BALANCED,
    "Host: @host\r\nAccept: */*\r\nAccept-Encoding: gzip, deflate, br, zstd\r\nConnection: keep-alive\r\n"
    f"User-Agent: python-httpx/0.28.1\r\n{KEYED}{IDS}{BALANCED}",
    f"Host: @host\r\nUser-Agent: Go-http-client/1.1\r\n{KEYED}Traceparent: 00-@trace-@span-00\r\n"
    f"X-Request-Id: @id\r\nAccept-Encoding: gzip\r\n{BALANCED}",
    f"{BALANCED}{IDS}{KEYED}Host: @host\r\nConnection: Keep-Alive\r\nAccept-Encoding: gzip\r\n"
    "User-Agent: okhttp/4.12.0\r\n",
    f"host: @host\r\nconnection: keep-alive\r\n{IDS.lower()}{KEYED}accept: */*\r\naccept-language: *\r\n"
    f"sec-fetch-mode: cors\r\nuser-agent: node\r\naccept-encoding: gzip, deflate\r\n{BALANCED}",
    f"Host: @host\r\nUser-Agent: curl/8.14.1\r\nAccept: */*\r\nX-API-Key: {KEY}\r\nContent-Type: application/json\r\n"
    f"x-request-id: @id\r\nContent-Length: @size\r\n{BALANCED}",
    f'Host: @host\r\nConnection: keep-alive\r\n{KEYED}sec-ch-ua-platform: "Linux"\r\nUser-Agent: {BROWSER}\r\n'
    'sec-ch-ua: "Chromium";v="142", "Google Chrome";v="142", "Not_A Brand";v="99"\r\nsec-ch-ua-mobile: ?0\r\n'
    "Accept: */*\r\nSec-Fetch-Site: same-origin\r\nSec-Fetch-Mode: cors\r\nSec-Fetch-Dest: empty\r\n"
    "Accept-Encoding: gzip, deflate, br, zstd\r\nAccept-Language: de-DE,de;q=0.9,en;q=0.8\r\n"
    f"Cookie: session=@cookie; theme=dark; consent=1\r\n{IDS}{BALANCED}",
    f"Content-Type: application/json\r\nAuthorization: Bearer {KEY}\r\nUser-Agent: Java-http-client/21.0.8\r\n"
    f"Cookie: JSESSIONID=@cookie\r\nHost: @host\r\nContent-Length: @size\r\n{IDS}{BALANCED}",
)
# An ordinary public clientele: 500 programs in eight languages, each request with ids of its own.
PUBLIC = tuple(
    f"Host: @host\r\nUser-Agent: client/{program}\r\nAccept-Language: en-GB,en;q=0.{language}\r\nAccept: */*\r\n"
    f"Accept-Encoding: gzip, deflate, br\r\nConnection: keep-alive\r\n{IDS}{KEYED}"
    for program in range(1, 501)
    for language in range(1, 9)
)
# What heads a workload sends: how it is named -> its clients. None: one head that repeats byte by byte.
HEADS: dict[str, tuple[str, ...] | None] = {"same": None, "varying": (REQUESTS,), "mixed": CLIENTS, "clients": PUBLIC}
DIFFER = """
local function hex(width)
  local text = ''
  while #text < width do text = text .. string.format('%08x', math.random(0, 0x7fffffff)) end
  return text:sub(1, width)
end
request = function()
  local state = ''
  if math.random(4) == 1 then state = 'tracestate: vendor=' .. hex(math.random(8, 32)) .. '\\r\\n' end
  return (clients[math.random(#clients)]:gsub('@(%l+)', {
    id = hex(math.random(8, 36)), trace = hex(32), span = hex(16), state = state, cookie = hex(26),
    address = string.format('10.%d.%d.%d', math.random(0, 255), math.random(0, 255), math.random(1, 254)),
  })) .. wrk.body
end
"""


def http_requests(port: int, heads: str, *, size: int, connections: int, seconds: int, tls: bool, folder: Path) -> Run:
    """POST bodies of `size` bytes over kept connections. Raises Failed if a request failed."""
    known = {"@host": f"127.0.0.1:{port}", "@size": str(size)}
    clients = []
    for client in HEADS[heads] or ():
        for name, value in known.items():
            client = client.replace(name, value)
        clients.append(lua(f"POST {PATH} HTTP/1.1\r\n{client}\r\n").replace("\r\n", "\\r\\n"))
    more = f"local clients = {{ {', '.join(clients)} }}\n{DIFFER}" if clients else ""
    script = post(folder / f"{size}-{heads}.lua", b"x" * size, HEADERS, more)
    return wrk(f"{'https' if tls else 'http'}://127.0.0.1:{port}{PATH}", script, connections, seconds)


def grpc_calls(port: int, *, size: int, connections: int, streams: int, seconds: int, repeated: bool) -> Run:
    """Call ModelInfer with messages of `size` bytes, `streams` at a time on each connection. Raises Failed."""
    command = [sys.executable, str(PEERS / "gateway" / "grpc_load.py")]
    command += [*map(str, (port, connections, streams, seconds, size)), KEY, *["repeated"] * repeated]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"the gRPC load on port {port} failed: {done.stderr[-1000:]}")
    found = json.loads(done.stdout)
    calls = found["calls"]
    return Run(requests=calls, rate=calls / found["seconds"], p50_ms=found["p50_ms"], p99_ms=found["p99_ms"])
