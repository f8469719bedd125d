"""Reverse proxies to compare: each a process in front of the same upstream, plain or with TLS on its own port."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

__all__ = ["CASES", "PEERS", "ROOT", "Contender", "cpu_s", "free_port", "free_ports", "running", "start", "tree"]

ROOT = Path(__file__).resolve().parents[2]
PEERS = Path(__file__).resolve().parents[1] / "peers"
CASES = ("oriel", "oriel compiled", "nginx", "tcp floor", "envoy", "starlette+aiohttp", "starlette+httpx")
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
Contender = tuple[int, int]  # process id, port

NGINX = """
worker_processes 1;
daemon off;
pid {folder}/nginx.pid;
error_log {folder}/error.log;
events {{ worker_connections 1024; }}
http {{
  access_log off;
  client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s;
  keepalive_requests 10000000;
  client_max_body_size 64m;
  client_body_buffer_size 1m; proxy_buffers 8 128k; proxy_buffer_size 128k; proxy_busy_buffers_size 256k;
  upstream u {{ server 127.0.0.1:{upstream}; keepalive 64; keepalive_requests 10000000; }}
  server {{
    listen 127.0.0.1:{port}{tls};
    location / {{ proxy_pass http://u; proxy_http_version 1.1; proxy_set_header Connection ""; }}
  }}
}}
"""


def free_ports(count: int) -> list[int]:
    """So many ports nobody listens on now."""
    with ExitStack() as stack:
        made = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in made:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in made]


def free_port() -> int:
    """A port nobody listens on now."""
    return free_ports(1)[0]


def peers_python() -> Path:
    """The interpreter of the peers' environment, made on first use."""
    folder = ROOT / "build" / "bench-peers"
    python = folder / "bin" / "python"
    wanted = (PEERS / "requirements.txt").read_text()
    ready = folder / "ready"
    if not ready.exists() or ready.read_text() != wanted:
        print("making the peers' environment ...", file=sys.stderr)
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "-r", PEERS / "requirements.txt"], check=True)
        ready.write_text(wanted)
    return python


def compiled_python() -> Path:
    """The interpreter of an environment with the compiled gateway, made on first use and when a source has changed."""
    subprocess.run(["make", "--silent", "compiled"], cwd=ROOT, check=True, stdout=sys.stderr)
    python = ROOT / "build" / "compiled" / "bin" / "python"
    asked = [python, "-c", "import oriel_gateway.call.http; print(oriel_gateway.call.http.__file__)"]
    file = subprocess.run(asked, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
    if not file.endswith(".so"):
        sys.exit(f"{file} is not compiled")
    return python


@contextmanager
def running(command: list[str], port: int, start_s: float = 30.0, **environment: str) -> Iterator[int]:
    """The process id of a server that accepts on `port` within `start_s`."""
    log = tempfile.TemporaryFile()
    process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=log, stderr=log, cwd=ROOT)
    try:
        end = time.monotonic() + start_s
        while True:
            if process.poll() is not None or time.monotonic() > end:
                log.seek(0)
                sys.exit(f"{command[0]} did not start: {log.read().decode()[-2000:]}")
            with socket.socket() as sock:
                if sock.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield process.pid
    finally:
        process.terminate()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def tree(pid: int) -> list[int]:
    out = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            out += tree(int(child))
    return out


def cpu_s(pid: int) -> float:
    """User and system seconds so far of a process and its descendants."""
    total = 0
    for member in tree(pid):
        fields = Path(f"/proc/{member}/stat").read_text().rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total * TICK_S


def certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate for localhost and its key; made once per folder."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    if not cert.exists():
        if shutil.which("openssl") is None:
            sys.exit("openssl is not on PATH: it makes the certificate of the TLS case")
        subprocess.run(
            ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
            + ["-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=localhost"],
            check=True,
            capture_output=True,
        )
    return cert, key


@contextmanager
def start(
    name: str, folder: Path, upstream: int, *, tls: bool = False, policies: str = "policies/examples"
) -> Iterator[Contender]:
    """One contender; `policies` is Oriel's folder of documents, whose pool `inference` becomes the upstream."""
    port = free_port()
    folder = folder / f"{name}-{port}"
    folder.mkdir()
    with running(_command(name, folder, port, upstream, tls, policies), port, **_environment(upstream)) as pid:
        yield pid, port


def _environment(upstream: int) -> dict[str, str]:
    return {"UPSTREAM": f"http://127.0.0.1:{upstream}"}


def _command(name: str, folder: Path, port: int, upstream: int, tls: bool, policies: str) -> list[str]:
    cert, key = certificate(folder) if tls else (None, None)
    if name in ("oriel", "oriel compiled"):
        python = sys.executable if name == "oriel" else str(compiled_python())
        command = [python, "-m", "oriel_cli.main", "gateway", "--policies", policies]
        command += ["--http-port", str(port), "--grpc-port", str(free_port()), "--admin-port", str(free_port())]
        command += ["--endpoint", f"inference=127.0.0.1:{upstream}"]
        return command + (["--tls-cert", str(cert), "--tls-key", str(key)] if tls else [])
    if name == "nginx":
        secure = f" ssl;\n    ssl_certificate {cert};\n    ssl_certificate_key {key}" if tls else ""
        config = folder / "nginx.conf"
        config.write_text(NGINX.format(folder=folder, upstream=upstream, port=port, tls=secure))
        return ["nginx", "-c", str(config), "-p", str(folder)]
    if name == "envoy":
        config = folder / "envoy.json"
        config.write_text(json.dumps(_envoy(port, upstream)))
        envoy = peers_python().parent / "envoy"
        return [str(envoy), "-c", str(config), "--concurrency", "1", "--use-dynamic-base-id", "-l", "error"]
    if name == "tcp floor":
        command = [sys.executable, str(PEERS / "tcp_floor.py"), str(port), str(upstream)]
        return command + ([str(cert), str(key)] if tls else [])
    app = "naive_" + name.partition("+")[2]
    return [
        *(str(peers_python()), "-m", "uvicorn", f"{app}:app", "--app-dir", str(PEERS), "--no-access-log"),
        *("--loop", "uvloop", "--http", "httptools", "--port", str(port), "--log-level", "error"),
    ]


def _envoy(port: int, upstream: int) -> dict[str, object]:
    def address(number: int) -> dict[str, object]:
        return {"socket_address": {"address": "127.0.0.1", "port_value": number}}

    extensions = "type.googleapis.com/envoy.extensions.filters"
    manager = {
        "@type": f"{extensions}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "in",
        "route_config": {
            "virtual_hosts": [
                {"name": "v", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "u"}}]}
            ]
        },
        "http_filters": [
            {"name": "envoy.filters.http.router", "typed_config": {"@type": f"{extensions}.http.router.v3.Router"}}
        ],
    }
    chain = {"filters": [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]}
    endpoints = [{"lb_endpoints": [{"endpoint": {"address": address(upstream)}}]}]
    cluster = {"name": "u", "type": "STATIC", "load_assignment": {"cluster_name": "u", "endpoints": endpoints}}
    return {
        "static_resources": {
            "listeners": [{"name": "l", "address": address(port), "filter_chains": [chain]}],
            "clusters": [cluster],
        }
    }
