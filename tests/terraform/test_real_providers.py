"""With the providers themselves, where somebody has them: ORIEL_TERRAFORM_PROVIDERS names a filesystem mirror of them.

As `terraform providers mirror` writes one: registry.terraform.io/hashicorp/aws/... Then the roots are validated by the
real providers, with a stand-in for each that the mirror lacks, and the parts of aws/ that moto pretends are applied
against it, by any version of the AWS provider from 5.100 on. Nobody has run these two here: the pieces that need no
provider are tested below (the mirror's layouts, stand-ins beside it, what moto knows).
"""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import botocore.session
import pytest
from object_stores import ObjectServer, object_server
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from ..conftest import Run
from .harness import TerraformFailed, Workspace, without_version_six
from .module_files import VERSIONS, Module

# Network, bucket, registry and identities: what needs no cluster.
PARTS = (
    "aws_route.private",
    "aws_route_table_association.private",
    "aws_vpc_security_group_ingress_rule.endpoints",
    "aws_s3_bucket_policy.models",
    "aws_s3_bucket_lifecycle_configuration.models",
    "aws_s3_bucket_server_side_encryption_configuration.models",
    "aws_ecr_lifecycle_policy.untagged",
    "aws_iam_role_policy.pod",
    "aws_iam_role_policy_attachment.pod",
    "aws_iam_role_policy_attachment.node",
    "aws_iam_role_policy_attachment.cluster",
)
OWN = {"aws": "aws", "gcp": "google", "azure": "azurerm", "local": "kubernetes"}


@pytest.fixture
def mirror() -> Path:
    """Skips where the variable is not set."""
    folder = os.environ.get("ORIEL_TERRAFORM_PROVIDERS")
    if not folder:
        pytest.skip("ORIEL_TERRAFORM_PROVIDERS names no mirror of the real providers")
    return Path(folder).resolve()


@pytest.fixture
def moto(run: Run, monkeypatch: pytest.MonkeyPatch) -> Iterator[ObjectServer]:
    """The run's moto, which has AWS's managed policies, and the environment of its clients."""
    with object_server("s3", run) as server:
        for name, value in server.environment(server.port).items():
            monkeypatch.setenv(name, value)  # with AWS_ENDPOINT_URL, which the provider takes for all services
        yield server


def held(mirror: Path, name: str) -> list[Version]:
    """The versions of a provider in a mirror, packed (one archive each) or unpacked (one folder each)."""
    folder = mirror / "registry.terraform.io" / VERSIONS[name][0]
    found = set()
    for entry in folder.iterdir() if folder.is_dir() else ():
        number = r"([0-9]+\.[0-9]+\.[0-9]+)"
        archive = re.fullmatch(rf"terraform-provider-{name}_{number}_.+\.zip", entry.name)
        unpacked = re.fullmatch(number, entry.name) if entry.is_dir() else None
        found |= {Version(each[1]) for each in (archive, unpacked) if each}
    return sorted(found)


def taken(mirror: Path, root: str, tree: Path) -> set[str]:
    """The providers of a root of which the mirror holds a version that the root asks for."""
    asked = {
        name: required["version"]
        for document in Module(tree / root, "versions.tf").files.values()
        for block in document.get("terraform", [])
        for name, required in block["required_providers"][0].items()
    }
    fits = {name: SpecifierSet(said.replace("~> ", "~=").replace(" ", "")) for name, said in asked.items()}
    return {name for name, versions in fits.items() if any(each in versions for each in held(mirror, name))}


@pytest.mark.parametrize("root", OWN)
def test_the_real_providers_take_it(mirror: Path, tree: Path, workspace: Any, root: str) -> None:
    real = taken(mirror, root, tree)
    if OWN[root] not in real:
        pytest.skip(f"{mirror} has no {OWN[root]} {VERSIONS[OWN[root]][1]}")
    assert workspace(root, mirror=mirror, real=real).validate() == []


def test_network_bucket_registry_and_identities_are_made_at_moto(
    mirror: Path, tree: Path, workspace: Any, moto: ObjectServer
) -> None:
    versions = held(mirror, "aws")
    if not versions:
        pytest.skip(f"{mirror} has no hashicorp/aws")

    def at_moto(folder: Path) -> None:
        (folder / "aws" / "moto_override.tf").write_text('provider "aws" {\n  s3_use_path_style = true\n}\n')
        if "aws" not in taken(mirror, "aws", tree):
            without_version_six(folder)

    one: Workspace = workspace("aws", mirror=mirror, real={"aws"}, edit=at_moto)
    given: dict[str, Any] = {
        "region": "us-east-1",
        "deploy_platform": False,
        "cluster": {"deletion_protection": False},
    }
    state = one.apply(*PARTS, **given)
    made = set(state.resources())
    assert {"aws_vpc.this", "aws_s3_bucket.models", 'aws_iam_role.pod["inference"]'} <= made
    assert state.values("aws_s3_bucket_server_side_encryption_configuration.models")["rule"]
    # Reading everything before would ask for the data sources of the rest, such as EKS's add-ons, which moto has not.
    assert one.destroy(refresh=False, **given).resources() == {}


def test_terraform_looks_for_them_in_the_mirror_and_nowhere_else(workspace: Any, tmp_path: Path) -> None:
    with pytest.raises(TerraformFailed) as refused:
        workspace("local", mirror=tmp_path / "nothing", real={"helm", "kubernetes"})
    assert f"cannot search {tmp_path}" in " ".join(str(refused.value).split())


def test_what_the_mirror_lacks_has_a_stand_in(workspace: Any, tmp_path: Path) -> None:
    assert workspace("aws", mirror=tmp_path / "nothing", edit=without_version_six).validate() == []


@pytest.mark.parametrize("entry", ["terraform-provider-aws_6.25.0_linux_amd64.zip", "6.25.0/linux_amd64/"])
def test_both_layouts_of_a_mirror_are_read(tree: Path, tmp_path: Path, entry: str) -> None:
    folder = tmp_path / "registry.terraform.io/hashicorp/aws"
    (folder / entry).parent.mkdir(parents=True)
    (folder / entry).touch() if entry.endswith(".zip") else (folder / entry).mkdir()
    (folder / "index.json").touch()
    assert held(tmp_path, "aws") == [Version("6.25.0")]
    assert taken(tmp_path, "aws", tree) == {"aws"}, "and no helm, which it has not"
    assert held(tmp_path, "google") == []


def test_a_provider_that_the_roots_do_not_take_is_none(tree: Path, tmp_path: Path) -> None:
    (tmp_path / "registry.terraform.io/hashicorp/aws/5.100.0").mkdir(parents=True)
    assert held(tmp_path, "aws") == [Version("5.100.0")] and taken(tmp_path, "aws", tree) == set()


def test_moto_knows_what_the_parts_ask_it_for(moto: ObjectServer, workspace: Any) -> None:
    """Zones by the root's own filter, the managed policies that roles are given, and the services with endpoints."""
    session = botocore.session.get_session()
    ec2 = session.create_client("ec2", region_name="us-east-1")
    zones = ec2.describe_availability_zones(
        Filters=[
            {"Name": "state", "Values": ["available"]},
            {"Name": "opt-in-status", "Values": ["opt-in-not-required"]},
        ]
    )["AvailabilityZones"]
    names = [each["ZoneName"] for each in zones if each["ZoneId"] not in ("use1-az3",)]
    assert len(names) >= 3
    planned = workspace("aws").plan(region="us-east-1", deploy_platform=False)
    iam = session.create_client("iam", region_name="us-east-1")
    attached = {each["policy_arn"] for each in planned.resources("aws_iam_role_policy_attachment").values()}
    trust = json.dumps({"Version": "2012-10-17", "Statement": []})
    iam.create_role(RoleName="any", AssumeRolePolicyDocument=trust)
    for arn in attached:
        iam.attach_role_policy(RoleName="any", PolicyArn=arn)
    listed = iam.list_attached_role_policies(RoleName="any")["AttachedPolicies"]
    assert {each["PolicyArn"] for each in listed} == attached and len(attached) == 5
    services = [
        each["service_name"] for name, each in planned.resources("aws_vpc_endpoint").items() if "interface" in name
    ]
    offered = ec2.describe_vpc_endpoint_services(ServiceNames=services)["ServiceDetails"]
    assert {each["ServiceName"] for each in offered} == set(services) and len(services) == 8
    # Copied from AWS by moto's authors: each takes a policy.
    assert all(set(names[:3]) <= set(each["AvailabilityZones"]) for each in offered)
    assert all(each["VpcEndpointPolicySupported"] for each in offered)
