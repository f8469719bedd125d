"""Runs one image's unit as an engine would with --read-only: another user, a root nobody can write, its own network.

A script: `unshare -mn python sealed.py`, with a plan as JSON on standard input:
  root      the folder that stands for the image's root;  chroot: whether it becomes the root, or lies in this machine's
  writable  folders that are given a memory file system of their own
  start     the words of ENTRYPOINT and CMD;  env: all it gets
  health    the words of HEALTHCHECK's CMD
  drop      whether to become user 65532: false where that is not root's to say
  post      a path, a port and a body to send once it is healthy, or null
It writes JSON: healthy (seconds), answer (status and body), written (where it could make a file),
user (of the process), code (after SIGTERM), stderr.
"""

import ctypes
import fcntl
import json
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

USER = 65532
PATIENCE_S = 60
_KEPT_AS_IT_IS = ("/proc", "/sys", "/dev")
_MS_RDONLY, _MS_REMOUNT, _MS_BIND, _MS_REC, _MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18
_OPTIONS = {"nosuid": 2, "nodev": 4, "noexec": 8, "noatime": 1024, "nodiratime": 2048, "relatime": 1 << 21}
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 1
_libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> bool:
    return bool(_libc.mount(source.encode(), target.encode(), kind.encode(), flags, data.encode()) == 0)


def seal(root: str, writable: list[str], *, show: bool) -> None:
    """Make all mounts read-only except those of the kernel and `writable`. show: make Python visible too. Raises
    OSError.
    """
    # First, or what follows would be seen outside.
    if not mount("none", "/", "", _MS_REC | _MS_PRIVATE):
        raise OSError(ctypes.get_errno(), "mounts cannot be made private")
    mount(root, root, "", _MS_BIND | _MS_REC)
    if show:
        show_python(f"{root}/base")
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point, options = line.split()[4:6]
        if not point.startswith(_KEPT_AS_IT_IS):
            # Who is not root may not take these off again.
            locked = sum(_OPTIONS.get(each, 0) for each in options.split(","))
            mount("none", point, "", _MS_REMOUNT | _MS_BIND | _MS_RDONLY | locked)
    for folder in writable:
        if not mount("tmpfs", folder, "tmpfs", 0, f"mode=1777,size={256 << 20}"):
            raise OSError(ctypes.get_errno(), f"no file system at {folder}")


def show_python(aside: str) -> None:
    """Make this machine's Python visible to every user, even if it lies in a home folder. aside: a folder to be
    created.
    """
    prefix = Path(sys.base_prefix).resolve()
    closed = [each for each in prefix.parents if not each.stat().st_mode & 1]
    if not closed:
        return
    Path(aside).mkdir()
    mount(str(prefix), aside, "", _MS_BIND)
    mount("tmpfs", str(closed[-1]), "tmpfs", 0, "mode=755")
    prefix.mkdir(parents=True)
    mount(aside, str(prefix), "", _MS_BIND)


def loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        asked = fcntl.ioctl(control, _SIOCGIFFLAGS, struct.pack("16sH14x", b"lo", 0))
        (flags,) = struct.unpack("16xH14x", asked)
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", flags | _IFF_UP))


def as_user() -> None:
    os.setgroups([])
    os.setgid(USER)
    os.setuid(USER)


def try_to_write(python: str, folders: list[str], drop: Callable[[], None] | None) -> list[str]:
    """Return those of `folders` in which the unit's user can create a file."""
    code = "import sys\nfor f in sys.argv[1:]:\n try: open(f + '/written', 'w'); print(f)\n except OSError: pass"
    words = [python, "-c", code, *folders]
    done = subprocess.run(words, preexec_fn=drop, capture_output=True, text=True, check=True)
    return done.stdout.split()


def closed_to_all(root: str) -> list[str]:
    return [f"{root}/", f"{root}/opt/oriel", f"{root}/var/lib", "/", "/etc", "/usr", "/var/tmp"]


def ask(path: str, port: int, body: str) -> dict[str, Any]:
    connection = HTTPConnection("127.0.0.1", port, timeout=20)
    connection.request("POST", path, body, {"content-type": "application/json"})
    answer = connection.getresponse()
    return {"status": answer.status, "body": answer.read().decode()}


def main(plan: dict[str, Any]) -> dict[str, Any]:
    root, env = plan["root"], plan["env"]
    seal(root, plan["writable"], show=not plan.get("chroot"))
    loopback_up()
    if plan.get("chroot"):
        for each in ("proc", "dev"):
            mount(f"/{each}", f"{root}/{each}", "", _MS_BIND | _MS_REC)
        os.chroot(root)
        plan["writable"] = [each.removeprefix(root) for each in plan["writable"]]
        root = ""
        os.chdir("/")
    drop, python = as_user if plan["drop"] else None, plan["health"][0]
    told: dict[str, Any] = {"written": try_to_write(python, [*closed_to_all(root), plan["writable"][0]], drop)}
    with subprocess.Popen(
        plan["start"],
        env=env,
        cwd=plan["writable"][0],
        preexec_fn=drop,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    ) as unit:
        begun = time.monotonic()
        while unit.poll() is None and time.monotonic() < begun + PATIENCE_S:
            check = subprocess.run(plan["health"], env=env, preexec_fn=drop, capture_output=True, check=False)
            if check.returncode == 0:
                told["healthy"] = True
                break
            time.sleep(0.2)
        if told.get("healthy") and plan["post"]:
            # Alive is not ready: its models may still be loading.
            while (answer := ask(*plan["post"]))["status"] == 503 and time.monotonic() < begun + PATIENCE_S:
                time.sleep(0.1)
            told["answer"] = answer
        told["user"] = os.stat(f"/proc/{unit.pid}").st_uid if unit.poll() is None else None
        unit.send_signal(signal.SIGTERM)
        _, told["stderr"] = unit.communicate(timeout=PATIENCE_S)
        told["code"] = unit.returncode
    return told


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(json.load(sys.stdin))))
