"""What Python alone can say of the .tf files: they parse, keep the rules of the house, and the clouds are alike."""

import re
import subprocess
from pathlib import Path

import hcl2
import pytest

from .module_files import VERSIONS, Module

CLOUDS = ("aws", "gcp", "azure")
ROOTS = (*CLOUDS, "local")
MODULES = (*ROOTS, "modules/platform")


@pytest.fixture(scope="module")
def modules(tree):
    return {name: Module(tree / name) for name in MODULES}


@pytest.mark.parametrize("name", MODULES)
def test_every_file_parses_and_the_usual_ones_are_there(name, modules):
    assert {"main.tf", "variables.tf", "outputs.tf", "versions.tf"} <= set(modules[name].files)


@pytest.mark.parametrize("name", MODULES)
def test_versions_are_those_that_are_promised(name, modules):
    (block,) = [each for document in modules[name].files.values() for each in document.get("terraform", [])]
    assert block["required_version"] == ">= 1.11"
    (required,) = block["required_providers"]
    for provider, said in required.items():
        assert (said["source"], said["version"]) == VERSIONS[provider]
    used = {each.split("_")[0] for kind in ("resource", "data") for each in modules[name].blocks(kind)} - {"terraform"}
    assert used <= set(required), "a provider without a version"


@pytest.mark.parametrize("root", ROOTS)
def test_the_locked_versions_are_those_of_the_tests(root, tree):
    """Their checksums are those of a platform, and come from the registry: `terraform init` adds them."""
    text = (tree / root / ".terraform.lock.hcl").read_text()
    locked = re.findall(r'"registry.terraform.io/hashicorp/(\w+)" \{\n  version     = "([\d.]+)"', text)
    required = re.findall(r'"hashicorp/(\w+)"', (tree / root / "versions.tf").read_text())
    assert sorted(required) == [name for name, _ in locked]
    for name, version in locked:
        assert (Path(__file__).parent / "schemas" / f"{name}-{version}.json").is_file(), name


@pytest.mark.parametrize("name", MODULES)
def test_variables_are_few_described_typed_and_validated(name, modules):
    variables = modules[name].blocks("variable")
    assert len(variables) <= 15
    for variable, body in variables.items():
        assert len(body.get("description", "")) > 10, variable
        assert "type" in body, variable
        # true and false need no more than that null is refused.
        assert "validation" in body or body["type"] == "bool", variable


@pytest.mark.parametrize("name", MODULES)
def test_outputs_are_described(name, modules):
    for output, body in modules[name].blocks("output").items():
        assert body.get("description"), output


def test_roots_share_files_by_links_into_modules(tree):
    """Copies of one root with modules/ and deploy/chart keep them; a checkout of texts in their place fails here."""
    for file in (tree / "modules/roots").glob("*.tf"):
        for root in ROOTS if file.name in ("names.tf", "outputs.tf") else CLOUDS:
            link = tree / root / file.name
            assert link.is_symlink(), f"{link} is no link: see terraform/README.md on core.symlinks"
            assert str(link.readlink()) == f"../modules/roots/{file.name}"


def test_the_clouds_take_the_same_variables(modules):
    for cloud in CLOUDS:
        files = [name for name, document in modules[cloud].files.items() if "variable" in document]
        assert files == ["names.tf", "variables.tf"], f"{cloud}: a variable of its own"


# A cloud's own, and what nobody else may read.
WITHOUT_OUTPUT = {"store_networks", "storage", "secrets"}


@pytest.mark.parametrize("root", ROOTS)
def test_outputs_are_what_the_platform_takes(root, modules):
    taken = modules["modules/platform"].blocks("variable")["infrastructure"]["type"]
    names = [each for each in _keys(taken) if each not in WITHOUT_OUTPUT]
    assert len(names) == 14
    outputs = modules[root].blocks("output")
    assert list(outputs) == names
    for name, body in outputs.items():
        assert body["value"] == f"${{local.infrastructure.{name}}}"


def _keys(object_type: str) -> list[str]:
    """The names of the outermost object."""
    body = object_type[object_type.index("({") + 2 :]
    names: list[str] = []
    depth = 0
    for found in re.finditer(r"[({[]|[)}\]]|(\w+) =", body):
        if found[1]:
            names += [found[1]] if depth == 0 else []
        else:
            depth += 1 if found[0] in "({[" else -1
    return names


@pytest.mark.parametrize("root", ROOTS)
def test_one_platform_of_ones_own_and_no_module_of_others(root, modules):
    used = modules[root].blocks("module")
    assert [body["source"] for body in used.values()] == ["../modules/platform"]
    assert re.match(
        r"\$\{(local\.infrastructure\}$|merge\(local\.infrastructure, )", used["platform"]["infrastructure"]
    )


@pytest.mark.parametrize("name", MODULES)
def test_releases_are_pinned_and_no_object_is_planned_against_a_cluster(name, modules):
    for address, body in modules[name].blocks("resource").items():
        assert not address.startswith("kubernetes_"), "it dials the cluster while planning"
        if address.startswith("helm_release.") and "repository" in body:
            assert body.get("version"), address


@pytest.mark.parametrize("root", CLOUDS)
def test_a_remote_state_is_shown(root, tree):
    text = (tree / root / "backend.tf.example").read_text()
    assert hcl2.loads(text)["terraform"]
    assert not list((tree / root).glob("*.tfstate*"))


def test_the_files_are_formatted(tree, terraform):
    done = subprocess.run(
        [terraform, "fmt", "-check", "-recursive", "-diff", str(tree)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
