"""Defaults from the operator's flags for every model whose own configuration does not decide."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from oriel_wire.errors import StartFailed
from oriel_wire.process.environment import names_of

AUTO_MAX_BATCH_SIZE = 4
MAX_VALUE = 1_000_000
_BATCH, _INTRA, _INTER = "default-max-batch-size", "intra_op_thread_count", "inter_op_thread_count"
_NUMBERS = (_BATCH, *(f"onnxruntime,{key}" for key in (_BATCH, _INTRA, _INTER)))
_ENVIRONMENT = "python,environment"
_HOST_CODE = "tensorrt,version-compatible"
_REQUIRE = "onnxruntime,require-accelerators"
_OWN_MEMORY = "python models do not exchange tensors through Triton's shared memory pool"
_TENSORFLOW = "OpenVINO executes TensorFlow's files, on the CPU: see docs/openvino-models.md"
_NO_EFFECT = {
    **{f"tensorflow,{key}": _TENSORFLOW for key in ("version", "allow-soft-placement", "gpu-memory-fraction")},
    "onnxruntime,enable-global-threadpool": "all models share --cores as it is",
    "python,shm-default-byte-size": _OWN_MEMORY,
    "python,shm-growth-byte-size": _OWN_MEMORY,
    "python,shm-region-prefix-name": _OWN_MEMORY,
    "python,stub-timeout-seconds": "a Python model's start has the limit of its parameter oriel.start_timeout_s",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadDefaults:
    """The operator's defaults.

    max_batch_size: the value of an auto-completed model whose file has a variable first dimension; 0 sets none.
    intra_op_threads, inter_op_threads: 0 lets the server choose.
    auto_complete: True if a configuration may leave out what the model file knows.
    require_accelerators: True if a model that wants an accelerator on a GPU is refused on a machine without a usable
    GPU.
    engine_host_code: True if TensorRT plans may carry code that runs in this process, as version-compatible ones do.
    python_environment: names of the server's variables that Python models get in addition to the usual ones; one that
    ends in an asterisk stands for all names that begin so.
    custom_ops: the folder with libraries of custom operators.
    config_name: the name of the configurations that models may have in place of `config.pbtxt`; "" for none.
    """

    max_batch_size: int = AUTO_MAX_BATCH_SIZE
    intra_op_threads: int = 0
    inter_op_threads: int = 0
    auto_complete: bool = True
    require_accelerators: bool = False
    engine_host_code: bool = False
    python_environment: tuple[str, ...] = ()
    custom_ops: Path | None = None
    config_name: str = ""


def from_backend_config(texts: Iterable[str], *, auto_complete: bool = True) -> tuple[LoadDefaults, list[str]]:
    """Read `[<backend>,]<key>=<value>` of --backend-config; return the defaults and warnings about settings without
    effect.

    Raises StartFailed for an unknown setting, because it might change answers.
    """
    warnings: list[str] = []
    numbers: dict[str, int] = {}
    environment: list[str] = []
    switches = {_HOST_CODE: False, _REQUIRE: False}
    for text in texts:
        where, equals, value = text.partition("=")
        if not equals or where.startswith(","):
            raise StartFailed(f"--backend-config={text[:80]}: the form is <backend>,<key>=<value>")
        if where in _NO_EFFECT:
            warnings.append(f"--backend-config={where} has no effect: {_NO_EFFECT[where]}")
        elif where == _ENVIRONMENT:
            environment += _names(value)
        elif where in switches:
            if value not in ("true", "false"):
                raise StartFailed(f"--backend-config: {where} must be true or false")
            switches[where] = value == "true"
        elif where in _NUMBERS:
            if not value.isascii() or not value.isdigit() or len(value) > 7 or int(value) > MAX_VALUE:
                raise StartFailed(f"--backend-config: {where} must be a number from 0 to {MAX_VALUE}")
            numbers[where.rpartition(",")[2]] = int(value)
        else:
            known = ", ".join((*_NUMBERS, _ENVIRONMENT, *switches))
            raise StartFailed(f"--backend-config: {where[:100]!r} is not a setting, there are {known}")
    return (
        LoadDefaults(
            max_batch_size=numbers.get(_BATCH, AUTO_MAX_BATCH_SIZE),
            intra_op_threads=numbers.get(_INTRA, 0),
            inter_op_threads=numbers.get(_INTER, 0),
            auto_complete=auto_complete,
            require_accelerators=switches[_REQUIRE],
            engine_host_code=switches[_HOST_CODE],
            python_environment=tuple(environment),
        ),
        warnings,
    )


def _names(value: str) -> list[str]:
    names = names_of(value)
    if names is None:
        # The text is not repeated in the error: it may be a value that should not be shown.
        raise StartFailed(
            f"--backend-config: {_ENVIRONMENT} takes names of environment variables, NAME or BEGIN*, split by commas"
        )
    return names
