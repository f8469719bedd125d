"""Selects the environment variables that processes with users' code see, and takes secrets out of the environment.

A process with users' code does not get the whole environment of its server: keys and passwords that are meant for the
server stay with it.
"""

import ctypes
import os
import re
from collections.abc import Mapping, Sequence

_HIDDEN = frozenset({"ORIEL_LIFELINE_FD"})
_PASSED = (
    "PATH", "HOME", "USER", "LOGNAME", "HOSTNAME", "TMPDIR", "TZ", "LANG", "LANGUAGE", "LC_*", "VIRTUAL_ENV",
    "LD_LIBRARY_PATH", "LD_PRELOAD", "MALLOC_*",
    "PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONNOUSERSITE", "PYTHONHASHSEED", "PYTHONUTF8",
    "PYTHONIOENCODING", "PYTHONWARNINGS", "PYTHONOPTIMIZE", "PYTHONMALLOC", "PYTHONFAULTHANDLER", "PYTHONDEVMODE",
    "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE",
    "OMP_*", "GOMP_*", "KMP_*", "MKL_*", "OPENBLAS_*", "NUMEXPR_*", "TOKENIZERS_PARALLELISM",
    "CUDA_*", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "NCCL_*",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "XDG_CACHE_HOME", "TORCH_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE",
    "TRANSFORMERS_CACHE", "TRANSFORMERS_OFFLINE", "KUBERNETES_SERVICE_*", "ORIEL_LOG_LEVEL",
)  # fmt: skip
# Variables with which clients of object stores find their address and credentials: names and files, no secrets.
STORES = (
    "AWS_REGION", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL*", "AWS_CA_BUNDLE", "AWS_PROFILE", "AWS_CONFIG_FILE",
    "AWS_SHARED_CREDENTIALS_FILE", "AWS_ROLE_*", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_STS_REGIONAL_ENDPOINTS",
    "AWS_CONTAINER_CREDENTIALS_*", "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", "AWS_EC2_METADATA_*",
)  # fmt: skip
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}\*?|\*")


def names_of(text: str) -> list[str] | None:
    """Return the names of a list split by commas, None if it is no such list.

    text: each part is a name, or the beginning of names and an asterisk.
    """
    names = text.split(",")
    return names if all(map(_NAME.fullmatch, names)) else None


def selected(server: Mapping[str, str], also: Sequence[str] = ()) -> dict[str, str]:
    """Return the variables that a process with users' code gets.

    server: the server's own variables.
    also: names that the operator adds; a trailing asterisk stands for all names that begin so.
    """
    wanted = (*_PASSED, *also)
    names = frozenset(name for name in wanted if not name.endswith("*"))
    beginnings = tuple(name[:-1] for name in wanted if name.endswith("*"))
    return {
        name: value
        for name, value in server.items()
        if (name in names or name.startswith(beginnings)) and name not in _HIDDEN
    }


def take_secret(name: str) -> str:
    """Remove a variable from this process's environment and return its value, "" if it is not set.

    The value is also erased where the kernel shows it to other processes of the same user (/proc/PID/environ).
    """
    _erase(name)
    return os.environ.pop(name, "")


def forget_others(also: Sequence[str]) -> None:
    """Remove all variables from this process's environment that users' code does not get. also: see `selected`."""
    for name in os.environ.keys() - selected(os.environ, also).keys():
        take_secret(name)


def _erase(name: str) -> None:
    """Overwrite the value of a variable in the memory that this process was started with."""
    getenv = ctypes.CDLL(None).getenv
    getenv.restype, getenv.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    address = getenv(os.fsencode(name))
    try:
        with open("/proc/self/stat", "rb") as stat:
            begin, end = map(int, stat.read().rpartition(b")")[2].split()[47:49])
    except (OSError, ValueError):
        return  # there is no such view of other processes
    if address and begin <= address < end:
        ctypes.memset(address, 0, len(ctypes.string_at(address)))
