"""terraform/aws after its first apply: what a further plan changes or refuses, and in which order all is destroyed."""

import json
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from .clouds import applied_root, given
from .harness import TerraformFailed
from .iam import statements

GIVEN = given("aws")


@pytest.fixture(scope="module")
def applied(terraform, tree, tmp_path_factory) -> Iterator[SimpleNamespace]:
    with applied_root("aws", tmp_path_factory.mktemp("aws"), tree) as found:
        yield found


# A region that lists its first zone no longer, and a type that is offered in one of the others only.
ZONE_AWAY = {
    "data.aws_availability_zones": {"names": ["eu-central-1b", "eu-central-1c", "eu-central-1d"]},
    "data.aws_ec2_instance_type_offerings": {"locations": ["eu-central-1c"]},
    "data.aws_vpc_endpoint_service": {"availability_zones": ["eu-central-1c"]},
}


def test_a_zone_that_is_briefly_away_moves_nothing(applied):
    with applied.workspace.reading(ZONE_AWAY):
        assert applied.workspace.plan(**GIVEN).actions() == {}
    with applied.workspace.reading({"data.aws_availability_zones": {"names": ["eu-central-1b"]}}):
        assert applied.workspace.plan(**GIVEN).actions() == {}


def test_what_cannot_change_in_place_is_refused_while_protected(applied):
    with pytest.raises(TerraformFailed) as refused:
        applied.workspace.plan(**GIVEN | {"name": "other", "network_cidr": "10.50.0.0/16", "region": "eu-west-1"})
    (error,) = refused.value.diagnostics
    for said in (
        'name is "oriel" and would become "other"',
        'network_cidr is "10.42.0.0/16" and would become "10.50.0.0/16"',
        'region is "eu-central-1" and would become "eu-west-1"',
        "cluster.deletion_protection",
    ):
        assert said in error.detail
    with applied.workspace.reading(ZONE_AWAY), pytest.raises(TerraformFailed) as refused:
        applied.workspace.plan('terraform_data.zones["eu-central-1"]', **GIVEN)
    zones = 'zones is "eu-central-1a, eu-central-1b, eu-central-1c" and would become "eu-central-1b, '
    (error,) = refused.value.diagnostics
    assert zones in error.detail
    at_once = {"cluster": {"deletion_protection": False}, "network_cidr": "10.50.0.0/16"}
    with pytest.raises(TerraformFailed, match=r"by itself"):  # EKS would still keep the old cluster
        applied.workspace.plan(**GIVEN | at_once)
    account = {"account_id": "210987654321", "arn": "arn:aws:iam::210987654321:user/deployer"}
    with applied.workspace.reading({"data.aws_caller_identity": account}), pytest.raises(TerraformFailed) as refused:
        applied.workspace.plan(**GIVEN)
    assert 'account is "123456789012" and would become "210987654321"' in str(refused.value)


def test_another_floor_is_another_pool_and_touches_nothing_else(applied):
    actions = applied.workspace.plan(**GIVEN, scale_to_zero=False).actions()
    infrastructure = {each for each in actions if not each.startswith("module.platform[0].")}
    assert infrastructure == {
        *(f'aws_eks_node_group.this["{pool}"]' for pool in ("cpu", "gpu")),
        *(f'aws_autoscaling_group_tag.local_storage["{pool}"]' for pool in ("cpu", "gpu")),
    }
    assert {actions[each] for each in infrastructure} == {"replace"}


def test_what_the_platform_is_told_reaches_it_beside_the_clouds_own(applied):
    plan = applied.workspace.plan(
        **GIVEN,
        image_registry="registry.example.com/oriel",
        platform={
            "namespace": "serving",
            "images": {"pull_secret": "pull"},
            "gateway": {"service_annotations": {"example.com/note": "ours"}, "tls_secret": "another"},
            "charts": {"cluster_autoscaler": {"version": "9.58.0"}, "metrics_server": {"version": "3.12.2"}},
        },
    )
    assert plan.values("helm_release.autoscaler[0]")["version"] == "9.58.0"
    assert plan.values('module.platform[0].helm_release.charts["metrics-server"]')["version"] == "3.12.2"
    found = plan.objects()
    (service,) = [each for each in found if (each["kind"], each["metadata"]["name"]) == ("Service", "gateway")]
    annotations = service["metadata"]["annotations"]
    assert annotations["example.com/note"] == "ours"
    assert annotations["service.beta.kubernetes.io/aws-load-balancer-type"] == "nlb"
    (gateway,) = [each for each in found if (each["kind"], each["metadata"]["name"]) == ("Deployment", "gateway")]
    pod = json.dumps(gateway["spec"]["template"]["spec"])
    assert "registry.example.com/oriel/oriel-gateway:0.1.0" in pod
    assert gateway["spec"]["template"]["spec"]["imagePullSecrets"] == [{"name": "pull"}]
    assert '"another"' in pod and '"api-tls"' not in pod
    assert {each["metadata"].get("namespace", "serving") for each in found if each["kind"] != "StorageClass"} == {
        "serving"
    }
    trusted = {
        each.condition["StringEquals"]["aws:RequestTag/kubernetes-namespace"]
        for each in statements(plan.resources("aws_iam_role"))
        if "aws:SourceAccount" in str(each.condition)
    }
    assert trusted == {"serving", "kube-system"}


def test_protected_from_destroy_until_it_is_said_otherwise(applied):
    with pytest.raises(TerraformFailed, match="deletion_protection"):
        applied.workspace.destroy(**GIVEN)
    assert [call for call in applied.workspace.calls if call.action == "delete"] == []


def test_longest_names_fit_what_aws_takes_and_a_retired_version_can_be_destroyed(applied):
    unprotected = GIVEN | {"cluster": {"deletion_protection": False}}
    applied.workspace.apply(**unprotected)
    other = {"name": "a" * 20, "network_cidr": "10.50.0.0/16", "region": "ap-southeast-1"}
    moved = applied.workspace.plan(**unprotected | other)
    assert moved.actions()["aws_vpc.this[0]"] == "replace"
    for type_name, argument, most in (
        ("aws_iam_role", "name", 64),
        ("aws_s3_bucket", "bucket", 63),
        ("aws_eks_node_group", "node_group_name", 63),
        ("aws_elasticache_replication_group", "replication_group_id", 40),
        ("helm_release", "name", 53),
    ):
        found = moved.resources(type_name)
        assert found
        assert all(len(each[argument]) <= most for each in found.values()), type_name
    with applied.workspace.reading({"data.aws_eks_addon_version": "no add-on for this version of Kubernetes"}):
        # What a retired version does, and how one gets rid of it all the same (terraform/aws/README.md).
        with pytest.raises(TerraformFailed, match="no add-on for this version"):
            applied.workspace.destroy(**unprotected)
        assert applied.workspace.destroy(refresh=False, **unprotected).resources() == {}
