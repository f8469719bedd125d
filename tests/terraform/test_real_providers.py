"""With the providers themselves, where somebody has them: ORIEL_TERRAFORM_PROVIDERS names a filesystem mirror of them.

As `terraform providers mirror` writes one: registry.terraform.io/hashicorp/aws/... Then the roots are validated by the
real providers, and the parts of aws/ that moto pretends are applied against it. Nobody has run this part yet.
"""

import os
from pathlib import Path

import pytest
from object_stores import Moto

from .harness import TerraformFailed
from .test_static import VERSIONS, Module

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


@pytest.fixture
def mirror():
    """Skips where the variable is not set."""
    folder = os.environ.get("ORIEL_TERRAFORM_PROVIDERS")
    if not folder:
        pytest.skip("ORIEL_TERRAFORM_PROVIDERS names no mirror of the real providers")
    return Path(folder).resolve()


def needs(mirror, tree, root):
    """Skips where the mirror lacks a provider of the root."""
    for document in Module(tree / root).files.values():
        for block in document.get("terraform", []):
            for name in block["required_providers"][0]:
                source = VERSIONS[name][0]
                if not (mirror / "registry.terraform.io" / source).is_dir():
                    pytest.skip(f"{mirror} has no {source}")


@pytest.mark.parametrize("root", ["aws", "gcp", "azure", "local"])
def test_the_real_providers_take_it(mirror, tree, workspace, root):
    needs(mirror, tree, root)
    assert workspace(root, mirror=mirror).validate() == []


def test_network_bucket_registry_and_identities_are_made_at_moto(mirror, tree, workspace, monkeypatch):
    needs(mirror, tree, "aws")
    server = Moto()
    server.start()
    try:
        for name, value in server.environment(server.port).items():
            monkeypatch.setenv(name, value)  # with AWS_ENDPOINT_URL, which the provider takes for all services

        def at_moto(folder):
            (folder / "aws" / "moto_override.tf").write_text('provider "aws" {\n  s3_use_path_style = true\n}\n')

        one = workspace("aws", mirror=mirror, edit=at_moto)
        given = {"region": "us-east-1", "deploy_platform": False, "cluster": {"deletion_protection": False}}
        state = one.apply(*PARTS, **given)
        made = set(state.resources())
        assert {"aws_vpc.this", "aws_s3_bucket.models", 'aws_iam_role.pod["inference"]'} <= made
        assert state.values("aws_s3_bucket_server_side_encryption_configuration.models")["rule"]
        assert one.destroy(**given).resources() == {}
    finally:
        server.kill()
        server.close()


def test_terraform_looks_for_them_in_the_mirror_and_nowhere_else(workspace, tmp_path):
    with pytest.raises(TerraformFailed) as refused:
        workspace("local", mirror=tmp_path / "nothing")
    assert f"cannot search {tmp_path}" in " ".join(str(refused.value).split())
