"""Finds the engine that a configuration or the files of a version name, and has the error texts for engines that this
server does not have.
"""

from collections.abc import Iterable, Sequence

from oriel_inference.errors import ConfigInvalid, LoadFailed
from oriel_wire.v2.proto import model_config_pb2 as pb

_CONVERT = "export the model to ONNX (docs/convert-to-onnx.md) or serve it as it is, as a service (docs/your-model.md)"
_NEEDS = {
    "tensorrt": (
        "TensorRT is not available here: it takes an NVIDIA GPU, its driver and the extra oriel-serving[tensorrt], see "
        "docs/tensorrt.md"
    ),
    "pytorch": (
        "PyTorch finds no GPU here: it takes an NVIDIA GPU, its driver and a build of torch for CUDA, see "
        "docs/pytorch.md"
    ),
    "cuda": (
        "CUDA is not available here: it takes an NVIDIA GPU, its driver and the extra oriel-serving[gpu], see "
        "docs/gpus.md"
    ),
}
_TENSORFLOW = f"TensorFlow models are not executed by this server, {_CONVERT}"
_LANGUAGE = "serves language models through an engine of its own, which this server does not have; put that engine"
_PICKLE = f"pickled models (scikit-learn, joblib) are code, which is never loaded from a file: {_CONVERT}"
_WEIGHTS = f"safetensors files hold weights without the model around them: {_CONVERT}"
_TEACHING = (
    "is one of Triton's example backends and has no model; remove the folder from the repository, see "
    "docs/model-repository.md"
)
# engine -> the reason why its models are refused
_REFUSED = {
    "openvino": (
        "OpenVINO IR files are not executed by this version, whatever is installed. The ONNX file they were made from "
        'runs on OpenVINO: backend: "onnxruntime" and optimization { execution_accelerators { '
        'cpu_execution_accelerator { name: "openvino" } } }, with the extra oriel-serving[openvino]; '
        "docs/model-repository.md has the accelerators"
    ),
    **dict.fromkeys(("tensorflow", "tensorflow1", "tensorflow2"), _TENSORFLOW),
    "caffe2": f"Caffe2 models are not executed by this server, {_CONVERT}",
    **dict.fromkeys(
        ("vllm", "tensorrtllm", "trtllm"), f"{_LANGUAGE} behind the gateway as a pool of its own: docs/routing.md"
    ),
    "gguf": f"{_LANGUAGE} (llama.cpp) behind the gateway as a pool of its own: docs/routing.md",
    "pickle": _PICKLE,
    "safetensors": _WEIGHTS,
    "dali": "DALI pipelines are not executed by this server; put pre-processing into a logic service: docs/logic.md",
    "fil": f"forests are not executed by the FIL backend here, {_CONVERT}",
    "armnn_tflite": f"TensorFlow Lite models are not executed by this server, {_CONVERT}",
    "paddle": f"PaddlePaddle models are not executed by this server, {_CONVERT}",
    "custom": "custom backends are libraries, none is loaded; put the code into a logic service: docs/logic.md",
    **dict.fromkeys(("identity", "square", "repeat", "recommended", "minimal", "bls"), _TEACHING),
}
_PLATFORMS = {
    "onnxruntime_onnx": "onnxruntime",
    "tensorrt_plan": "tensorrt",
    "pytorch_libtorch": "pytorch",
    "libtorch": "pytorch",
    "torch_aoti": "torch_aoti",
    "tensorflow_graphdef": "tensorflow",
    "tensorflow_savedmodel": "tensorflow",
    "caffe2_netdef": "caffe2",
    "custom": "custom",
}
PLATFORM_OF = {"onnxruntime": "onnxruntime_onnx", "tensorrt": "tensorrt_plan", "pytorch": "pytorch_libtorch"}
_EXPORTED = "torch_aoti"
_PYTORCH = ("pytorch", "libtorch", _EXPORTED)
# file in the version folder -> engine, in the order of the search
_FILES = {
    "model.onnx": "onnxruntime",
    "model.plan": "tensorrt",
    "model.xml": "openvino",
    "model.pt": "pytorch",
    "model.pt2": "torch_aoti",
    "model.savedmodel": "tensorflow",
    "model.graphdef": "tensorflow",
    "model.netdef": "caffe2",
    "model.tflite": "armnn_tflite",
    "model.dali": "dali",
    "xgboost.model": "fil",
    "xgboost.json": "fil",
    "model.txt": "fil",
    "checkpoint.tl": "fil",
    "model.py": "python",
}
_SUFFIXES = {
    ".onnx": "onnxruntime",
    ".plan": "tensorrt",
    ".engine": "tensorrt",
    ".xml": "openvino",
    ".pt": "pytorch",
    ".pth": "pytorch",
    ".pt2": "torch_aoti",
    ".savedmodel": "tensorflow",
    ".graphdef": "tensorflow",
    ".pb": "tensorflow",
    ".tflite": "armnn_tflite",
    ".keras": "tensorflow",
    ".h5": "tensorflow",
    **dict.fromkeys((".pkl", ".pickle", ".joblib"), "pickle"),
    ".safetensors": "safetensors",
    ".gguf": "gguf",
    ".py": "python",
}


def needs(engine: str) -> str:
    """Return the sentence about an engine that needs a GPU and found none, with the extra to install."""
    return _NEEDS[engine]


def default_file(backend: str) -> str:
    """Return the model file of a version if the configuration names none."""
    return next((name for name, engine in _FILES.items() if engine == backend), "model.onnx")


def name_engine(config: pb.ModelConfig, file: str, files: Sequence[str]) -> None:
    """Set `backend` from `platform`, the model's file name or the files of a version, and `platform` if the engine has
    one.

    files: names in the newest version's folder.
    `find_backend` decides whether there is a backend of that name. Raises ConfigInvalid for an engine that this server
    does not have, and LoadFailed if no engine can be derived.
    """
    named = config.platform and _platform(config.platform, file)
    backend = config.backend.lower()
    if backend and named and named != backend and {named, backend} != {"pytorch", "torch_aoti"}:
        raise ConfigInvalid(file, "backend", f"{config.backend[:64]!r} contradicts platform {config.platform[:64]!r}")
    field = "platform" if named and not backend else "backend"
    backend = backend or named
    if not backend and config.default_model_filename:
        field = "default_model_filename"
        backend = _from_suffix(config.default_model_filename)
    if not backend:
        field, backend = "", next((_FILES[name] for name in _FILES if name in files), "")
    if not backend:
        field, backend = "", _foreign(files)
    if not backend:
        model = file.partition("/")[0]
        raise LoadFailed(
            f"{model} names no backend and holds no model.onnx, so its engine is unknown: see docs/model-repository.md"
        )
    if backend in _REFUSED:
        raise (
            ConfigInvalid(file, field, _REFUSED[backend])
            if field
            else LoadFailed(f"{file.partition('/')[0]}: {_REFUSED[backend]}")
        )
    if backend in _PYTORCH:
        _name_program(config, backend, files)
        backend = "pytorch"
    config.backend = backend
    config.platform = config.platform or PLATFORM_OF.get(backend, "")


def _name_program(config: pb.ModelConfig, backend: str, files: Sequence[str]) -> None:
    """Set the file of a PyTorch model, and the platform of an exported program."""
    if not config.default_model_filename:
        exported = _EXPORTED in (backend, config.platform) or ("model.pt2" in files and "model.pt" not in files)
        script = config.runtime == "model.py" and ("model.py" in files or "model.pt" not in files)
        config.default_model_filename = "model.py" if script else "model.pt2" if exported else "model.pt"
    if config.default_model_filename.endswith(".pt2"):
        config.platform = config.platform or _EXPORTED


def named_engine(config: pb.ModelConfig) -> str:
    """Return the engine that a configuration names by `backend`, `platform` or the suffix of its model file; "" if it
    names none, so that the files decide.
    """
    by_platform = _PLATFORMS.get(config.platform, "")
    return config.backend.lower() or by_platform or _from_suffix(config.default_model_filename)


def names_engine(config: pb.ModelConfig, file: str, files: Sequence[str]) -> bool:
    """Return whether `name_engine` finds an engine of this server."""
    tried = pb.ModelConfig(
        backend=config.backend, platform=config.platform, default_model_filename=config.default_model_filename
    )
    try:
        name_engine(tried, file, files)
    except LoadFailed:
        return False
    return True


def _platform(platform: str, file: str) -> str:
    if platform not in _PLATFORMS:
        known = ", ".join(PLATFORM_OF.values())
        raise ConfigInvalid(file, "platform", f"{platform[:64]!r} is not supported, use one of {known}, or backend")
    return _PLATFORMS[platform]


def _from_suffix(filename: str) -> str:
    return next((engine for suffix, engine in _SUFFIXES.items() if filename.endswith(suffix)), "")


def _foreign(files: Iterable[str]) -> str:
    """Return the engine of a single file that has another name but a telling extension."""
    found = {engine for name in files if (engine := _from_suffix(name)) in _REFUSED or engine in _PYTORCH}
    return found.pop() if len(found) == 1 else ""
