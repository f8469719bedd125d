"""`oriel.compile` in a configuration: which compiler makes an artefact of the model, from what, and how its outputs are
checked.
"""

import hashlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from oriel_inference.backends.compilers import VARIANT, Compiler, compiler_names, find_compiler, read_value
from oriel_inference.errors import ConfigInvalid, LoadFailed
from oriel_inference.model import EngineOptions, ModelSpec, TensorSpec
from oriel_inference.repository.accelerators import OPENVINO, TENSORRT, accelerators
from oriel_inference.repository.config import CONFIG_FILE, parameter
from oriel_inference.repository.instances import PROVIDER_KEY, Place
from oriel_inference.repository.outline import HOST, device_of, gpu_name
from oriel_inference.repository.version_files import private_files
from oriel_inference.repository.warmup import warmup_inputs
from oriel_inference.stores import ModelStore
from oriel_policies.artefacts.comparison import Tolerance, parse_tolerance
from oriel_policies.artefacts.fingerprint import ArtefactKey
from oriel_policies.quality.reference import REFERENCE_FILE
from oriel_wire.v2.datatypes import DATATYPES
from oriel_wire.v2.messages import Array
from oriel_wire.v2.proto import model_config_pb2 as pb

_log = logging.getLogger(__name__)

COMPILE_KEY = "oriel.compile"
TOLERANCE_KEY = "oriel.compile.tolerance"
VARIANT_KEY = "oriel.variant"
ITSELF = "fp32"  # the variant that is the model's own file
_SETTING = f"{COMPILE_KEY}."
# option of ONNX Runtime's OpenVINO provider -> setting of the compiler; the others say nothing about what is computed
_PROVIDER_SETTINGS = {"precision": "precision", "num_of_threads": "threads", "num_streams": "streams"}
# option of ONNX Runtime's TensorRT provider -> setting of the compiler
_TENSORRT_SETTINGS = {
    "trt_profile_min_shapes": "profile_min_shapes",
    "trt_profile_opt_shapes": "profile_opt_shapes",
    "trt_profile_max_shapes": "profile_max_shapes",
    "trt_max_workspace_size": "workspace_bytes",
    "trt_builder_optimization_level": "optimization_level",
}
_TENSORRT_PRECISIONS = {"trt_fp16_enable": "FP16", "trt_bf16_enable": "BF16", "trt_int8_enable": "INT8"}
MAX_SAMPLES = 16
MAX_SAMPLE_BYTES = 64 << 20  # bytes of all samples of one check
SEED = 20_240_117
# Variable dimensions of the made samples: some models take only some lengths, so those that fail are left out.
LENGTHS = (1, 4, 16)
MAX_ROWS = 4

Samples = list[dict[str, Array]]


class CompileRequest(NamedTuple):
    """The request of a configuration: a compiler, the owner's tolerance (None for the default of each data type), and
    the compiler's settings.
    """

    compiler: Compiler
    tolerance: Tolerance | None
    settings: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """The facts from which the artefact of one version is made and checked.

    files: the fingerprint that the files of the version had when the reference was loaded.
    place: the file and the options of the reference.
    tolerance: the owner's; None for the default of each data type.
    """

    compiler: Compiler
    store: ModelStore
    model: str
    version: int
    files: str
    place: Place
    config: pb.ModelConfig
    spec: ModelSpec
    tolerance: Tolerance | None

    @property
    def device(self) -> str:
        """Return the name of the device whose memory the artefact takes."""
        if not self.compiler.on_gpu:
            return HOST
        own = device_of(self.place.options.providers)
        return gpu_name(0) if own == HOST else own  # a compiler takes GPU 0 for a model that runs on the CPU

    @contextmanager
    def source(self) -> Iterator[Path]:
        """Give the model's file, among all files of the version, where nobody else writes if that is possible. Raises
        LoadFailed.
        """
        name = self.place.filename
        paths = {name: self.store.artifact(self.model, self.version, name)}
        with private_files(self.store, self.model, self.version, paths) as files:
            yield files[name]

    def key(self, source: Path) -> ArtefactKey:
        """Return the key of the artefact of this file. Raises LoadFailed if its files cannot be read, or are not those
        of the reference any more.
        """
        try:
            digest = _digest(source)
        except OSError as error:
            raise LoadFailed(f"{source.name} cannot be read: {error.strerror}") from error
        if self.store.fingerprint(self.model).versions.get(self.version, "") != self.files:
            raise LoadFailed("the model's files have changed since it was loaded")
        identity = asdict(self.compiler.identity(self.place.options))
        return ArtefactKey(model=digest, compiler=self.compiler.name, **identity)

    def samples(self) -> Samples:
        """Return the inputs of the check, see `samples_of`. Raises LoadFailed."""
        return samples_of(self.store, self.model, self.config, self.spec)


def compiler_of(config: pb.ModelConfig, file: str) -> CompileRequest | None:
    """Return the compiler that a configuration names, or the variant, with what it says about it; None if it names
    neither.

    Raises ConfigInvalid that names the parameter.
    """
    name, variant = parameter(config, COMPILE_KEY), parameter(config, VARIANT_KEY)
    if variant and name:
        raise ConfigInvalid(file, f"parameters[{VARIANT_KEY!r}]", f"does not go with parameters[{COMPILE_KEY!r}]")
    if variant == ITSELF:
        return None
    keys = [key for key in config.parameters if key.startswith(_SETTING)]
    given = {key.removeprefix(_SETTING): parameter(config, key) for key in keys}
    if not name and not variant:
        if given:
            key = f"{_SETTING}{min(given)}"
            raise ConfigInvalid(file, f"parameters[{key!r}]", f"needs parameters[{COMPILE_KEY!r}]")
        return None
    field = f"parameters[{VARIANT_KEY if variant else COMPILE_KEY!r}]"
    known = variants() if variant else compilers()
    if (variant or name) not in known:
        raise ConfigInvalid(file, field, f"{(variant or name)[:64]!r} is not one of {', '.join(known)}")
    try:
        compiler = find_compiler(name or f"{VARIANT}{variant}")
    except LoadFailed as failure:
        raise ConfigInvalid(file, field, failure.reason) from failure
    if config.backend != compiler.reference:
        raise ConfigInvalid(file, field, f"{compiler.name!r} is for models of backend {compiler.reference!r} only")
    text = given.pop("tolerance", "")
    tolerance = read_value(parse_tolerance, text, file, f"parameters[{TOLERANCE_KEY!r}]") if text else None
    return CompileRequest(compiler, tolerance, _read(compiler, given, file, f"parameters[{_SETTING + '{}'!r}]"))


def may_ask(config: pb.ModelConfig) -> bool:
    """Return whether a model with this configuration may have an artefact; its load decides."""
    listed = config.optimization.execution_accelerators
    wants = bool(listed.cpu_execution_accelerator or listed.gpu_execution_accelerator)
    return COMPILE_KEY in config.parameters or VARIANT_KEY in config.parameters or wants


def compilers() -> list[str]:
    """Return the values of `oriel.compile`."""
    return [name for name in compiler_names() if not name.startswith(VARIANT)]


def variants() -> list[str]:
    """Return the values of `oriel.variant`."""
    return [ITSELF, *(name.removeprefix(VARIANT) for name in compiler_names() if name.startswith(VARIANT))]


def _read(compiler: Compiler, given: Mapping[str, str], file: str, field: str) -> dict[str, str]:
    """Return the settings of a compiler. field: the field's name, with {} for the name of a setting. Raises
    ConfigInvalid.
    """
    read: dict[str, str] = {}
    for name, value in sorted(given.items()):
        if name not in compiler.settings:
            known = ", ".join(["tolerance", *compiler.settings])
            raise ConfigInvalid(file, field.format(name[:64]), f"is not a setting of {compiler.name!r}, only {known}")
        read[name] = read_value(compiler.settings[name], value, file, field.format(name))
    return read


def with_compiler(
    config: pb.ModelConfig, file: str, found: list[Place], missing: Callable[[str], str]
) -> tuple[list[Place], CompileRequest | None]:
    """Return the places of a model, and what its configuration asks to compile.

    OpenVINO as the only accelerator of instances on the CPU is ONNX Runtime's provider of that name. If that is not
    installed, the compiler does the same, and the places are those of the reference, without the provider.
    missing: returns why a provider cannot be used, "" if it can.
    Raises ConfigInvalid.
    """
    wanted = compiler_of(config, file)
    if wanted is not None:
        check_compilable(config, file, found, on_gpu=wanted.compiler.on_gpu)
        return found, wanted
    if (by_accelerator := _with_tensorrt(config, file, found, missing)) is not None:
        return by_accelerator
    listed = config.optimization.execution_accelerators.cpu_execution_accelerator
    alone = all([name for name, _ in place.options.providers] == [OPENVINO] for place in found)
    if not listed or not alone or PROVIDER_KEY in config.parameters or not missing(OPENVINO):
        return found, None
    ((_, options),) = accelerators(config, file, gpu=False)
    compiler = find_compiler("openvino")
    given = {_PROVIDER_SETTINGS[key]: value for key, value in options.items() if key in _PROVIDER_SETTINGS}
    if "precision" in given:
        given["precision"] = given["precision"].replace("ACCURACY", "FP32")
    field = "optimization.execution_accelerators.cpu_execution_accelerator[0].parameters: {}"
    settings = _read(compiler, given, file, field)
    plain = [replace(place, options=replace(place.options, providers=())) for place in found]
    return plain, CompileRequest(compiler, None, settings)


def _with_tensorrt(
    config: pb.ModelConfig, file: str, found: list[Place], missing: Callable[[str], str]
) -> tuple[list[Place], CompileRequest] | None:
    """Return the places of the reference, and what to compile, for a model that wants TensorRT as its accelerator where
    ONNX Runtime's provider of that name is not installed; None for any other model. Options that say nothing to the
    compiler get a warning in the log; a precision in which it does not compute is refused by its build.
    """
    listed = config.optimization.execution_accelerators.gpu_execution_accelerator
    groups = list(config.instance_group)
    on_cpu = bool(groups) and all(group.kind == pb.ModelInstanceGroup.KIND_CPU for group in groups)
    alone = len(listed) == 1 and listed[0].name == "tensorrt" and not on_cpu
    if not alone or PROVIDER_KEY in config.parameters or not missing(TENSORRT):
        return None
    options = dict(accelerators(config, file, gpu=True))[TENSORRT]
    given = {_TENSORRT_SETTINGS[key]: value for key, value in options.items() if key in _TENSORRT_SETTINGS}
    compiler = find_compiler("tensorrt")
    field = "optimization.execution_accelerators.gpu_execution_accelerator[0].parameters: {}"
    settings = _read(compiler, given, file, field)
    for key, value in options.items():
        if key in _TENSORRT_PRECISIONS and value == "True":
            settings["precision"] = _TENSORRT_PRECISIONS[key]
        elif key not in _TENSORRT_SETTINGS and value != "False":
            _log.warning("%s: %s has no effect on a plan that the server builds", file, field.format(key))
    plain = [replace(place, options=_without(place.options, TENSORRT)) for place in found]
    check_compilable(config, file, plain, on_gpu=True)
    return plain, CompileRequest(compiler, None, settings)


def _without(options: EngineOptions, provider: str) -> EngineOptions:
    return replace(options, providers=tuple(each for each in options.providers if each[0] != provider))


def check_compilable(config: pb.ModelConfig, file: str, found: Sequence[Place], *, on_gpu: bool = False) -> None:
    """Raise ConfigInvalid if the model runs where its compiler does not compile for, or answers more than once.

    on_gpu: the compiler is for one GPU; otherwise it is for the CPU.
    """
    field = f"parameters[{VARIANT_KEY if VARIANT_KEY in config.parameters else COMPILE_KEY!r}]"
    if on_gpu and len({device_of(place.options.providers) for place in found}) > 1:
        raise ConfigInvalid(file, field, "is for one GPU, and the model has instances on several devices: name one")
    if not on_gpu and any(place.options.providers for place in found):
        raise ConfigInvalid(
            file,
            field,
            "is for the CPU, and the model has an execution provider of its own: leave out one of the two",
        )
    if config.model_transaction_policy.decoupled:
        raise ConfigInvalid(file, field, "does not go with a decoupled model")


def samples_of(store: ModelStore, model: str, config: pb.ModelConfig, spec: ModelSpec) -> Samples:
    """Return inputs to compare outputs with: those of `model_warmup` if there are any, else made ones. Raises
    LoadFailed.
    """
    if not config.model_warmup:
        return made_samples(spec)
    given = warmup_inputs(config, spec, f"{model}/{CONFIG_FILE}", read=lambda name: store.data(model, f"warmup/{name}"))
    return _bounded(given)


def made_samples(spec: ModelSpec) -> Samples:
    """Return inputs made from a fixed seed: one for each length of variable dimensions, with 1 row and with several."""
    values = np.random.default_rng(SEED)
    rows = sorted({1, min(MAX_ROWS, spec.max_batch_size)}) if spec.batched else [0]
    found = ({each.name: _made(each, row, length, values) for each in spec.inputs if not each.optional}
             for length in LENGTHS for row in rows if _bytes(spec, row, length) <= MAX_SAMPLE_BYTES)  # fmt: skip
    variable = any(-1 in (each.engine_dims or each.dims) for each in spec.inputs)
    return _bounded(found) if variable else _bounded(found, len(rows))


def _bounded(found: Iterator[dict[str, Array]], most: int = MAX_SAMPLES) -> Samples:
    samples: Samples = []
    size_bytes = 0
    for each in found:
        size_bytes += sum(_size(array) for array in each.values())
        if len(samples) >= most or (samples and size_bytes > MAX_SAMPLE_BYTES):
            break
        samples.append(each)
    return samples


def _size(array: Array) -> int:
    return sum(map(len, array.flat)) + 4 * array.size if array.dtype == object else int(array.nbytes)


def _shape(tensor: TensorSpec, rows: int, length: int) -> tuple[int, ...]:
    dims = tensor.dims if tensor.engine_dims is None else tensor.engine_dims
    sizes = tuple(length if dim < 0 else dim for dim in dims)
    return (rows, *sizes) if rows else sizes


def _bytes(spec: ModelSpec, rows: int, length: int) -> int:
    total = 0
    for each in spec.inputs:
        total += math.prod(_shape(each, rows, length)) * (DATATYPES[each.datatype].size or 16)
    return total


def _made(tensor: TensorSpec, rows: int, length: int, values: np.random.Generator) -> Array:
    """Return values that most models take: whole numbers are 0 or 1, so that they are valid as indices and masks."""
    shape = _shape(tensor, rows, length)
    if tensor.datatype == "BYTES":
        texts = np.empty(math.prod(shape), dtype=object)
        texts[:] = [values.integers(97, 123, 4, dtype=np.uint8).tobytes() for _ in range(texts.size)]
        return texts.reshape(shape)
    if tensor.datatype == "BF16":
        floats = values.standard_normal(shape, dtype=np.float32)
        return (floats.view(np.uint32) >> 16).astype(np.uint16)
    dtype = DATATYPES[tensor.datatype].dtype
    if dtype.kind == "f":
        return np.asarray(values.standard_normal(shape), dtype)
    return np.asarray(values.integers(0, 2, shape), dtype)


def _digest(source: Path) -> str:
    """Return the digest of the model's file and of everything in its folder that it may refer to."""
    folder, digest = source.parent, hashlib.sha256()
    found = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    names = sorted(name for name in found if name != REFERENCE_FILE)
    for name in (source.name, *names):
        digest.update(name.encode("utf-8", "surrogateescape") + b"\0")
    for name in names:
        with (folder / name).open("rb") as file:
            own = hashlib.file_digest(file, "sha256")
        digest.update(own.digest())
    return digest.hexdigest()
