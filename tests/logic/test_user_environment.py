"""Variables of the server's environment that the code of services sees."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from .processes import LogicServer, linux

SEES = """
import os
from pathlib import Path
from oriel_logic import service

AT_IMPORT = dict(os.environ)

def seen():
    files = {}
    for name in ("self", str(os.getppid())):
        try:
            files[name] = Path(f"/proc/{name}/environ").read_bytes().decode("latin-1")
        except OSError:
            files[name] = ""
    return {"import": AT_IMPORT, "now": dict(os.environ), "files": list(files.values())}

@service
def in_worker(request): return seen()

@service
async def on_loop(request, models, ctx): return seen()
"""
SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "s3cret",
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=s3cret",
    "ORIEL_ADMIN_TOKEN": "s3cret",
    "DATABASE_PASSWORD": "s3cret",
    "https_proxy": "http://me:s3cret@x",
}


@linux
@pytest.mark.parametrize("how", ["flag", "variable"])
def test_services_see_a_list_of_variables_and_no_secret(
    how: str, services: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service read every secret of its server: in a worker, on the loop, and where the kernel shows them."""
    for name, value in {**SECRETS, "MY_MODEL_A": "a", "MY_MODEL_B": "b", "OTHER": "o", "LC_ALL": "C.UTF-8"}.items():
        monkeypatch.setenv(name, value)
    flags = ("--worker-environment", "MY_MODEL_*,NOT_SET") if how == "flag" else ()
    if how == "variable":
        monkeypatch.setenv("ORIEL_WORKER_ENVIRONMENT", "MY_MODEL_*,NOT_SET")
    with LogicServer(services(sees=SEES), tmp_path / "log", *flags) as process:
        for name in ("in_worker", "on_loop"):
            answer = httpx.post(f"{process.url}/{name}", timeout=60)
            seen: dict[str, Any] = answer.json()
            assert answer.status_code == 200 and "s3cret" not in seen["files"][0]
            for each in (seen["import"], seen["now"]):
                assert not each.keys() & {*SECRETS, "OTHER"} and "s3cret" not in str(each)
                assert (each["MY_MODEL_A"], each["MY_MODEL_B"], each["LC_ALL"]) == ("a", "b", "C.UTF-8")
                assert each["PATH"] == os.environ["PATH"]
        # The memory of the server's start: of an `async def` service's own process, above, and of all others.
        assert "s3cret" not in Path(f"/proc/{process.popen.pid}/environ").read_text("latin-1")
