"""`oriel models import FILE`: makes a model folder of a model of another framework, and compares the two.

Files that an engine of the server reads are only put into place. Others are converted by `conversion`, in a process of
its own. Either way the folder is loaded as a server would load it, and only then appears in the repository.
"""

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread, Timer
from typing import IO, Any

import numpy as np

from oriel_cli.errors import CommandFailed
from oriel_cli.models import conversion
from oriel_cli.models.check import Actions
from oriel_cli.models.conversion import CONVERTERS
from oriel_cli.table import columns, printable
from oriel_policies.artefacts.comparison import OutputError, Tolerance, disagreement, parse_tolerance
from oriel_policies.artefacts.differences import Array, measure_all
from oriel_wire.process.environment import selected
from oriel_wire.process.flags import number
from oriel_wire.process.start import ChildProcess

SHOWN = 3  # values of an output in the table
# suffix of a file -> its framework, and its name in a version's folder: what an engine reads as it is
PLACED = {
    ".onnx": ("onnx", "model.onnx"), ".xml": ("openvino", "model.xml"), ".pb": ("tensorflow", "model.graphdef"),
    ".tflite": ("tflite", "model.tflite"), ".pdmodel": ("paddle", "model.pdmodel"), ".txt": ("lightgbm", "model.txt"),
    ".json": ("xgboost", "xgboost.json"), ".ubj": ("xgboost", "xgboost.ubj"), ".tl": ("treelite", "checkpoint.tl"),
    ".gguf": ("language", "model.gguf"),
}  # fmt: skip


_Arrays = dict[str, Array]
# (names and datatypes of outputs; the outputs of the converted model and of the original, by run; milliseconds)
_Executed = tuple[list[tuple[str, str]], list[tuple[list[Array], list[Array]]], float]


def add_action(actions: Actions) -> None:
    """Add the command to those of `oriel models`."""
    text = "make a model folder of a scikit-learn, Keras, Hugging Face, PyTorch, ... model, and compare their outputs"
    made: argparse.ArgumentParser = actions.add_parser("import", help=text, description=f"{text}.")
    made.add_argument("source", type=Path, metavar="FILE|FOLDER", help="the model")
    made.add_argument("--repository", type=Path, required=True, metavar="DIR", help="the folder of models")
    made.add_argument("--name", default="", help="the model's name there (default: that of the file)")
    made.add_argument("--version", type=number(int, 1, 1 << 31), default=1, metavar="N", help="its version (default 1)")
    made.add_argument("--framework", choices=CONVERTERS, help="what it is, if the file's name does not say so")
    made.add_argument("--inputs", type=Path, metavar="FILE.npz", help="samples: rows for each input (default: made up)")
    made.add_argument("--tolerance", type=parse_tolerance, metavar="absolute=A,relative=R", help="default: by datatype")
    made.add_argument("--python", default=sys.executable, metavar="PATH", help="a Python that has the framework")
    made.add_argument("--trust-file", action="store_true", help="open a file that may hold code without asking")
    made.add_argument("--allow-network", action="store_true", help="let the conversion reach the network")
    made.add_argument("--seconds", type=number(float, 1, 1e6), default=900.0, help="most time of it (default 900)")
    made.add_argument("--memory-mb", type=number(int, 0, 1 << 24), default=0, help="most address space (no bound)")
    made.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    from oriel_inference.model import is_model_name

    source, name = args.source.absolute(), args.name or args.source.stem
    target = args.repository / name / str(args.version)
    if not source.exists():
        raise CommandFailed(f"{args.source} does not exist: pass the path of a model")
    if not is_model_name(name):
        raise CommandFailed(f"{name[:64]!r} cannot be a model's name: pass --name")
    if target.exists():
        raise CommandFailed(f"{target} is there already: pass another --version or --name")
    framework, file = _recognised(source, args.framework)
    with TemporaryDirectory(prefix="oriel-import-") as scratch:
        folder = Path(scratch, "models", name, target.name)
        folder.mkdir(parents=True)
        found: dict[str, Any] = {"model": name, "version": args.version, "framework": framework, "path": str(target)}
        found |= {"notes": [], "config": "", "outputs": []}
        if file:
            _place(source, folder / file)
        else:
            found |= _converted(args, framework, source, folder)
        if (own := target.parent / "config.pbtxt").exists():
            shutil.copy(own, folder.parent)
        elif found["config"]:
            (folder.parent / "config.pbtxt").write_text(found["config"])
        _progress(name, "loading it as a server would")
        _check(Path(scratch), found)
        if not file:
            _compare(Path(scratch), found, args.tolerance)
        print(json.dumps(found) if args.json else "\n".join(_lines(found)))
        if reason := disagreement(OutputError(**each["error"]) for each in found["outputs"]):
            raise CommandFailed(f"{reason}. Nothing was written: --inputs takes real rows, --tolerance allows more")
        # In one step, because a server may look at the repository.
        made, end = (folder, target) if target.parent.exists() else (folder.parent, target.parent)
        hidden = end.with_name(f".{name}.{os.getpid()}")
        try:
            shutil.copytree(made, hidden)
            hidden.rename(end)
        except BaseException as error:
            shutil.rmtree(hidden, ignore_errors=True)
            if isinstance(error, OSError):
                raise CommandFailed(f"{target} was not written: {str(error)[:200]}") from error
            raise
    _progress(name, f"{target} is written")
    return 0


def _progress(name: str, text: str) -> None:
    print(f"{name}: {printable(text)}", file=sys.stderr, flush=True)


def _recognised(source: Path, framework: str | None) -> tuple[str, str]:
    """Return the framework of a file, and its name in a version's folder; "" if it has to be converted."""
    suffix = source.suffix.lower()
    if framework:
        return framework, ""
    if source.is_dir():
        config = source / "config.json"
        text = config.read_text(errors="replace") if config.is_file() else ""
        classes = text.partition('"architectures"')[2].partition("]")[0]
        generates = "CausalLM" in classes or "LMHead" in classes
        for file, kind in {
            "saved_model.pb": ("tensorflow", "model.savedmodel"),
            "openvino_tokenizer.xml": ("language", "."),
            "config.json": ("language" if generates else "huggingface", ""),
        }.items():
            if (source / file).is_file():
                return kind
    elif suffix in PLACED:
        return PLACED[suffix]
    if found := next((name for name, each in CONVERTERS.items() if suffix in each.suffixes), ""):
        return found, ""
    raise CommandFailed(f"{source.name} does not say what it is: pass --framework, one of {', '.join(CONVERTERS)}")


def _place(source: Path, target: Path) -> None:
    """Copy a model that an engine reads as it is, with the weights beside it."""
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True)
        return
    shutil.copy(source, target)
    for each in source.parent.glob(f"{source.stem}.*"):
        if each.suffix in (".bin", ".pdiparams"):
            shutil.copy(each, target.with_suffix(each.suffix))
        elif source.suffix == ".onnx" and each.suffix in (".data", ".onnx_data"):
            shutil.copy(each, target.parent)  # its name is written in the model


def _trusted(args: argparse.Namespace, framework: str, source: Path) -> bool:
    """Return whether the file may execute code; ask where it could. Raises CommandFailed if it may not be opened."""
    from oriel_inference.backends.pytorch.form import form_of
    from oriel_inference.errors import LoadFailed

    known = CONVERTERS[framework]
    try:
        if framework == "pytorch":
            form_of(source)
    except LoadFailed as pickled:
        raise CommandFailed(pickled.reason) from pickled
    if source.is_dir() or source.suffix in set(known.suffixes).difference(known.runs_code):
        return bool(args.trust_file)
    warning = f"{source.name} may hold code, and opening it runs that code with your rights"
    _progress(args.name or source.stem, warning)
    if not args.trust_file:
        if not sys.stdin.isatty():
            raise CommandFailed(f"{warning}: pass --trust-file if you trust whoever made it")
        print("Open it? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise CommandFailed(f"{source.name} was not opened")
    return True


def _converted(args: argparse.Namespace, framework: str, source: Path, folder: Path) -> dict[str, Any]:
    """Convert a model in a process of its own. Returns what `conversion` says. Raises CommandFailed."""
    scratch = folder.parents[2]
    request = {"framework": framework, "source": str(source), "folder": str(folder), "out": str(scratch)}
    more = {"inputs": str(args.inputs.absolute()) if args.inputs else "", "memory_bytes": args.memory_mb << 20}
    more |= {"network": args.allow_network, "trusted": _trusted(args, framework, source)}
    start = f"import runpy; runpy.run_path({conversion.__file__!r}, run_name='__main__')"
    command = [args.python, "-c", start, json.dumps(request | more)]
    environment = selected(os.environ) | {"TF_CPP_MIN_LOG_LEVEL": "3"}
    with (scratch / "log").open("wb") as log:
        try:
            child = ChildProcess(command, environment=environment, stdout=subprocess.PIPE, stderr=log.fileno())
        except OSError as error:
            raise CommandFailed(f"{args.python} cannot be started: {error.strerror}") from error
    late = Timer(args.seconds, child.kill)
    shown = Thread(target=_show, args=(child.pipes[0], args.name or source.stem), daemon=True)
    late.start()
    shown.start()
    try:
        code = child.wait()
        why = f"its process ended with code {code}" if late.is_alive() else f"it took more than {args.seconds:.0f} s"
    finally:
        late.cancel()
        child.kill()  # also what it has started
        shown.join(1.0)  # what left its process group may keep the pipe
    last = (scratch / "log").read_text(errors="replace").strip().rpartition("\n")[2]
    answer = scratch / "result.json"
    found: dict[str, Any] = {"refused": f"{why}; {last}"}
    with suppress(OSError, ValueError):  # there is none, or a part of it on a full disk
        found = json.loads(answer.read_text())
    if "missing" in found:
        pip = f"{args.python} -m pip install {CONVERTERS[framework].packages}"
        found["refused"] = f"it needs the package {found['missing']}: {pip} (or pass --python of another environment)"
    if "refused" in found:
        raise CommandFailed(f"{source.name} was not converted: {printable(found['refused'])}")
    return found


def _show(lines: IO[bytes], name: str) -> None:
    with lines:
        for line in lines:
            _progress(name, line.decode("utf-8", "replace"))


def _check(scratch: Path, found: dict[str, Any]) -> None:
    """Load the folder as a server would, and note what differs. Raises CommandFailed if it would not serve."""
    from oriel_inference.repository_check import check_repositories

    (scratch / "cache").mkdir()
    verdict = asyncio.run(check_repositories([scratch / "models"], scratch / "cache", opens=True))[0]
    if not verdict.versions:
        raise CommandFailed("; ".join(verdict.notes))
    found |= {"notes": [*found["notes"], *verdict.notes], "runs_on": verdict.runs_on}


def _compare(scratch: Path, found: dict[str, Any], tolerance: Tolerance | None) -> None:
    """Run the converted model on the samples; add the comparison to `found`."""
    inputs, expected = (_arrays(scratch / f"{each}.npz") for each in ("inputs", "expected"))
    language = found["framework"] == "language"
    outputs, runs, milliseconds = (_generate if language else _execute)(scratch, found, inputs, expected)
    found |= {"rows": len(next(iter(inputs.values()))), "converted_ms": milliseconds}
    # The conversion of a large language model rounds its weights to 8 bits.
    errors = measure_all(outputs, runs, "INT8" if language else "", tolerance)
    for measured, mine, its in zip(errors, *runs[0], strict=True):
        shown = {"original": _values(its), "converted": _values(mine)}
        found["outputs"].append({"shape": list(mine.shape), **shown, "error": asdict(measured)})


def _generate(scratch: Path, found: Mapping[str, Any], inputs: _Arrays, expected: _Arrays) -> _Executed:
    """Let the converted model answer each prompt with the most likely tokens. Those that the original was not sure of,
    and all that follow them, are left out.
    """
    from oriel_inference.language.backend import ENGINE
    from oriel_inference.language.child import make_engine
    from oriel_inference.language.engine import Options, PromptRefused, Sampling
    from oriel_inference.repository.config import parameter, read_config
    from oriel_inference.stores.local import LocalStore

    version, sure = scratch / "models" / found["model"] / str(found["version"]), expected["tokens"] >= 0
    config = read_config(LocalStore(scratch / "models"), found["model"], "")
    engine = make_engine(parameter(config, ENGINE) or "openvino-genai")
    path = next(version.glob("model.gguf"), version / "openvino_model.xml")
    engine.load(str(path), Options(threads=len(os.sched_getaffinity(0))))
    sampling = Sampling(max_tokens=sure.shape[1], temperature=0.0, ignore_eos=True, logprobs=0)
    tokens: list[int] = []
    logprobs: list[float] = []
    began = time.perf_counter()
    for prompt in inputs["input_ids"].tolist():
        try:
            engine.add(0, prompt, sampling)
        except PromptRefused as refused:
            raise CommandFailed(f"the converted model refuses a prompt of the samples: {refused.text}") from refused
        finish = ""
        while not finish:
            engine.step()
            piece = engine.read(0)
            tokens += piece.ids
            logprobs += piece.logprobs
            finish = piece.finish
    taken_ms = (time.perf_counter() - began) * 1e3
    if len(tokens) != sure.size:
        raise CommandFailed("the prompts of the samples are too long for the converted model: pass shorter ones")
    mine = np.where(sure, np.reshape(tokens, sure.shape), -1)
    shares = np.where(sure, np.exp(np.reshape(logprobs, sure.shape)), 0.0).astype(np.float32)
    runs = [([mine, shares], [expected["tokens"], expected["probabilities"]])]
    return [("tokens", "INT64"), ("probabilities", "FP32")], runs, taken_ms


def _execute(scratch: Path, found: Mapping[str, Any], inputs: _Arrays, expected: _Arrays) -> _Executed:
    """Run the converted model on the samples, all at once and one alone."""
    from oriel_inference.artefacts.compare import take_turns
    from oriel_inference.backends import find_backend
    from oriel_inference.errors import InferenceError
    from oriel_inference.repository.load import LoadedVersion, Loading, load_model
    from oriel_inference.stores.local import LocalStore

    cores, store = len(os.sched_getaffinity(0)), LocalStore(scratch / "models")
    (loaded,) = load_model(Loading(store, found["model"], find_backend=find_backend, cores=cores, models=1)).values()
    assert isinstance(loaded, LoadedVersion)  # it was loaded before
    session = loaded.sessions[0]
    outputs = [(each.name, each.datatype) for each in session.outputs if each.name in expected]
    names, runs = [name for name, _ in outputs], []
    if not outputs:
        raise CommandFailed(f"the outputs are {', '.join(expected)}, and the converted model has none of them")
    try:
        for rows in (None, 1) if loaded.spec.batched else (None,):
            ours = session.run({name: each[:rows] for name, each in inputs.items()}, names)
            runs.append((ours, [_like(expected[name][:rows], mine) for name, mine in zip(names, ours, strict=True)]))
        times = take_turns({"": session}, inputs, runs=conversion.RUNS, seconds=10.0, failed=lambda *_: None)
    except InferenceError as error:
        raise CommandFailed(f"the converted model does not run on the samples: {error.message}") from error
    finally:
        loaded.close()
    return outputs, runs, times[""][0]


def _arrays(path: Path) -> dict[str, Array]:
    """Read arrays; texts as the inference server has them."""
    with np.load(path, allow_pickle=False) as file:
        found = {name: file[name] for name in file}
    texts = {
        name: np.char.encode(each, "utf-8").astype(object) for name, each in found.items() if each.dtype.kind == "U"
    }
    return found | texts


def _like(expected: Array, ours: Array) -> Array:
    """Return the original's output in the type, and if it has as many elements, in the shape of the converted one's."""
    expected = expected.astype(ours.dtype)
    return expected.reshape(ours.shape) if expected.size == ours.size else expected


def _values(array: Array) -> list[str]:
    """Return the first values as text."""
    first = array.reshape(-1)[:SHOWN].tolist()
    return [f"{x:.5g}" if isinstance(x, float) else printable(x.decode() if isinstance(x, bytes) else x) for x in first]


def _lines(found: Mapping[str, Any]) -> list[str]:
    """Return the lines for a person."""
    lines = [f"{found['path']}: {found['framework']}, runs on {found['runs_on']}"]
    lines += [f"note: {each}" for each in found["notes"]]
    if not found["outputs"]:
        return [*lines, "the file was put into place as it is: there is nothing to compare"]
    rows = []
    for each in found["outputs"]:
        error, shown = each["error"], [" ".join(each["original"]), " ".join(each["converted"])]
        differ = error["shapes"] or f"{error['outside']} of {error['elements']}"
        rows.append(
            [error["name"], each["shape"], *shown, f"{error['absolute']:.3g}", f"{error['relative']:.3g}", differ]
        )
    heading = ("OUTPUT", "SHAPE", "ORIGINAL", "CONVERTED", "LARGEST DIFFERENCE", "RELATIVE", "BEYOND TOLERANCE")
    times = f"the original takes {found['original_ms']:.3f} ms, the converted model {found['converted_ms']:.3f} ms"
    return [*lines, *columns(heading, rows), f"{found['rows']} rows: {times}"]
