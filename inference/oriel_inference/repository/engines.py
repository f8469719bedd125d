"""Finds the engine that a configuration or the files of a version name, and has the error texts for engines that this
server does not have.
"""

from collections.abc import Iterable, Sequence

from oriel_inference.errors import ConfigInvalid, LoadFailed
from oriel_wire.v2.proto import model_config_pb2 as pb

# engine -> what an instance on a GPU needs
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
    "openvino": "OpenVINO models run on the CPU here: set KIND_CPU or KIND_AUTO, see docs/openvino-models.md",
    "fil": "forests run on the CPU here: set KIND_CPU or KIND_AUTO, see docs/forests.md",
}
_IMPORT = "`oriel models import` makes a model folder of it, on the machine of somebody who trusts it"
_KERAS = f"Keras files are not executed by this server: {_IMPORT} (docs/convert-to-onnx.md)"
_ENGINE = "serves language models through an engine of its own, which this server does not have; put that engine"
_PICKLE = (
    f"pickled models (scikit-learn, joblib) are code, which is never loaded from a repository: {_IMPORT} "
    "(docs/convert-to-onnx.md), or serve it as it is, as a service (docs/your-model.md)"
)
_WEIGHTS = (
    "files of weights (safetensors, pytorch_model.bin) come without the model: `oriel models import` takes the folder "
    "of a Hugging Face model (docs/convert-to-onnx.md)"
)
_TEACHING = (
    "is one of Triton's example backends and has no model; remove the folder from the repository, see "
    "docs/model-repository.md"
)
# engine -> the reason why its models are refused
_REFUSED = {
    "keras": _KERAS,
    "caffe2": "Caffe2 models are not executed by this server, export the model to ONNX: docs/convert-to-onnx.md",
    **dict.fromkeys(
        ("vllm", "tensorrtllm", "trtllm"), f"{_ENGINE} behind the gateway as a pool of its own: docs/accelerators.md"
    ),
    "pickle": _PICKLE,
    "safetensors": _WEIGHTS,
    "dali": "DALI pipelines are not executed by this server; put pre-processing into a logic service: docs/logic.md",
    "custom": "custom backends are libraries, none is loaded; put the code into a logic service: docs/logic.md",
    **dict.fromkeys(("identity", "square", "repeat", "recommended", "minimal", "bls"), _TEACHING),
}
_PLATFORMS = {
    "onnxruntime_onnx": "onnxruntime",
    "tensorrt_plan": "tensorrt",
    "pytorch_libtorch": "pytorch",
    "libtorch": "pytorch",
    "torch_aoti": "torch_aoti",
    "tensorflow_graphdef": "openvino",
    "tensorflow_savedmodel": "openvino",
    "caffe2_netdef": "caffe2",
    "custom": "custom",
}
PLATFORM_OF = {"onnxruntime": "onnxruntime_onnx", "tensorrt": "tensorrt_plan", "pytorch": "pytorch_libtorch"}
_EXPORTED = "torch_aoti"
_PYTORCH = ("pytorch", "libtorch", _EXPORTED)
# other names of an engine
_SAME = dict.fromkeys(("tensorflow", "tensorflow1", "tensorflow2", "armnn_tflite", "paddle"), "openvino")
_FILE_OF = {"tensorflow_graphdef": "model.graphdef", "tensorflow_savedmodel": "model.savedmodel"}
_LANGUAGE_MODEL = "language"
_MANY_FILES = ("openvino", "fil", _LANGUAGE_MODEL)
# model_type of a forest -> its file
MODEL_TYPES = {
    "xgboost_ubj": "xgboost.ubj",
    "xgboost_json": "xgboost.json",
    "xgboost": "xgboost.model",
    "lightgbm": "model.txt",
    "treelite_checkpoint": "checkpoint.tl",
}
# file in the version folder -> engine, in the order of the search
_FILES = {
    "model.onnx": "onnxruntime",
    "model.plan": "tensorrt",
    "model.xml": "openvino",
    "model.pt": "pytorch",
    "model.pt2": "torch_aoti",
    "model.savedmodel": "openvino",
    "model.saved_model": "openvino",
    "model.graphdef": "openvino",
    "model.netdef": "caffe2",
    "model.tflite": "openvino",
    "model.pdmodel": "openvino",
    "model.dali": "dali",
    **dict.fromkeys(MODEL_TYPES.values(), "fil"),
    "model.gguf": "language",
    "openvino_model.xml": "language",
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
    ".savedmodel": "openvino",
    ".saved_model": "openvino",
    ".graphdef": "openvino",
    ".pb": "openvino",
    ".tflite": "openvino",
    ".pdmodel": "openvino",
    ".keras": "keras",
    ".h5": "keras",
    **dict.fromkeys((".pkl", ".pickle", ".joblib"), "pickle"),
    **dict.fromkeys((".safetensors", "pytorch_model.bin", "pytorch_model.bin.index.json"), "safetensors"),
    ".gguf": "language",
    ".py": "python",
}


def needs(engine: str) -> str:
    """Return the sentence about an engine that has no GPU to run on, with the extra to install if that helps."""
    return _NEEDS[engine]


def gpu_engine(config: pb.ModelConfig) -> str:
    """Return the engine of instances on a GPU, as `needs` calls it."""
    listed = config.optimization.execution_accelerators.gpu_execution_accelerator
    if config.backend in _NEEDS:
        return config.backend
    return "tensorrt" if any(each.name == "tensorrt" for each in listed) else "cuda"


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
    backend = _SAME.get(config.backend.lower(), config.backend.lower())
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
        do = (
            "move config.pbtxt out of the version's folder"
            if "config.pbtxt" in files
            else "name the file as docs/model-repository.md says, or let `oriel models import` make the folder"
        )
        raise LoadFailed(f"{model} names no backend and holds no model.onnx, so its engine is unknown: {do}")
    if backend in _REFUSED:
        raise (
            ConfigInvalid(file, field, _REFUSED[backend])
            if field
            else LoadFailed(f"{file.partition('/')[0]}: {_REFUSED[backend]}")
        )
    if backend in _PYTORCH:
        _name_program(config, backend, files)
        backend = "pytorch"
    if backend in _MANY_FILES and not config.default_model_filename:
        config.default_model_filename = _file_among(config, backend, files)
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
    backend = _SAME.get(config.backend.lower(), config.backend.lower())
    return backend or by_platform or _from_suffix(config.default_model_filename)


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


def _file_among(config: pb.ModelConfig, backend: str, files: Sequence[str]) -> str:
    """Return the model file of an engine that has one name for each format: the one that the configuration
    means, or the one that is there.
    """
    kind = config.parameters["model_type"].string_value if "model_type" in config.parameters else ""
    if named := MODEL_TYPES.get(kind) if backend == "fil" else _FILE_OF.get(config.platform):
        return named
    there = [name for name, engine in _FILES.items() if engine == backend and name in files]
    if backend == _LANGUAGE_MODEL:
        there += [name for name in files if name.endswith(".gguf")]
    return next(iter(there), default_file(backend))


def _platform(platform: str, file: str) -> str:
    if platform not in _PLATFORMS:
        known = ", ".join(PLATFORM_OF.values())
        raise ConfigInvalid(file, "platform", f"{platform[:64]!r} is not supported, use one of {known}, or backend")
    return _PLATFORMS[platform]


def _from_suffix(filename: str) -> str:
    return next((engine for suffix, engine in _SUFFIXES.items() if filename.endswith(suffix)), "")


def _foreign(files: Iterable[str]) -> str:
    """Return the engine of a single file that has another name but a telling extension."""
    telling = (*_REFUSED, *_PYTORCH, _LANGUAGE_MODEL)
    found = {engine for name in files if (engine := _from_suffix(name)) in telling}
    return found.pop() if len(found) == 1 else ""
