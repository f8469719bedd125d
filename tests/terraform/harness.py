"""The real terraform in a copy of the tree, with the stand-in for every provider.

    with Workspace("aws", tmp_path) as workspace:
        workspace.init()
        plan = workspace.plan(gpu_enabled=False)

`tree` is where terraform/ is read from.
"""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from .helm import CHART, KEYS, rendered
from .standin import rules, schema
from .standin.calls import Call
from .standin.provider import Answer
from .standin.server import Servers

HERE = Path(__file__).parent
# Last part of a release's chart -> its folder.
OURS = {"chart": CHART, "namespace": HERE.parents[1] / "terraform/modules/platform/namespace"}
PROVIDERS = ("aws", "google", "azurerm", "kubernetes", "helm")
# Far more than any command here takes: a hanging one becomes a failed test, not a hanging suite.
COMMAND_S = 120


@dataclass(frozen=True, slots=True)
class Diagnostic:
    severity: str
    summary: str
    detail: str = ""
    address: str = ""
    file: str = ""
    line: int = 0

    def __str__(self) -> str:
        where = " ".join(filter(None, (self.address, f"{self.file}:{self.line}" if self.file else "")))
        return f"{self.severity}: {self.summary} [{where}] {self.detail}"


class TerraformFailed(Exception):
    """A command failed. diagnostics: the errors that Terraform reported. output: all that it printed."""

    def __init__(self, command: str, diagnostics: list[Diagnostic], output: str) -> None:
        super().__init__(f"terraform {command}\n" + ("\n".join(map(str, diagnostics)) or output[-4000:]))
        self.diagnostics = diagnostics
        self.output = output


@dataclass(slots=True)
class Plan:
    """The plan of a command. changes: whether anything would be changed."""

    changes: bool
    diagnostics: list[Diagnostic]
    _planned: list[dict[str, Any]]  # as it was printed
    _show: Callable[[], dict[str, Any]]
    _document: dict[str, Any] | None = None

    @property
    def document(self) -> dict[str, Any]:
        """Return the document of `terraform show -json`."""
        if self._document is None:
            self._document = self._show()
        return self._document

    def actions(self) -> dict[str, str]:
        """Return address -> create, update, delete, replace, or read (a data source), for all that changes."""
        return {each["resource"]["addr"]: each["action"] for each in self._planned}

    def values(self, address: str) -> dict[str, Any]:
        """Return the planned values of a resource, without those that are not known yet. Raises KeyError."""
        for resource in _resources(self.document["planned_values"]["root_module"]):
            if resource["address"] == address:
                return resource["values"]
        raise KeyError(address)

    def resources(self, type_name: str | None = None) -> dict[str, dict[str, Any]]:
        """Return address -> planned values, of one type or of all types."""
        found = _resources(self.document["planned_values"]["root_module"])
        return {each["address"]: each["values"] for each in found if type_name in (None, each["type"])}

    def outputs(self) -> dict[str, Any]:
        """Return name -> value; None for what is not known yet."""
        return {name: each.get("value") for name, each in self.document["planned_values"].get("outputs", {}).items()}

    def releases(self) -> dict[str, list[dict[str, Any]]]:
        """Return address -> objects, for each release of a chart of ours.

        Raises ValueError for a release whose values are not known yet: apply the infrastructure first.
        """
        found = {}
        for address, values in self.resources("helm_release").items():
            if None in (values.get("values", [None]) or []):  # left out, or null inside the list: not known
                raise ValueError(f"{address}: its values are not known when planning")
            if objects := _objects(values):
                found[address] = objects
        return found

    def objects(self) -> list[dict[str, Any]]:
        """Return every object of all releases of our charts."""
        return [each for objects in self.releases().values() for each in objects]


@dataclass(slots=True)
class State:
    document: dict[str, Any]

    @property
    def outputs(self) -> dict[str, Any]:
        return {name: each["value"] for name, each in self.document.get("outputs", {}).items()}

    def resources(self, type_name: str | None = None) -> dict[str, dict[str, Any]]:
        found = {}
        for resource in self.document.get("resources", []):
            if resource["mode"] != "managed" or type_name not in (None, resource["type"]):
                continue
            for instance in resource["instances"]:
                index = f"[{json.dumps(instance['index_key'])}]" if "index_key" in instance else ""
                name = f"{resource['type']}.{resource['name']}{index}"
                found[".".join(filter(None, (resource.get("module"), name)))] = instance["attributes"]
        return found

    def dependencies(self) -> dict[str, set[str]]:
        """Return resource -> all that it was created after, directly or not, as Terraform recorded it. Keys of
        instances are left out.
        """
        found: dict[str, set[str]] = {}
        for resource in self.document.get("resources", []):
            if resource["mode"] == "managed":
                name = ".".join(filter(None, (resource.get("module"), resource["type"], resource["name"])))
                deps = {each for instance in resource["instances"] for each in instance.get("dependencies", [])}
                found.setdefault(name_of(name), set()).update(map(name_of, deps))
        return found

    def values(self, address: str) -> dict[str, Any]:
        return self.resources()[address]

    def objects(self) -> list[dict[str, Any]]:
        """Return every object of all releases of our charts."""
        return [each for values in self.resources("helm_release").values() for each in _objects(values)]


@dataclass(slots=True)
class Workspace:
    """A copy of the tree in `folder`; commands run in its root.

    root: "aws", "modules/platform".
    rules: type -> rule, which take precedence over those of tests/terraform/rules.
    """

    root: str
    folder: Path
    rules: Mapping[str, dict[str, Any]] | None = None
    tree: Path = HERE.parents[1] / "terraform"
    calls: list[Call] = field(default_factory=list)  # of the last command
    history: list[Call] = field(default_factory=list)  # of all commands
    path: Path = field(init=False)  # where the commands run
    _servers: Servers = field(init=False)
    _count: int = 0

    def __post_init__(self) -> None:
        shutil.copytree(self.tree, self.folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".terraform*"))
        # The modules read the chart, which lies beside the tree.
        shutil.copytree(self.tree.parent / "deploy", self.folder.parent / "deploy", dirs_exist_ok=True)
        self.path = self.folder / self.root
        self._servers = Servers(providers(self.folder, self.rules))

    def __enter__(self) -> "Workspace":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        self._servers.close()

    def init(self) -> None:
        self._run("init", "-input=false", "-backend=false", "-no-color", printed_json=False)

    def validate(self) -> list[Diagnostic]:
        """Return errors and warnings; empty if there are none."""
        done = self._process("validate", "-json")
        return [_diagnostic(each) for each in json.loads(done.stdout)["diagnostics"]]

    def plan(self, *replaced: str, **variables: Any) -> Plan:
        """Return the plan. Raises TerraformFailed. replaced: addresses that are to be created anew (-replace)."""
        self._count += 1
        file = f"plan-{self._count}"
        code, lines = self._run(
            "plan",
            "-json",
            "-input=false",
            "-detailed-exitcode",
            f"-out={file}",
            *[f"-replace={each}" for each in replaced],
            *self._given(variables),
        )
        planned = [each["change"] for each in lines if each.get("type") == "planned_change"]
        return Plan(code == 2, _diagnostics(lines), planned, lambda: self._shown(file))

    def apply(self, *targets: str, **variables: Any) -> State:
        """Apply the tree and return its state. Raises TerraformFailed. targets: only these and what they need."""
        only = [f"-target={each}" for each in targets]
        self._run("apply", "-json", "-input=false", "-auto-approve", *only, *self._given(variables))
        return self.state()

    def destroy(self, *, refresh: bool = True, **variables: Any) -> State:
        """Destroy everything and return the state that is left. Raises TerraformFailed. refresh: read everything
        before, including data sources.
        """
        only = [] if refresh else ["-refresh=false"]
        self._run("destroy", "-json", "-input=false", "-auto-approve", *only, *self._given(variables))
        return self.state()

    def test(self) -> list[dict[str, Any]]:
        """Run `terraform test`; returns one entry per run, with name, status and file. Raises TerraformFailed."""
        _, lines = self._run("test", "-json")
        return [
            each["test_run"]
            for each in lines
            if each.get("type") == "test_run" and each["test_run"].get("progress", "complete") == "complete"
        ]

    def state(self) -> State:
        file = self.path / "terraform.tfstate"
        return State(json.loads(file.read_text()) if file.exists() else {})

    def fail_at(self, type_name: str, nth: int = 1, *, action: str = "create", half_done: bool = False) -> None:
        """Let the nth such call of the next apply or destroy fail. half_done: the resource exists all the same."""
        self._servers.faults.add(type_name, nth, action=action, half_done=half_done)

    @contextmanager
    def reading(self, answers: Mapping[str, Answer]) -> Iterator[None]:
        """Change the answers of data sources for the duration of the `with`: to other attributes, or to an error."""
        self._servers.answers.update(answers)
        try:
            yield
        finally:
            for name in answers:
                del self._servers.answers[name]

    def _given(self, variables: Mapping[str, Any]) -> list[str]:
        file = self.path / "given.json"
        file.write_text(json.dumps(variables))
        return [f"-var-file={file.name}"]

    def _shown(self, file: str) -> dict[str, Any]:
        done = self._process("show", "-json", file)
        return json.loads(done.stdout)

    def _run(self, command: str, *arguments: str, printed_json: bool = True) -> tuple[int, Any]:
        self._servers.log.taken()
        try:
            done = self._process(command, *arguments)
        finally:
            self.calls = self._servers.log.taken()
            self.history += self.calls
            self._servers.faults.clear()
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")] if printed_json else []
        _address(self.calls, lines)
        if done.returncode not in ((0, 2) if command == "plan" else (0,)):
            errors = [each for each in _diagnostics(lines) if each.severity == "error"]
            raise TerraformFailed(command, errors, done.stdout + done.stderr)
        return done.returncode, lines if printed_json else done.stdout

    def _process(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        kept = {key: each for key, each in os.environ.items() if not key.startswith("TF_")}
        own = {"CHECKPOINT_DISABLE": "1", "TF_IN_AUTOMATION": "1", "TF_CLI_CONFIG_FILE": os.devnull}
        own |= {"GOGC": "400", "GOMAXPROCS": "1"}  # a third less CPU for these short runs
        return subprocess.run(
            ["terraform", *arguments],
            cwd=self.path,
            env=kept | own | self._servers.environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            stdin=subprocess.DEVNULL,
        )


def name_of(address: str) -> str:
    """Return the address without the keys of instances: module.platform.helm_release.namespace, aws_subnet.private."""
    return re.sub(r"\[[^]]*\]", "", address)


def used_types(folder: Path) -> set[str]:
    """Return the types that the files name: aws_vpc, data.aws_region."""
    found = set()
    for file in folder.rglob("*.tf"):
        for kind, name in re.findall(r'^\s*(resource|data|ephemeral)\s+"([a-z0-9_]+)"', file.read_text(), re.M):
            found.add(f"data.{name}" if kind == "data" else name)
    return found


def providers(folder: Path, more: Mapping[str, dict[str, Any]] | None = None) -> list[schema.Provider]:
    """Return all providers, each with the types that the files use; more would be sent at every command."""
    used = used_types(folder)
    extra = json.dumps(dict(more)) if more else ""
    return [_provider(name, frozenset(used), extra) for name in PROVIDERS]


@cache
def _provider(name: str, used: frozenset[str], more: str) -> schema.Provider:
    (schemas,) = (HERE / "schemas").glob(f"{name}-*.json")
    file = HERE / "rules" / f"{name}.toml"
    known = rules.load(file) if file.exists() else {}
    return schema.load(schemas, known | (rules.read(json.loads(more)) if more else {}), used)


def _resources(module: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield from module.get("resources", [])
    for child in module.get("child_modules", []):
        yield from _resources(child)


def _objects(release: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what a release installs, if its chart is ours: rendered by helm, with keys that are no secrets."""
    given: dict[str, Any] = {}
    for text in release["values"] or []:
        given |= json.loads(text) if text.startswith("{") else {}
    chart = OURS.get(Path(release["chart"]).name)
    return rendered({"keys": KEYS} | given, chart=chart, namespace=release["namespace"]) if chart else []


def _diagnostics(lines: list[dict[str, Any]]) -> list[Diagnostic]:
    return [_diagnostic(each["diagnostic"]) for each in lines if each.get("type") == "diagnostic"]


def _diagnostic(said: Mapping[str, Any]) -> Diagnostic:
    at = said.get("range") or {}
    return Diagnostic(
        said["severity"],
        said["summary"],
        said.get("detail", ""),
        said.get("address", ""),
        at.get("filename", ""),
        at.get("start", {}).get("line", 0),
    )


def _address(calls: list[Call], lines: list[dict[str, Any]]) -> None:
    """Find the address of a call: the protocol does not name it, but Terraform prints each address with its id."""
    named = {}
    for line in lines:
        hook = line.get("hook", {})
        if line.get("type") in ("apply_start", "apply_complete") and hook.get("id_value"):
            named[hook["resource"]["resource_type"], hook["id_value"]] = hook["resource"]["addr"]
    for call in calls:
        if call.rpc == "ApplyResourceChange" and call.id is not None:
            call.address = named.get((call.type, call.id))
