"""Reverse proxies to compare: each a process in front of the same upstream, plain or with TLS on its own port.

A new one gets a name in CONTENDERS and its command in `_command`; packages it needs go into the environment `proxies`.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from harness.environments import compiled_python, python_of
from harness.processes import PEERS, accepts, free_port, gateway_command, serving

__all__ = ["CONTENDERS", "Contender", "start", "upstream"]

FILES = PEERS / "gateway"
CONTENDERS = (
    *("oriel", "oriel compiled", "nginx", "haproxy", "envoy"),
    *("tcp floor", "grpc.aio", "starlette+aiohttp"),
)
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
    listen 127.0.0.1:{port}{options};
    location / {{ {forward} }}
  }}
}}
"""
NGINX_HTTP = 'proxy_pass http://u; proxy_http_version 1.1; proxy_set_header Connection "";'
HAPROXY = """
global
  nbthread 1
  maxconn 8000
defaults
  mode http
  timeout connect 5s
  timeout client 60s
  timeout server 60s
frontend clients
  bind 127.0.0.1:{port}{options}
  default_backend servers
backend servers
  http-reuse always
  server one 127.0.0.1:{upstream}{protocol}
"""


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
def upstream(ports: Sequence[int], *, grpc: bool = False) -> Iterator[int]:
    """The process id of the trivial server behind every contender; it listens on all these ports, for gRPC on one."""
    command = [sys.executable, str(FILES / ("grpc_upstream.py" if grpc else "upstream.py")), *map(str, ports)]
    with serving(command, lambda: accepts(ports[0]), own_session=False) as pid:
        yield pid


@contextmanager
def start(
    name: str, folder: Path, upstream: int, *, tls: bool = False, grpc: bool = False, pool: str = "inference"
) -> Iterator[Contender]:
    """One contender in front of the port `upstream`. grpc: it and the upstream get calls over HTTP/2.

    pool: pool of the example documents that `upstream` is.
    """
    port = free_port()
    folder = folder / f"{name}-{port}"
    folder.mkdir()
    command, environment = (
        _command(name, folder, port, upstream, tls, grpc, pool),
        {"UPSTREAM": f"http://127.0.0.1:{upstream}"},
    )
    with serving(command, lambda: accepts(port), environment, own_session=False) as pid:
        yield pid, port


def _command(name: str, folder: Path, port: int, upstream: int, tls: bool, grpc: bool, pool: str) -> list[str]:
    cert, key = certificate(folder) if tls else (None, None)
    if name in ("oriel", "oriel compiled"):
        endpoint = "--grpc-endpoint" if grpc else "--endpoint"
        command = gateway_command("policies/examples", port, endpoint, f"{pool}=127.0.0.1:{upstream}")
        if name == "oriel compiled":
            command[0] = str(compiled_python())
        return command + (["--tls-cert", str(cert), "--tls-key", str(key)] if tls else [])
    if name == "nginx":
        options = " http2" if grpc else ""
        if tls:
            options += f" ssl;\n    ssl_certificate {cert};\n    ssl_certificate_key {key}"
        forward = "grpc_pass grpc://u;" if grpc else NGINX_HTTP
        config = folder / "nginx.conf"
        config.write_text(NGINX.format(folder=folder, upstream=upstream, port=port, options=options, forward=forward))
        return ["nginx", "-c", str(config), "-p", str(folder)]
    if name == "haproxy":
        protocol = " proto h2" if grpc else ""
        options = protocol
        if cert and key:
            both = folder / "both.pem"
            both.write_text(cert.read_text() + key.read_text())
            options += f" ssl crt {both}"
        config = folder / "haproxy.cfg"
        config.write_text(HAPROXY.format(upstream=upstream, port=port, options=options, protocol=protocol))
        return ["haproxy", "-db", "-f", str(config)]
    if name == "envoy":
        config = folder / "envoy.json"
        config.write_text(json.dumps(_envoy(port, upstream, grpc)))
        envoy = python_of("proxies").parent / "envoy"
        return [str(envoy), "-c", str(config), "--concurrency", "1", "--use-dynamic-base-id", "-l", "error"]
    if name == "tcp floor":
        command = [sys.executable, str(FILES / "tcp_floor.py"), str(port), str(upstream)]
        return command + ([str(cert), str(key)] if tls else [])
    if name == "grpc.aio":
        return [str(python_of("proxies")), str(FILES / "naive_grpc.py"), str(port), str(upstream)]
    return [
        *(str(python_of("proxies")), "-m", "uvicorn", "naive_aiohttp:app", "--app-dir", str(FILES), "--no-access-log"),
        *("--loop", "uvloop", "--http", "httptools", "--port", str(port), "--log-level", "error"),
    ]


def _envoy(port: int, upstream: int, grpc: bool) -> dict[str, object]:
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
    cluster: dict[str, object] = {"name": "u", "type": "STATIC"}
    cluster["load_assignment"] = {"cluster_name": "u", "endpoints": endpoints}
    if grpc:
        options = "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"
        http2 = {"explicit_http_config": {"http2_protocol_options": {}}}
        cluster["typed_extension_protocol_options"] = {options: {"@type": f"type.googleapis.com/{options}", **http2}}
    return {
        "static_resources": {
            "listeners": [{"name": "l", "address": address(port), "filter_chains": [chain]}],
            "clusters": [cluster],
        }
    }
