"""`oriel models ls|load|unload|stats`: the models of a running v2 server (ours, or any with the repository API).

`oriel models placement` asks a gateway which servers of its pools have which models, and to which they belong.
`oriel models quality` and `oriel models reference` read what an inference server knows about the rows that it sampled.
`oriel models compare` needs no server: it runs the variants of a model side by side. Nor do `oriel models check`,
which judges the folders of a repository, and `oriel models import`, which makes one.
"""

import argparse
import base64
import json
import os
import re
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from oriel_cli import state
from oriel_cli.admin import token_headers
from oriel_cli.errors import CommandFailed
from oriel_cli.models import check, compare, importing
from oriel_cli.table import columns, printable

URL = "http://127.0.0.1:8000"
ADMIN_URL = "http://127.0.0.1:8082"
METRICS_URL = "http://127.0.0.1:8002"
LOAD_TIMEOUT_S = 600.0
TIMEOUT_S = 10.0
_FILE = re.compile(r"(\d+/[^=]+)=(.+)\Z")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def action(name: str, text: str, url: str = URL, of: str = "server's HTTP") -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = actions.add_parser(name, help=text, description=f"{text}.")
        here = f"the {of} address (default: that of the running 'oriel up', else {url})"
        made.add_argument("--url", metavar="URL", help=here)
        made.add_argument("--json", action="store_true", help="print what the server says, as JSON")
        return made

    listed = action("ls", "list models, their versions, states and reasons")
    listed.add_argument("--ready", action="store_true", help="only those that serve")
    load = action("load", "load or reload a model (the server needs --model-control-mode explicit)")
    load.add_argument("name", metavar="NAME")
    load.add_argument("--config", type=Path, metavar="FILE", help="configuration to use instead: config.pbtxt or JSON")
    load.add_argument(
        "--file",
        dest="files",
        action="append",
        default=[],
        metavar="VERSION/PATH=LOCAL",
        help="send this local file as the model's VERSION/PATH (repeatable; needs --config)",
    )
    unload = action("unload", "take a model out of service; its requests in flight finish")
    unload.add_argument("name", metavar="NAME")
    unload.add_argument("--dependents", action="store_true", help="the models an ensemble uses as well")
    stats = action("stats", "requests, failures, mean times and batch sizes per model version")
    stats.add_argument("name", metavar="NAME", nargs="?", default="")
    placement = action(
        "placement",
        "which servers of a gateway's pools have which models, and to which they belong",
        ADMIN_URL,
        "gateway's admin",
    )
    placement.add_argument("name", metavar="POOL", nargs="?", default="", help="only this pool")
    quality = action(
        "quality",
        "drift, confidence and odd values of a model's sampled rows",
        METRICS_URL,
        "inference server's metrics",
    )
    reference = action(
        "reference",
        "write what a server's samples of a model are like as reference.json beside the version",
        METRICS_URL,
        "inference server's metrics",
    )
    reference.add_argument(
        "--model-repository", type=Path, metavar="DIR", help="where the model lies; without it, pass --json"
    )
    for each in (quality, reference):
        each.add_argument("name", metavar="NAME")
        each.add_argument("--version", default="", metavar="N", help="by default the newest that serves")
    check.add_action(actions)
    compare.add_action(actions)
    importing.add_action(actions)


def run(args: argparse.Namespace) -> int:
    if here := {"check": check.run, "compare": compare.run, "import": importing.run}.get(args.action):
        return here(args)
    actions = {"ls": _ls, "load": _load, "unload": _unload, "stats": _stats, "placement": _placement}
    actions |= {"quality": _quality, "reference": _reference}
    args.url = args.url or _running(args.action)
    timeout = httpx.Timeout(LOAD_TIMEOUT_S if args.action in ("load", "unload") else TIMEOUT_S, connect=5.0)
    headers = dict(token_headers() if args.action == "placement" else ())
    try:
        # No proxy from the environment: the address given is the one that is meant.
        with httpx.Client(base_url=args.url, timeout=timeout, trust_env=False, headers=headers) as client:
            actions[args.action](client, args)
    except httpx.ConnectError as refused:
        raise CommandFailed(f"nothing answers at {args.url}: is the server running there? Pass --url") from refused
    except httpx.TimeoutException as late:
        raise CommandFailed(f"{args.url} did not answer in time") from late
    except (httpx.InvalidURL, httpx.UnsupportedProtocol) as wrong:
        raise CommandFailed(f"{args.url!r} is not a URL such as {URL}") from wrong
    except httpx.TransportError as broken:
        raise CommandFailed(f"{args.url} does not answer as an HTTP server: {broken}") from broken
    return 0


def _running(action: str) -> str:
    """Return where an action finds the running `oriel up`, or a server with the usual ports if there is not one."""
    try:
        instance = state.pick(None)
    except CommandFailed:
        instance = None
    if action == "placement":
        return f"http://127.0.0.1:{instance.admin_port}" if instance is not None else ADMIN_URL
    if action in ("quality", "reference"):
        return f"http://{instance.metrics}" if instance is not None and instance.metrics else METRICS_URL
    return f"http://{instance.inference}" if instance is not None and instance.inference else URL


def _ls(client: httpx.Client, args: argparse.Namespace) -> None:
    found = _ask(client, "POST", "/v2/repository/index", {"ready": True} if args.ready else {})
    models = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    if args.json:
        print(json.dumps(models))
        return
    if not models:
        print("no models")
        return
    keys = ("name", "version", "state")
    rows = [[*(printable(each.get(key)) or "-" for key in keys), printable(each.get("reason"))] for each in models]
    print("\n".join(columns(("MODEL", "VERSION", "STATE", "REASON"), rows)))


def _load(client: httpx.Client, args: argparse.Namespace) -> None:
    parameters: dict[str, str] = {}
    if args.config is not None:
        parameters["config"] = _config(args.config)
    for text in args.files:
        match = _FILE.match(text)
        if match is None:
            raise CommandFailed(
                f"--file {text[:100]!r}: the form is VERSION/PATH=LOCAL, such as 1/model.onnx=./model.onnx"
            )
        parameters[f"file:{match[1]}"] = base64.b64encode(_read(Path(match[2]))).decode("ascii")
    if args.files and args.config is None:
        raise CommandFailed("--file needs --config: the server takes files only together with a configuration")
    _ask(client, "POST", f"/v2/repository/models/{quote(args.name, safe='')}/load", {"parameters": parameters})
    _done(args, "loaded")


def _unload(client: httpx.Client, args: argparse.Namespace) -> None:
    body = {"parameters": {"unload_dependents": True}} if args.dependents else {}
    _ask(client, "POST", f"/v2/repository/models/{quote(args.name, safe='')}/unload", body)
    _done(args, "unloaded")


def _placement(client: httpx.Client, args: argparse.Namespace) -> None:
    found = _ask(client, "GET", "/placement")
    pools = {name: pool for name, pool in found.items() if args.name in ("", name)} if isinstance(found, dict) else {}
    if args.json:
        print(json.dumps(pools))
        return
    if not pools:
        print("no pool with place_models = true" if not args.name else f"pool {args.name} does not place models")
    for name, pool in pools.items():
        print(f"{printable(name)}:")
        heading = ("MODEL", "IN USE", "WORK", "BYTES", "LOADED ON", "BELONGS ON")
        rows = [
            [
                printable(each["name"]),
                "yes" if each["in_use"] else "no",
                f"{each['work']:.2f}",
                each["bytes"] or "-",
                printable(" ".join(each["loaded"])) or "-",
                printable(" ".join(each["servers"])) or "-",
            ]
            for each in pool["models"]
        ]
        print("\n".join(columns(heading, rows, right=range(2, 4))))


def _stats(client: httpx.Client, args: argparse.Namespace) -> None:
    path = f"/v2/models/{quote(args.name, safe='')}/stats" if args.name else "/v2/models/stats"
    found = _ask(client, "GET", path)
    stats = found.get("model_stats") if isinstance(found, dict) else None
    models = [each for each in stats if isinstance(each, dict)] if isinstance(stats, list) else []
    if args.json:
        print(json.dumps(models))
        return
    heading = ("MODEL", "VERSION", "REQUESTS", "FAILED", "QUEUE MS", "COMPUTE MS", "BATCH")
    print("\n".join(columns(heading, [_stats_row(each) for each in models], right=range(2, 7))))


def _quality(client: httpx.Client, args: argparse.Namespace) -> None:
    found = _ask(client, "GET", _quality_path(args))
    if args.json:
        print(json.dumps(found))
        return
    lacks = "" if found["reference"] else ", no reference to compare them with"
    counted = found["rows"]["counted"]
    print(f"{printable(found['name'])} version {printable(found['version'])}: {counted} rows were sampled{lacks}")
    if not found["tensors"]:
        print("there are no samples yet")
        return
    shares = ("NAN", "INFINITE", "OUTSIDE")
    heading = ("TENSOR", "ROWS", "PSI", "NOISE", *shares, "MEAN", "DEVIATION", "CONFIDENCE", "ENTROPY")
    keys = ("psi", "noise", "nan", "infinite", "out_of_range", "mean", "deviation", "confidence", "entropy")
    lines = []
    for name, sampled in found["tensors"].items():
        values = {**sampled, **(sampled["odd"] or {})}
        shown = ["-" if values.get(key) is None else f"{values[key]:.3g}" for key in keys]
        lines.append([printable(name), sampled["rows"], *shown])
    print("\n".join(columns(heading, lines, right=range(1, len(heading)))))
    for name, sampled in found["tensors"].items():
        if sampled["classes"]:
            common = ", ".join(f"{printable(index)} {share:.1%}" for index, share in sampled["classes"].items())
            print(f"{printable(name)} classes: {common}")


def _reference(client: httpx.Client, args: argparse.Namespace) -> None:
    if args.model_repository is None and not args.json:
        raise CommandFailed("pass --model-repository DIR to write the file there, or --json to print it")
    found = _ask(client, "GET", _quality_path(args, "/reference"))
    text = json.dumps(found, indent=2) + "\n"
    if args.model_repository is None:
        print(text, end="")
        return
    folder = args.model_repository / args.name / str(int(found["version"]))
    if not folder.is_dir():
        raise CommandFailed(f"{folder} is not there: is {args.model_repository} the server's model repository?")
    path = folder / "reference.json"
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text)
        beside.replace(path)
    except OSError as refused:
        raise CommandFailed(f"{path} cannot be written: {refused.strerror}") from refused
    if args.json:
        print(json.dumps({"path": str(path), "tensors": sorted(found["tensors"])}))
        return
    print(f"{path} is written: {', '.join(map(printable, sorted(found['tensors'])))}")


def _quality_path(args: argparse.Namespace, end: str = "") -> str:
    version = f"?version={quote(args.version, safe='')}" if args.version else ""
    return f"/quality/{quote(args.name, safe='')}{end}{version}"


def _stats_row(model: dict[str, Any]) -> list[object]:
    """Return the means per successful request. The mean batch is computed from the sizes of batches if the server
    reports them, because some servers count the executions of requests that failed or left, but not their rows.
    """
    inference = model.get("inference_stats") or {}

    def read(name: str, key: str) -> int:
        # Some servers write 64-bit numbers as text, and leave zeros out.
        return int((inference.get(name) or {}).get(key) or 0)

    def mean_ms(*names: str) -> str:
        times = [read(name, "ns") / count / 1e6 for name in names if (count := read(name, "count"))]
        return f"{sum(times):.3f}" if times else "-"

    executions, rows = int(model.get("execution_count") or 0), int(model.get("inference_count") or 0)
    sizes = [
        (int(each.get("batch_size") or 0), int((each.get("compute_infer") or {}).get("count") or 0))
        for each in model.get("batch_stats") or ()
    ]
    if ran := sum(count for _, count in sizes):
        executions, rows = ran, sum(size * count for size, count in sizes)
    return [
        printable(model.get("name")),
        printable(model.get("version")),
        read("success", "count"),
        read("fail", "count"),
        mean_ms("queue"),
        mean_ms("compute_input", "compute_infer", "compute_output"),
        f"{rows / executions:.2f}" if executions else "-",
    ]


def _ask(client: httpx.Client, method: str, path: str, body: Any = None) -> Any:
    """The decoded answer, None for an empty one. Raises CommandFailed with the server's own sentence."""
    answer = client.request(method, path, json=body)
    understood, document = answer.is_success, None
    try:
        document = answer.json() if answer.content else None
    except ValueError:
        understood = False
    if understood:
        return document
    refusal = document.get("error") if isinstance(document, dict) else None
    if not isinstance(refusal, str) or refusal == "Not Found":
        raise CommandFailed(
            f"{client.base_url} answers {answer.status_code} to {path}: is this a v2 server's HTTP port?"
        )
    if "explicit model load" in refusal and "--model-control-mode explicit" not in refusal:
        refusal += " (start the server with --model-control-mode explicit)"
    raise CommandFailed(printable(refusal))


def _done(args: argparse.Namespace, word: str) -> None:
    print(json.dumps({"name": args.name, "state": word}) if args.json else f"{args.name} is {word}")


def _config(path: Path) -> str:
    from oriel_wire.errors import BadMessage
    from oriel_wire.v2.metadata import config_json, parse_config_json, parse_config_text

    try:
        text = _read(path).decode()
        return config_json(parse_config_json(text) if text.lstrip().startswith("{") else parse_config_text(text))
    except UnicodeDecodeError as error:
        raise CommandFailed(f"{path} is not text") from error
    except BadMessage as bad:
        raise CommandFailed(f"{path}: {bad.message}") from bad


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as refused:
        raise CommandFailed(f"{path} cannot be read: {refused.strerror}") from refused
