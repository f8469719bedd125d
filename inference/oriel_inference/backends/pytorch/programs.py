"""Loads PyTorch programs of every form in the child process, and calls them with tensors in configuration order."""

import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.utils import _pytree as pytree

from oriel_inference.backends.pytorch.form import Form
from oriel_inference.backends.pytorch.names import Unfit, own_names, positions
from oriel_wire.v2.datatypes import DATATYPES

DTYPES: Mapping[str, torch.dtype] = {
    name: getattr(torch, each.dtype.name) for name, each in DATATYPES.items() if name != "BYTES"
} | {"BF16": torch.bfloat16}
Names = tuple[Sequence[str], Sequence[str]]  # of the inputs and of the outputs, in the order of the configuration
# Takes the inputs and returns the outputs, in the order of the configuration.
Program = Callable[[Sequence[torch.Tensor | None]], list[Any]]


class Model:
    """A program and its settings.

    request: the options of the session, with the path and the form of the file.
    dtypes: the types of the inputs.
    runs_python: the program is Python code, whose errors may quote anything.
    """

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._switches = {key: value == "1" for key, value in request["session_entries"].items()}
        self._threads: int = request["intra_op_threads"]
        gpu = dict(request["providers"]).get("CUDAExecutionProvider")
        self._device = "cpu" if gpu is None else f"cuda:{gpu['device_id']}"
        self.dtypes = [DTYPES[each["datatype"]] for each in request["inputs"]]
        self._outputs = [(each["name"], DTYPES[each["datatype"]]) for each in request["outputs"]]
        self.runs_python = request["form"] == Form.MODULE
        torch.set_num_interop_threads(request["inter_op_threads"])
        self.set_up_thread()
        names = [each["name"] for each in request["inputs"]], [name for name, _ in self._outputs]
        opened = partial(load, request["form"], Path(request["path"]), self._device, names)
        if request["form"] == Form.COMPILED:
            self._check_compiled(opened(), request["inputs"], int(request["session_entries"]["max_batch_size"]))
        self._program = opened()
        # With zeros, which it may refuse: what crashes it, or has other outputs, must not be served.
        try:
            self.run(self._zeros(request["inputs"], 1), range(len(self._outputs)))
        except Exception as error:
            if isinstance(error, Unfit):
                raise

    def _zeros(self, inputs: Sequence[Mapping[str, Any]], free: int, rows: int = 0) -> list[torch.Tensor]:
        """Return zeros for each input. free: the size of dimensions that the configuration leaves open. rows: the most
        that the first may have, 0 if it has no bound.
        """
        shapes = [[free if size < 0 else size for size in each["shape"]] for each in inputs]
        shapes = [[min(shape[0], rows), *shape[1:]] for shape in shapes] if rows else shapes
        return [torch.zeros(shape, dtype=dtype) for shape, dtype in zip(shapes, self.dtypes, strict=True)]

    def _check_compiled(self, program: Program, inputs: Sequence[Mapping[str, Any]], rows: int) -> None:
        """Raise Unfit if a program was compiled for other types or sizes: it would read the memory behind its inputs.

        program: opened for this check alone, because code asks at its first call if it has to check its inputs.
        """
        os.environ["AOTI_RUNTIME_CHECK_INPUTS"] = "1"
        for free in (7, 11):  # no fixed size is both
            try:
                program(self._zeros(inputs, free, rows))
            except RuntimeError as error:
                if "unmatched" in str(error):
                    reason = f"it is compiled for other inputs ({str(error).partition(', but got')[0]})"
                    raise Unfit(
                        f"{reason}: set data_type, dims and max_batch_size to what it was exported with"
                    ) from error
        del os.environ["AOTI_RUNTIME_CHECK_INPUTS"]

    def set_up_thread(self) -> None:
        """Apply the settings that PyTorch keeps for each thread."""
        torch.set_num_threads(self._threads)
        torch._C._set_graph_executor_optimize(not self._switches.get("DISABLE_OPTIMIZED_EXECUTION", False))
        torch.backends.cudnn.enabled = not self._switches.get("DISABLE_CUDNN", False)
        for key, function in (
            ("ENABLE_JIT_PROFILING", torch._C._jit_set_profiling_mode),
            ("ENABLE_JIT_EXECUTOR", torch._C._jit_set_profiling_executor),
            ("ENABLE_TENSOR_FUSER", torch._C._jit_set_texpr_fuser_enabled),
        ):
            if key in self._switches:
                function(self._switches[key])

    def run(self, tensors: Sequence[torch.Tensor | None], wanted: Sequence[int]) -> list[torch.Tensor]:
        """Return the wanted outputs. Raises Unfit if one is not what the configuration says."""
        with torch.no_grad(), torch.inference_mode(self._switches.get("INFERENCE_MODE", True)):
            found = self._program([None if each is None else each.to(self._device) for each in tensors])
        if self._switches.get("ENABLE_CACHE_CLEANING") and self._device != "cpu":
            torch.cuda.empty_cache()
        for index in wanted:
            name, dtype = self._outputs[index]
            has = getattr(found[index], "dtype", type(found[index]).__name__)
            if has != dtype:
                raise Unfit(f"output {name[:64]!r} of the model is {has}, the configuration has {dtype}")
        return [found[index].detach() for index in wanted]


def load(form: str, path: Path, device: str, names: Names) -> Program:
    """Load a file. Raises Unfit, and whatever PyTorch raises."""
    match form:
        case Form.TORCHSCRIPT:
            return _script(torch.jit.load(str(path), map_location=device).eval(), *names)
        case Form.EXPORTED:
            exported = torch.export.load(path)
            if device != "cpu":
                from torch.export.passes import move_to_device_pass

                exported = move_to_device_pass(exported, device)
            arguments = exported.module_call_graph[0].signature.forward_arg_names or ()
            spec = exported.call_spec
            return _structured(exported.module(), spec.in_spec, spec.out_spec, arguments, names)
        case Form.COMPILED:
            number = int(device.partition(":")[2] or -1)
            with TemporaryDirectory() as unpacked:  # is not read again, and this process may be killed at any time
                os.environ["TMPDIR"] = unpacked
                compiled = torch._inductor.aoti_load_package(str(path), device_index=number)
                del os.environ["TMPDIR"]
            specs = [pytree.treespec_loads(text) for text in compiled.loader.get_call_spec()]
            return _structured(compiled, specs[0], specs[1], (), names)
        case _:
            module = _module(path).to(device).eval()
            return lambda tensors: _in_order(module(*tensors), names[1])


def _script(module: Any, inputs: Sequence[str], outputs: Sequence[str]) -> Program:
    """Return a TorchScript module whose inputs are one dictionary, named arguments, or arguments by position."""

    def named(tensors: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor]:
        return {name: each for name, each in zip(inputs, tensors, strict=True) if each is not None}

    arguments = module.forward.schema.arguments[1:]
    if len(arguments) == 1 and str(arguments[0].type) == "Dict[str, Tensor]":
        return lambda tensors: _in_order(module(named(tensors)), outputs)
    own = [argument.name for argument in arguments]
    required = [argument.name for argument in arguments if not argument.has_default_value()]
    if own_names(inputs, own):
        if missing := [name for name in required if name not in inputs]:
            raise Unfit(f"forward also needs {missing[0][:64]!r}: add it to the inputs of the configuration")
        return lambda tensors: _in_order(module(**named(tensors)), outputs)
    order = positions(inputs, (), "input")
    if not len(required) <= len(order) <= len(own):
        raise Unfit(f"forward takes {', '.join(own)[:200]}, the configuration has {len(order)} inputs")
    return lambda tensors: _in_order(module(*_arranged(tensors, order)), outputs)


def _structured(call: Callable[..., Any], taken: Any, given: Any, arguments: Sequence[str], names: Names) -> Program:
    """Return an exported program. taken, given: the structures of its arguments and of its result. arguments: the names
    of those of `forward`, if they are known.
    """
    inputs, outputs = names
    # Triton writes no brackets there.
    inputs = [f"KWARGS[{name[6:]}]" if name[:6] == "KWARGS" and name[6:7] != "[" else name for name in inputs]
    leaves = _leaves(taken, ("ARGS", "KWARGS"))
    if len(leaves) != len(inputs):
        raise Unfit(f"the program takes {', '.join(leaves)[:200]}, the configuration has {len(inputs)} inputs")
    own = leaves if not arguments or len(arguments) != len(leaves) or own_names(inputs, leaves) else arguments
    order = positions(inputs, own, "input")
    results = _leaves(given, ())
    keys = [name.removeprefix("RESULT[").removesuffix("]") for name in results]
    slots = positions(outputs, results if own_names(outputs, results) else keys, "output")
    if max(slots, default=0) >= len(results):
        raise Unfit(f"the program returns {', '.join(results)[:200]}, the configuration has {len(outputs)} outputs")

    def run(tensors: Sequence[torch.Tensor | None]) -> list[Any]:
        args, kwargs = pytree.tree_unflatten(_arranged(tensors, order), taken)
        found = pytree.tree_leaves(call(*args, **kwargs))
        return [found[slot] for slot in slots]

    return run


def _leaves(spec: Any, parts: Sequence[str]) -> list[str]:
    """Return the names of all tensors of a structure, as Triton writes them. parts: names of its first level."""
    numbered = pytree.tree_unflatten(list(range(spec.num_leaves)), spec)
    found = []
    for path, _ in pytree.tree_flatten_with_path(numbered)[0]:
        steps = [str(getattr(step, "key", getattr(step, "idx", ""))) for step in path]
        first = parts[int(steps.pop(0))] if parts else "RESULT"
        found.append(first + "".join(f"[{step}]" for step in steps))
    return found


def _arranged(tensors: Sequence[torch.Tensor | None], order: Sequence[int]) -> list[torch.Tensor | None]:
    """Return the inputs by position. order: the position of each, all from 0 upwards."""
    at = dict(zip(order, tensors, strict=True))
    return [at[position] for position in range(len(at))]


def _in_order(result: Any, outputs: Sequence[str]) -> list[Any]:
    """Return the outputs of what a module returns. Raises Unfit if it does not have them."""
    if isinstance(result, Mapping):
        if missing := [name for name in outputs if name not in result]:
            raise Unfit(f"the model returns {', '.join(map(str, result))[:200]}, and no {missing[0][:64]!r}")
        return [result[name] for name in outputs]
    found = list(result) if isinstance(result, tuple | list) else [result]
    slots = positions(outputs, (), "output")
    if max(slots, default=0) >= len(found):
        raise Unfit(f"the model returns {len(found)} outputs, the configuration has {', '.join(outputs)[:200]}")
    return [found[slot] for slot in slots]


def _module(path: Path) -> torch.nn.Module:
    """Return an object of the module that a Python file defines."""
    sys.path += [str(path.parent)]
    sys.dont_write_bytecode = True  # the repository is watched for changes
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    source = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = source
    spec.loader.exec_module(source)
    for _, found in inspect.getmembers(source, inspect.isclass):
        if issubclass(found, torch.nn.Module) and found.__module__ == source.__name__:
            made: torch.nn.Module = found()
            return made
    raise Unfit(f"{path.name} defines no subclass of torch.nn.Module: define the model in it")
