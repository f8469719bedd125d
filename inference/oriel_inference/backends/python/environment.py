"""Selects the environment variables of a model's process: what interpreters and runtimes need, and what the operator
names.

The process does not get the whole environment of the server: keys and passwords meant for the server stay with it.
"""

from collections.abc import Mapping, Sequence

THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_HIDDEN = frozenset({"ORIEL_LIFELINE_FD"})
_PASSED = (
    "PATH", "HOME", "USER", "LOGNAME", "TMPDIR", "TZ", "LANG", "LANGUAGE", "LC_*", "VIRTUAL_ENV",
    "LD_LIBRARY_PATH", "LD_PRELOAD", "MALLOC_*",
    "PYTHONPATH", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONNOUSERSITE", "PYTHONHASHSEED", "PYTHONUTF8",
    "PYTHONIOENCODING", "PYTHONWARNINGS", "PYTHONOPTIMIZE", "PYTHONMALLOC", "PYTHONFAULTHANDLER", "PYTHONDEVMODE",
    "OMP_*", "GOMP_*", "KMP_*", "MKL_*", "OPENBLAS_*", "NUMEXPR_*", "TOKENIZERS_PARALLELISM",
    "CUDA_*", "NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "NCCL_*",
    "SSL_CERT_FILE", "SSL_CERT_DIR", "XDG_CACHE_HOME", "TORCH_HOME", "HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE",
    "TRANSFORMERS_CACHE", "TRANSFORMERS_OFFLINE",
)  # fmt: skip


def model_environment(server: Mapping[str, str], also: Sequence[str], *, threads: int, path: str) -> dict[str, str]:
    """Return the variables of a model's process.

    server: the server's own variables.
    also: names that the operator adds; a trailing asterisk stands for all names that begin so.
    path: where the child finds this package.
    threads: threads of the numeric libraries, unless the server's environment sets them.
    """
    wanted = (*_PASSED, *also)
    names = frozenset(name for name in wanted if not name.endswith("*"))
    beginnings = tuple(name[:-1] for name in wanted if name.endswith("*"))
    found = {
        name: value
        for name, value in server.items()
        if (name in names or name.startswith(beginnings)) and name not in _HIDDEN
    }
    # The processes that the model starts get the variable as it was.
    found["ORIEL_PYTHONPATH"] = found.get("PYTHONPATH", "")
    found["PYTHONPATH"] = path
    found["PYTHONUNBUFFERED"] = "1"
    for name in THREADS:
        found.setdefault(name, str(threads))
    return found
