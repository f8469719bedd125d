"""HTTP clients of servers that a test has started."""

import httpx

__all__ = ["PATIENCE_S", "client_of"]

PATIENCE_S = 60  # for one answer: a busy machine is slow, and that is no failure


def client_of(port: int, path: str = "") -> httpx.AsyncClient:
    """Return a client of the server on this machine's `port`; `path` is put in front of every request's path."""
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}{path}", trust_env=False, timeout=PATIENCE_S)
