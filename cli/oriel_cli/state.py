"""Keeps state between commands: the running instances, and files generated for the demo.

Everything lies under $ORIEL_STATE, else ${XDG_STATE_HOME:-~/.local/state}/oriel. A running `oriel up` is one small
file named by its admin port; the file goes when the instance stops, and one of a killed instance is recognised by its
process id.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from oriel_cli.errors import CommandFailed
from oriel_wire.process import shared_settings

DEFAULT_ADMIN_PORT = 8082


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A running `oriel up`. Addresses are host:port; `traces` is where its trace buffer answers.

    inference, metrics: the HTTP and metrics ports of its first inference server.
    """

    pid: int
    admin_port: int
    gateway: str
    traces: str
    demo: bool
    inference: str = ""
    metrics: str = ""


def state_folder() -> Path:
    """The folder, made if needed and readable by its owner only. Raises CommandFailed when it cannot be made."""
    folder = shared_settings.state_folder()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as refused:
        raise CommandFailed(
            f"the state folder cannot be made ({refused.strerror}): set ORIEL_STATE to a folder of yours"
        ) from refused
    return folder.absolute()


def remember(instance: Instance) -> None:
    """Write `instance` down; whole or not at all."""
    path = _path(instance.admin_port)
    fresh = path.with_suffix(f".{instance.pid}.tmp")
    fresh.write_text(json.dumps(asdict(instance)))
    fresh.replace(path)


def forget(admin_port: int) -> None:
    """Remove the file of an instance that has stopped."""
    _path(admin_port).unlink(missing_ok=True)


def pick(admin_port: int | None) -> Instance:
    """The instance with `admin_port`; without one the only running instance, or of several that on port 8082.

    Raises CommandFailed with what to do when none or more than one fits.
    """
    running = {instance.admin_port: instance for instance in _running()}
    if admin_port is not None:
        if admin_port not in running:
            raise CommandFailed(f"no 'oriel up' with admin port {admin_port} runs here: start it, or pass another port")
        return running[admin_port]
    if not running:
        raise CommandFailed("no 'oriel up' runs here: start one with 'oriel up --demo'")
    if len(running) == 1:
        return next(iter(running.values()))
    if DEFAULT_ADMIN_PORT in running:
        return running[DEFAULT_ADMIN_PORT]
    ports = ", ".join(str(port) for port in sorted(running))
    raise CommandFailed(f"several 'oriel up' run here: pass --admin-port with one of {ports}")


def admin_port(given: int | None) -> int:
    """Return `given`, else the port of the running instance, else 8082: a gateway started alone leaves no note."""
    if given is not None:
        return given
    try:
        return pick(None).admin_port
    except CommandFailed:
        return DEFAULT_ADMIN_PORT


def _running() -> list[Instance]:
    found = []
    for path in state_folder().glob("running-*.json"):
        try:
            instance = Instance(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            continue
        if _alive(instance.pid):
            found.append(instance)
        else:
            path.unlink(missing_ok=True)
    return found


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _path(admin_port: int) -> Path:
    return state_folder() / f"running-{admin_port}.json"
