"""Opens a model of another framework, runs it on samples, and writes it in a form that the inference server loads.

`oriel models import` runs this file in a process of its own, with the Python that has the framework: Oriel need not be
installed there, so only the standard library is imported before a converter runs. Opening a model may execute code of
whoever made it.
"""

import ctypes
import json
import os
import resource
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from timeit import repeat
from typing import Any

Arrays = dict[str, Any]  # name -> numpy array whose rows are the samples

ROWS, LENGTH = 8, 8  # of samples that are made here, and of their variable dimensions
MAX_BATCH = 8
RUNS = 5
PROMPT_TOKENS, NEW_TOKENS = 32, 8
NEARLY = 0.5  # difference of the logarithms of two probabilities
TEXTS = ("a", "the model answers", "a longer text than the others, so that rows are padded", "good")
_NEW_USER, _NEW_NETWORK = 0x10000000, 0x40000000  # flags of unshare(2)
LANGUAGE = "its engine is a server of its own: put that behind the gateway as a pool, docs/accelerators.md shows how"
_TYPES = {"float16": "FP16", "float32": "FP32", "float64": "FP64"}
_XGBOOST = {"xgboost": 'save_model("xgboost.json")', "lightgbm": 'booster_.save_model("model.txt")'}


class Refused(Exception):
    """The model cannot be converted. The text says why, and what to do."""


@dataclass(frozen=True)
class Converted:
    """A model that was converted.

    inputs: the samples, named as the converted model's inputs.
    run: executes the original on all samples; returns its outputs, named as the converted model's.
    config: the text of config.pbtxt; "" if the server reads all it needs from the model's file.
    notes: sentences for the user.
    """

    inputs: Arrays
    run: Callable[[], Arrays]
    config: str = ""
    notes: Sequence[str] = ()


def convert_sklearn(source: Path, folder: Path, given: Arrays, trusted: bool) -> Converted:
    """Write an ONNX file of a scikit-learn model. One array of samples is a matrix, several are named columns."""
    import numpy as np
    from skl2onnx import to_onnx
    from skl2onnx.common.data_types import guess_data_type
    from sklearn.base import is_classifier

    model, inputs = _unpickled(source, trusted), given
    if saving := _XGBOOST.get(library := type(model).__module__.partition(".")[0]):
        raise Refused(f"it holds a model of {library}: write it with model.{saving}, and import that file")
    if not inputs:
        if not (width := getattr(model, "n_features_in_", 0)):
            raise Refused("the model does not say how many features it has: pass --inputs FILE.npz with rows of them")
        inputs = {"X": np.random.default_rng(0).standard_normal((ROWS, width)).astype(np.float32)}
    if len(inputs) == 1:
        (rows,) = (each.astype("float64") if each.dtype.kind == "f" else each for each in inputs.values())
    else:
        from pandas import DataFrame

        rows = DataFrame({name: column.reshape(-1) for name, column in inputs.items()})
        inputs = {name: column.reshape(-1, 1) for name, column in inputs.items()}
    types = [(name, type(guess_data_type(each)[0][1])([None, each.shape[1]])) for name, each in inputs.items()]
    # Without the option, probabilities are maps, which are no tensors.
    options = {id(model): {"zipmap": False}} if is_classifier(model) else None
    written = to_onnx(model, initial_types=types, options=options)
    (folder / "model.onnx").write_bytes(written.SerializeToString())
    calls = [model.predict if hasattr(model, "predict") else model.transform]
    calls += [model.predict_proba] if options and hasattr(model, "predict_proba") else []
    names = [output.name for output in written.graph.output]
    return Converted(inputs, lambda: {name: call(rows) for name, call in zip(names, calls, strict=False)})


def _unpickled(source: Path, trusted: bool) -> Any:
    if source.suffix == ".skops":
        import skops.io

        odd = skops.io.get_untrusted_types(file=source)
        if odd and not trusted:
            raise Refused(f"it holds objects of other types ({', '.join(odd)[:200]}): trust them with --trust-file")
        return skops.io.load(source, trusted=odd)
    import joblib

    return joblib.load(source)


def convert_keras(source: Path, folder: Path, given: Arrays, trusted: bool) -> Converted:
    """Write a SavedModel of a Keras model, by Keras's own export. Code in it (Lambda layers) needs trust."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import keras
    import numpy as np
    import tensorflow  # noqa: F401

    model = keras.models.load_model(source, compile=False, safe_mode=not trusted)
    inputs = dict(given)
    for each in () if inputs else model.inputs:
        made = np.random.default_rng(0).random([ROWS, *(size or LENGTH for size in each.shape[1:])])
        inputs[each.name] = (made.round() if "int" in each.dtype else made).astype(each.dtype)
    if set(inputs) != (names := {each.name for each in model.inputs}):
        raise Refused(f"--inputs has arrays for {', '.join(inputs)}: name them {', '.join(names)}, as in the model")
    model.export(str(folder / "model.savedmodel"), format="tf_saved_model", verbose=False)
    tensors = [inputs[each.name] for each in model.inputs]

    def run() -> Arrays:
        found = keras.tree.flatten(model(tensors if len(tensors) > 1 else tensors[0], training=False))
        return {f"output_{number}": each.numpy() for number, each in enumerate(found)}

    return Converted(inputs, run)


def convert_huggingface(source: Path, folder: Path, given: Arrays, trusted: bool) -> Converted:
    """Write an ONNX file of an encoder's folder (classification of texts, tokens or images, embeddings) by PyTorch."""
    import onnxscript  # noqa: F401
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(source, local_files_only=True)
    kind = (getattr(config, "architectures", None) or ["AutoModel"])[0]
    if "ConditionalGeneration" in kind:
        raise Refused(f"{kind} generates text: {LANGUAGE}")
    config.use_cache = config.output_hidden_states = config.output_attentions = False  # no outputs of a served model
    opened = getattr(transformers, kind, transformers.AutoModel)
    model = opened.from_pretrained(source, config=config, local_files_only=True).eval()
    tensors = {name: torch.from_numpy(each) for name, each in given.items()}
    if not tensors:
        cut = transformers.AutoTokenizer.from_pretrained(source, local_files_only=True)
        made = cut(list(TEXTS), padding=True, return_tensors="pt")
        tensors = {name: each for name, each in made.items() if name in signature(model.forward).parameters}

    def run() -> Arrays:
        with torch.inference_mode():
            found = model(**tensors)
        return {name: each.numpy() for name, each in found.items() if isinstance(each, torch.Tensor)}

    axes = {name: {0: "batch", 1: "length"} if each.dim() == 2 else {0: "batch"} for name, each in tensors.items()}
    names = {"input_names": list(tensors), "output_names": list(run())}
    torch.onnx.export(model, (), folder / "model.onnx", kwargs=tensors, dynamic_shapes=axes, dynamo=True, **names)
    notes = []
    if (source / "tokenizer.json").is_file():
        shutil.copy(source / "tokenizer.json", folder)
        notes = ["tokenizer.json lies beside the model, for the service that makes its token ids: docs/logic-openai.md"]
    return Converted({name: each.numpy() for name, each in tensors.items()}, run, notes=notes)


def convert_language(source: Path, folder: Path, given: Arrays, trusted: bool) -> Converted:
    """Write OpenVINO's files of a model that generates text and of its tokenizer. The samples are ids of prompts."""
    import torch
    import transformers
    from optimum.exporters.openvino import main_export

    local = {"local_files_only": True, "trust_remote_code": trusted}
    main_export(str(source), folder, task="text-generation-with-past", convert_tokenizer=True, **local)
    model = transformers.AutoModelForCausalLM.from_pretrained(source, **local).eval()
    inputs = dict(given)
    if not inputs:  # a text that repeats itself, so that any model knows how it goes on
        ids = transformers.AutoTokenizer.from_pretrained(source, **local)(" ".join(TEXTS * ROWS))["input_ids"]
        inputs = {"input_ids": [ids[start : start + PROMPT_TOKENS] for start in range(0, 4 * LENGTH, LENGTH)]}

    def run() -> Arrays:
        step, past, tokens, likely = torch.as_tensor(inputs["input_ids"]), None, [], []
        with torch.inference_mode():
            for _ in range(NEW_TOKENS):
                found = model(step, past_key_values=past, use_cache=True)
                best = found.logits[:, -1].float().log_softmax(-1).topk(2)
                step, past = best.indices[:, :1], found.past_key_values
                tokens.append(step)
                likely.append(best.values)
        first, second = torch.stack(likely, 1).unbind(-1)
        # Rounding may choose another token where two are nearly as likely, and what follows differs then.
        unsure = (first - second < NEARLY).cumsum(1) > 0
        if unsure.all():
            raise Refused("it is sure of no token after these prompts: pass --inputs FILE.npz with other input_ids")
        made = torch.cat(tokens, 1).masked_fill(unsure, -1)
        return {"tokens": made, "probabilities": first.exp().masked_fill(unsure, 0.0)}

    return Converted(inputs, run)


def convert_pytorch(source: Path, folder: Path, given: Arrays, trusted: bool) -> Converted:
    """Copy a TorchScript or exported program, and write the configuration with the tensors that it does not name."""
    import numpy as np
    import torch

    exported = source.suffix == ".pt2"
    model = torch.export.load(source).module() if exported else torch.jit.load(source, map_location="cpu").eval()
    if not given:
        raise Refused("the program does not say which tensors it takes: pass --inputs FILE.npz with rows of them")
    shutil.copy(source, folder / ("model.pt2" if exported else "model.pt"))

    def run(rows: int | None = None) -> Arrays:
        with torch.inference_mode():
            found = model(*(torch.from_numpy(np.ascontiguousarray(each[:rows])) for each in given.values()))
        listed = found if isinstance(found, (tuple, list)) else [found]
        return {f"OUTPUT__{number}": each.numpy() for number, each in enumerate(listed)}

    tensors = [("input", *each) for each in given.items()] + [("output", *each) for each in run().items()]
    try:
        batched = all(len(each) == 1 for each in run(1).values())
    except Exception:  # a program for one size of batches
        batched = False
    lines = [f'backend: "pytorch"\nmax_batch_size: {MAX_BATCH if batched else 0}\n']
    for field, name, array in tensors:
        datatype = _TYPES.get(array.dtype.name, array.dtype.name.upper())
        dims = list(map(int, array.shape[batched:]))
        lines.append(f"{field} [ {{ name: {json.dumps(name)} data_type: TYPE_{datatype} dims: {dims} }} ]\n")
    note = "config.pbtxt has the shapes of the samples: write -1 for the dimensions that vary"
    return Converted(given, run, "".join(lines), [note])


@dataclass(frozen=True)
class Converter:
    """A framework whose files have to be opened.

    suffixes: the endings of its files' names.
    packages: the words behind `pip install`.
    runs_code: the suffixes of files that the user has to trust before they are opened.
    """

    convert: Callable[[Path, Path, Arrays, bool], Converted]
    suffixes: tuple[str, ...]
    packages: str
    runs_code: tuple[str, ...] = ()


_PICKLES = (".joblib", ".pkl", ".pickle")
CONVERTERS = {
    "sklearn": Converter(convert_sklearn, (*_PICKLES, ".skops"), "scikit-learn skl2onnx", _PICKLES),
    "keras": Converter(convert_keras, (".keras", ".h5", ".hdf5"), "keras tensorflow"),
    "huggingface": Converter(convert_huggingface, (), "torch transformers onnx onnxscript"),
    "language": Converter(convert_language, (), "'optimum-intel[openvino]'"),
    "pytorch": Converter(convert_pytorch, (".pt", ".pth", ".pt2"), "torch numpy", (".pt", ".pth", ".pt2")),
}


def _convert(request: dict[str, Any], out: Path, progress: Callable[[str], None]) -> dict[str, Any]:
    import numpy as np

    source, folder = Path(request["source"]), Path(request["folder"])
    given = dict(np.load(request["inputs"], allow_pickle=False)) if request["inputs"] else {}
    progress(f"opening and converting {source.name}")
    done = CONVERTERS[request["framework"]].convert(source, folder, given, request["trusted"])
    progress("running the original on the samples")
    for name, arrays in (("inputs", done.inputs), ("expected", done.run())):
        plain: Arrays = {key: np.asarray(each) for key, each in arrays.items()}
        # Texts without pickles: of a fixed width.
        plain |= {key: each.astype(str) for key, each in plain.items() if each.dtype.kind in "OT"}
        np.savez(out / f"{name}.npz", **plain)
    times = sorted(repeat(done.run, number=1, repeat=1 if request["framework"] == "language" else RUNS))
    return {"config": done.config, "notes": list(done.notes), "original_ms": times[len(times) // 2] * 1e3}


def main() -> None:
    """Do the job of the first argument, a JSON object; leave result.json in its folder `out`."""
    request = json.loads(sys.argv[1])
    out = Path(request["out"])
    # Frameworks print: only lines of ours reach the parent.
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if most := request["memory_bytes"]:
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    unshare = ctypes.CDLL(None).unshare
    if not (request["network"] or unshare(_NEW_NETWORK) == 0 or unshare(_NEW_USER | _NEW_NETWORK) == 0):
        lines.write("the kernel does not let this process give up the network: the conversion can reach it\n")
    try:
        result = _convert(request, out, lambda text: print(text, file=lines, flush=True))
    except ImportError as missing:
        result = {"missing": missing.name or str(missing)}
    except Refused as refused:
        result = {"refused": str(refused)}
    except Exception as error:  # whatever a framework raises
        result = {"refused": f"{type(error).__name__}: {error}"}
    (out / "result.json").write_text(json.dumps(result))


if __name__ == "__main__":
    main()
