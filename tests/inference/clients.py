"""HTTP clients of units that a test has started."""

import httpx

__all__ = ["PATIENCE_S", "client_of"]

PATIENCE_S = 60  # for one answer: a busy machine is slow, and that is no failure


def client_of(port: int, path: str = "") -> httpx.AsyncClient:
    """A client of the server on this machine's `port`; `path` stands before the path of every request."""
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}{path}", trust_env=False, timeout=PATIENCE_S)
