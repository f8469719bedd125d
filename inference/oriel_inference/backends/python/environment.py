"""The variables a model's process gets: what interpreters and runtimes need, and what the operator names.

Not the server's whole environment: keys and passwords that are meant for the server stay with it.
"""

from collections.abc import Mapping, Sequence

__all__ = ["model_environment"]

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
    """server: its own variables. also: names the operator adds; a trailing asterisk: all that begin so.

    path: where the child finds this package. threads: of the numeric libraries, where the server has no
    number of its own.
    """
    wanted = (*_PASSED, *also)
    names = frozenset(name for name in wanted if not name.endswith("*"))
    beginnings = tuple(name[:-1] for name in wanted if name.endswith("*"))
    found = {
        name: value
        for name, value in server.items()
        if (name in names or name.startswith(beginnings)) and name not in _HIDDEN
    }
    # The model's own processes get the variable as it was.
    found["ORIEL_PYTHONPATH"] = found.get("PYTHONPATH", "")
    found["PYTHONPATH"] = path
    found["PYTHONUNBUFFERED"] = "1"
    for name in THREADS:
        found.setdefault(name, str(threads))
    return found
