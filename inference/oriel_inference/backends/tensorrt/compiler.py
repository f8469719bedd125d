"""TensorRT as a compiler: builds a plan from an ONNX file on the GPU of the model, and opens it as the backend of plans
does. Batches that its profiles do not take are run by the reference.
"""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from oriel_inference.backends.compilers import Compiler, CompilerIdentity, number, one_of
from oriel_inference.backends.tensorrt import GPU_KEY, PROVIDER, half
from oriel_inference.backends.tensorrt.backend import TensorRt
from oriel_inference.backends.tensorrt.library import Library, find_library
from oriel_inference.backends.tensorrt.session import PlanSession
from oriel_inference.errors import CompilerMissing, LoadFailed
from oriel_inference.model import EngineOptions
from oriel_policies.upstreams.engine_profiles import Profile, Shape, Span, parse_shapes
from oriel_wire.process.shared_settings import cache_folder

ENTRY = "model.plan"
MAX_CACHE_BYTES = 256 << 20  # largest timing cache
MAX_LEVEL = 5
_PRECISIONS = ("FP32", "FP16")


def _shapes(text: str) -> str:
    parse_shapes(text)
    return text


class TensorRtCompiler(Compiler):
    """Compiles for the GPU on which the model runs; for GPU 0 if the model runs on the CPU."""

    name = "tensorrt"
    on_gpu = True
    settings = {
        "precision": one_of(*_PRECISIONS),
        "profile_min_shapes": _shapes,
        "profile_opt_shapes": _shapes,
        "profile_max_shapes": _shapes,
        "workspace_bytes": number(0, 1 << 50),
        "optimization_level": number(0, MAX_LEVEL),
    }

    def __init__(self) -> None:
        self._backend: TensorRt | None = None

    def identity(self, options: EngineOptions) -> CompilerIdentity:
        library, gpu, given = _library(), _gpu(options), options.compiler_settings
        capabilities = {each.number: each.capability for each in self._opener().gpus()}
        if gpu not in capabilities:
            raise CompilerMissing(f"TensorRT does not find GPU {gpu}")
        failed, driver = library.runtime.cudaDriverGetVersion()
        return CompilerIdentity(
            compiler_version=library.version,
            device=capabilities[gpu],
            driver="" if int(failed) else str(driver // 1000),
            profiles=" ".join(f"{key}={given[key]}" for key in sorted(given) if key.startswith("profile_")),
            precision=given.get("precision", "FP32"),
            options=" ".join(
                (
                    *(f"{key}={given[key]}" for key in ("optimization_level", "workspace_bytes") if key in given),
                    *((f"fp16={half.converter()}",) if _converts(library, given) else ()),
                )
            ),
        )

    def build(self, source: Path, options: EngineOptions, folder: Path) -> str:
        library, given = _library(), options.compiler_settings
        if (precision := given.get("precision", "FP32")) not in _PRECISIONS:
            raise LoadFailed(
                f"a plan that the server builds computes in {' or '.join(_PRECISIONS)}, not in {precision}"
            )
        (failed,) = library.runtime.cudaSetDevice(_gpu(options))
        if int(failed):
            raise LoadFailed(f"CUDA cannot select GPU {_gpu(options)}: check it with nvidia-smi")
        library.log.pop_errors()
        with _to_read(source, folder, library, given) as path:
            return self._plan(path, library, given, folder)

    def _plan(self, source: Path, library: Library, given: Mapping[str, str], folder: Path) -> str:
        tensorrt, log = library.tensorrt, library.log
        builder = tensorrt.Builder(log)
        network = builder.create_network(0)
        parser = tensorrt.OnnxParser(network, log)
        if not parser.parse(source.read_bytes(), str(source)):
            errors = [str(parser.get_error(index)) for index in range(parser.num_errors)]
            raise LoadFailed(f"TensorRT cannot read {source.name}: {'; '.join(errors[:3]) or log.pop_errors()}")
        config = builder.create_builder_config()
        self._configure(config, library, given)
        tensors = (network.get_input(index) for index in range(network.num_inputs))
        for profile in profiles_of({tensor.name: tuple(tensor.shape) for tensor in tensors}, given):
            _add_profile(builder, config, profile, log)
        cache = cache_folder("engines") / f"tensorrt-{library.version}.timing"
        timings = _load_timings(config, cache)  # has to live until the plan is built
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise LoadFailed(f"TensorRT cannot compile {source.name}: {log.pop_errors() or 'it gave no reason'}")
        (folder / ENTRY).write_bytes(memoryview(plan))
        _keep_timings(timings, cache)
        return ENTRY

    def open(self, path: Path, options: EngineOptions) -> PlanSession:
        return self._opener().open(path, EngineOptions(providers=((PROVIDER, {GPU_KEY: str(_gpu(options))}),)))

    def _opener(self) -> TensorRt:
        """Return the backend that opens the plan for all instances, which then share its engine."""
        if self._backend is None:
            self._backend = TensorRt()
        return self._backend

    @staticmethod
    def _configure(config: Any, library: Library, given: Mapping[str, str]) -> None:
        tensorrt = library.tensorrt
        if "workspace_bytes" in given:
            config.set_memory_pool_limit(tensorrt.MemoryPoolType.WORKSPACE, int(given["workspace_bytes"]))
        if "optimization_level" in given:
            config.builder_optimization_level = int(given["optimization_level"])
        if given.get("precision") == "FP16":
            if not _converts(library, given):
                config.set_flag(tensorrt.BuilderFlag.FP16)
        elif hasattr(tensorrt.BuilderFlag, "TF32"):
            config.clear_flag(tensorrt.BuilderFlag.TF32)  # FP32 is meant, and not rounded to 10 bits


def profiles_of(inputs: Mapping[str, Shape], given: Mapping[str, str]) -> list[Profile]:
    """Return the optimisation profiles that settings ask for; none if no input has a variable shape.

    inputs: name -> shape. Raises LoadFailed for an input without shapes, and for shapes that do not fit.
    """
    variable = [name for name, shape in inputs.items() if -1 in shape]
    if not variable:
        return []
    kinds = ("min", "opt", "max")
    settings = {kind: parse_shapes(given.get(f"profile_{kind}_shapes", "")) for kind in kinds}
    settings["opt"] = settings["opt"] or settings["max"]
    if len({len(each) for each in settings.values()}) != 1 or not settings["min"]:
        raise LoadFailed(
            f"the shape of input {variable[0][:64]!r} is variable: profile_min_shapes and profile_max_shapes have to "
            "name it, as in ids:1x1,mask:1x1, and both have to hold the same number of profiles"
        )
    found = []
    for index in range(len(settings["min"])):
        spans = {}
        for name in variable:
            shapes = [settings[kind][index].get(name) for kind in kinds]
            if any(shape is None or not _fits(shape, inputs[name]) for shape in shapes):
                raise LoadFailed(f"profile {index} has no shapes of input {name[:64]!r} that fit {list(inputs[name])}")
            spans[name] = Span(*(shape for shape in shapes if shape is not None))
        found.append(Profile(spans))
    return found


def _fits(shape: Shape, own: Shape) -> bool:
    return len(shape) == len(own) and all(known in (-1, size) for size, known in zip(shape, own, strict=True))


def _gpu(options: EngineOptions) -> int:
    return next((int(given[GPU_KEY]) for _, given in options.providers if GPU_KEY in given), 0)


def _converts(library: Library, given: Mapping[str, str]) -> bool:
    """Return whether the ONNX file has to be converted to FP16, because the builder has no setting for it."""
    return given.get("precision") == "FP16" and not hasattr(library.tensorrt.BuilderFlag, "FP16")


@contextmanager
def _to_read(source: Path, folder: Path, library: Library, given: Mapping[str, str]) -> Iterator[Path]:
    """Give the ONNX file that the parser reads. folder: folder with room for a converted copy. Raises LoadFailed."""
    if not _converts(library, given):
        yield source
        return
    with TemporaryDirectory(dir=folder) as converted:
        yield half.convert(source, Path(converted))


def _library() -> Library:
    """Return the library that builds plans on this machine. Raises CompilerMissing."""
    try:
        return find_library()
    except LoadFailed as missing:
        raise CompilerMissing(missing.reason) from missing


def _add_profile(builder: Any, config: Any, profile: Profile, log: Any) -> None:
    made = builder.create_optimization_profile()
    for name, span in profile.spans.items():
        try:
            made.set_shape(name, span.smallest, span.best, span.largest)
        except ValueError as error:
            raise LoadFailed(f"TensorRT refuses the shapes of input {name[:64]!r}: {error}") from error
    if config.add_optimization_profile(made) < 0:
        raise LoadFailed(f"TensorRT refuses an optimisation profile: {log.pop_errors() or 'it gave no reason'}")


def _load_timings(config: Any, path: Path) -> Any:
    """Give the builder what earlier builds on this machine have measured, which saves most of its time; return it."""
    try:
        data = path.read_bytes() if path.stat().st_size <= MAX_CACHE_BYTES else b""
    except OSError:
        data = b""
    cache = config.create_timing_cache(data) or config.create_timing_cache(b"")
    if cache is not None and not config.set_timing_cache(cache, False):  # they are another GPU's
        cache = config.create_timing_cache(b"")
        config.set_timing_cache(cache, False)
    return cache


def _keep_timings(cache: Any, path: Path) -> None:
    """Keep the timings that the build has measured. cache: as the builder has filled it, None without one."""
    if cache is None:
        return
    beside = path.with_name(f"{path.name}.{threading.get_native_id()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(memoryview(cache.serialize()))
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)  # the next build measures again
