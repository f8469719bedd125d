"""A base image that holds this machine's Python and the libraries it links, and nothing else: no shell, no package
manager, no /bin.
"""

import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["lay_out"]

# What wheels for glibc may link beside it (PEP 600), and what glibc opens by itself to look a name up.
BESIDE = ("libstdc++.so.6", "libgcc_s.so.1", "libnss_dns.so.2", "libnss_files.so.2", "libresolv.so.2")
BESIDE += ("librt.so.1", "libdl.so.2", "libpthread.so.0", "libutil.so.1")
LEFT_OUT = ("__pycache__", "test", "tests", "idlelib", "ensurepip", "site-packages", "dist-packages", "*.a")
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")


def lay_out(folder: Path, *, without: tuple[str, ...] = ()) -> str:
    """Fill `folder` as the root of the base; returns the path of Python in it. without: libraries to leave out."""
    prefix = Path(sys.base_prefix).resolve()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    own, library = prefix / "bin" / version, prefix / "lib" / version
    ignored = shutil.ignore_patterns(*LEFT_OUT)
    # Where it lies here: a Python knows its own libraries by their place.
    shutil.copytree(library, folder / str(library).lstrip("/"), ignore=ignored, dirs_exist_ok=True)
    _copy(own.resolve(), folder / str(own).lstrip("/"))
    for path in (own, *library.rglob("lib-dynload/*.so"), *prefix.glob("lib/libpython3*.so*")):
        for found in _linked(path):
            _copy(found.resolve(), folder / str(found).lstrip("/"))
    where = Path(next(str(each.parent) for each in _linked(own) if each.name == "libc.so.6"))
    for name in (each for each in BESIDE if each not in without):
        for each in (where / name, Path("/usr") / str(where / name).lstrip("/")):
            if each.exists():
                _copy(each.resolve(), folder / str(each).lstrip("/"))
    for each in ("tmp", "etc", "proc", "dev", "sys"):
        (folder / each).mkdir(exist_ok=True)
    (folder / "tmp").chmod(0o1777)
    if CERTIFICATES.exists():
        _copy(CERTIFICATES.resolve(), folder / str(CERTIFICATES).lstrip("/"))
    return str(own)


def _linked(path: Path) -> list[Path]:
    done = subprocess.run(["ldd", path], capture_output=True, text=True, check=False)
    words = [line.split() for line in done.stdout.splitlines()]
    found = [each[2] if "=>" in each else each[0] for each in words if len(each) > 1]
    return [Path(each) for each in found if each.startswith("/")]


def _copy(source: Path, target: Path) -> None:
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
