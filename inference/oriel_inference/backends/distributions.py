"""Detects which distributions of ONNX Runtime are installed. All of them install the module `onnxruntime` and overwrite
one another.
"""

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, distribution

_EXTRAS = {
    "onnxruntime": "cpu",
    "onnxruntime-openvino": "openvino",
    "onnxruntime-gpu": "gpu",
    "onnxruntime-directml": "",
    "onnxruntime-qnn": "",
    "onnxruntime-migraphx": "",
    "onnxruntime-rocm": "",
    "onnxruntime-training": "",
}


def check_distributions() -> str:
    """Return what is wrong with this environment and the command that fixes it; "" if nothing is wrong."""
    return conflict(name for name in _EXTRAS if _is_installed(name))


def conflict(names: Iterable[str]) -> str:
    """Do what `check_distributions` does for an environment in which `names` are installed."""
    normal = {name.lower().replace("_", "-").replace(".", "-") for name in names}
    found = sorted(normal & _EXTRAS.keys())
    if len(found) < 2:
        return ""
    extras = [_EXTRAS[name] for name in found if _EXTRAS[name]]
    extra = "cpu" if "cpu" in extras and len(extras) == 1 else next((e for e in extras if e != "cpu"), "cpu")
    return (
        f"{' and '.join(found)} are installed together and overwrite each other's files; keep one: "
        f"pip uninstall -y {' '.join(found)} && pip install 'oriel-serving[{extra}]'"
    )


def _is_installed(name: str) -> bool:
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
