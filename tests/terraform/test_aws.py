"""terraform/aws, applied to the stand-in: what is encrypted, public and allowed, and what is made after what."""

import json
import re
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from .clouds import applied_root, objects, of_type
from .harness import TerraformFailed, Workspace
from .iam import statements


@pytest.fixture(scope="module")
def applied(terraform, tree, tmp_path_factory) -> Iterator[SimpleNamespace]:
    with applied_root("aws", tmp_path_factory.mktemp("aws"), tree) as found:
        yield found


def test_what_is_stored_is_encrypted_with_our_keys(applied):
    keys = {name: each["arn"] for name, each in of_type(applied, "aws_kms_key").items()}
    cluster, models = keys['aws_kms_key.this["cluster"]'], keys['aws_kms_key.this["models"]']
    assert all(each["enable_key_rotation"] for each in of_type(applied, "aws_kms_key").values())

    (eks,) = of_type(applied, "aws_eks_cluster").values()
    assert eks["encryption_config"] == [{"provider": [{"key_arn": cluster}], "resources": ["secrets"]}]
    (group,) = of_type(applied, "aws_elasticache_replication_group").values()
    assert group["kms_key_id"] == cluster
    assert group["at_rest_encryption_enabled"] == "true"
    assert group["transit_encryption_enabled"] is True
    parameters = applied.made["aws_elasticache_parameter_group.limiter[0]"]
    assert group["parameter_group_name"] == parameters["name"]
    assert parameters["parameter"] == [{"name": "maxmemory-policy", "value": "noeviction"}]
    for template in of_type(applied, "aws_launch_template").values():
        (disk,) = template["block_device_mappings"]
        assert (disk["ebs"][0]["encrypted"], disk["ebs"][0]["kms_key_id"]) == ("true", cluster)
    for repository in of_type(applied, "aws_ecr_repository").values():
        assert repository["encryption_configuration"] == [{"encryption_type": "KMS", "kms_key": cluster}]
    (log,) = of_type(applied, "aws_cloudwatch_log_group").values()
    assert log["kms_key_id"] == cluster
    (rule,) = applied.made["aws_s3_bucket_server_side_encryption_configuration.models"]["rule"]
    assert rule["bucket_key_enabled"] is True
    (bucket,) = rule["apply_server_side_encryption_by_default"]
    assert (bucket["sse_algorithm"], bucket["kms_master_key_id"]) == ("aws:kms", models)
    (storage,) = [each for each in objects(applied) if each["kind"] == "StorageClass"]
    assert storage["metadata"]["name"] == applied.state.outputs["storage_class"]
    assert (storage["parameters"]["encrypted"], storage["parameters"]["kmsKeyId"]) == ("true", cluster)


def test_nothing_is_public_but_the_gateways_addresses(applied):
    (cluster,) = of_type(applied, "aws_eks_cluster").values()
    for address, rule in of_type(applied, "aws_vpc_security_group_ingress_rule").items():
        assert rule["cidr_ipv4"] in (None, "10.42.0.0/16"), address
        assert rule["cidr_ipv6"] is None, address
    # Whoever is in a public subnet, or sends there: the NAT gateway and the load balancer.
    public = {each["id"] for name, each in of_type(applied, "aws_subnet").items() if ".public[" in name}
    assert len(public) == 3
    private = {each["id"] for each in of_type(applied, "aws_subnet").values()} - public
    for address, values in applied.made.items():
        assert public.isdisjoint(values.get("subnet_ids") or []), address
    assert set(cluster["vpc_config"][0]["subnet_ids"]) == private
    addresses = of_type(applied, "aws_eip")
    assert sorted({re.sub(r"\[.*", "", each) for each in addresses}) == ["aws_eip.gateway", "aws_eip.nat"]
    assert len(addresses) == 4, "an account has five by default"

    services = [each for each in objects(applied) if each["kind"] == "Service"]
    (gateway,) = [each for each in services if each["spec"].get("type") in ("LoadBalancer", "NodePort")]
    assert gateway["metadata"]["name"] == "gateway"
    annotations = gateway["metadata"]["annotations"]
    prefix = "service.beta.kubernetes.io/aws-load-balancer-"
    assert annotations[prefix + "type"] == "nlb"
    label, _, value = annotations[prefix + "target-node-labels"].partition("=")
    staying = {name for name, each in of_type(applied, "aws_eks_node_group").items() if each["labels"][label] == value}
    assert staying == {'aws_eks_node_group.this["system"]'}, "connections through a node that goes would end with it"
    zones = ["eu-central-1a", "eu-central-1b", "eu-central-1c"]
    assert annotations[prefix + "eip-allocations"].split(",") == [
        addresses[f'aws_eip.gateway["{zone}"]']["allocation_id"] for zone in zones
    ]
    assert annotations[prefix + "subnets"].split(",") == [
        applied.made[f'aws_subnet.public["{zone}"]']["id"] for zone in zones
    ]
    record = applied.made["aws_route53_record.gateway[0]"]
    assert set(record["records"]) == {each["public_ip"] for name, each in addresses.items() if ".gateway[" in name}


# Allowed statements with a `*` for their action or resource, each with its reason.
WILD = {
    "aws_iam_role_policy.cluster[0]: LoadBalancerAddresses": "descriptions can't be limited to a resource in IAM",
    'aws_iam_role_policy.pod["autoscaler"]: Describe': "descriptions can't be limited to a resource in IAM",
    'aws_kms_key.this["cluster"]: AccountPolicies': "a key's own policy: * is this key, and IAM policies decide",
    'aws_kms_key.this["cluster"]: ClusterLogs': "a key's own policy: * is this key",
    'aws_kms_key.this["cluster"]: NodeDisks': "a key's own policy: * is this key",
    'aws_kms_key.this["cluster"]: NodeDisksAttached': "a key's own policy: * is this key",
    'aws_kms_key.this["models"]: AccountPolicies': "a key's own policy: * is this key, and IAM policies decide",
}


def test_no_policy_allows_everything_but_for_a_reason(applied):
    found = set()
    for each in statements(applied.made):
        if each.effect == "Allow":
            if "*" in each.resources or any("*" in action for action in each.actions):
                found.add(each.name)
            if "*" in each.resources and not each.address.startswith(("aws_kms_key", "aws_vpc_endpoint")):
                assert all(re.search(r":(Describe|Get)[A-Za-z]+$", action) for action in each.actions), each.name
    assert {each for each in found if not each.startswith("aws_vpc_endpoint")} == set(WILD)


def test_endpoints_let_through_what_this_account_signs(applied):
    """Every endpoint says so by a policy of its own; only reading of buckets is open, where registries keep layers."""
    endpoints = of_type(applied, "aws_vpc_endpoint")
    found = list(statements(endpoints))
    assert {each.address for each in found} == set(endpoints) and len(endpoints) == 9
    for each in found:
        (service,) = {action.partition(":")[0] for action in each.actions}
        name = endpoints[each.address]["service_name"].removeprefix("com.amazonaws.eu-central-1.")
        assert service == name.partition(".")[0], each.name
        if each.name == "aws_vpc_endpoint.s3[0]: Read":
            assert set(each.actions) == {"s3:GetObject", "s3:ListBucket"}
        elif each.sid == "OwnRolesByToken":
            assert (each.actions, each.resources) == (
                ("sts:AssumeRoleWithWebIdentity",),
                ("arn:aws:iam::123456789012:role/*",),
            )
        else:
            own = each.condition["StringEquals"]
            assert own["aws:PrincipalAccount"] == "123456789012", each.name
            assert service != "s3" or own["aws:ResourceAccount"] == "123456789012"


def test_a_principal_that_is_everybody_is_narrowed_to_one(applied):
    for each in statements(applied.made):
        if each.effect == "Allow" and "AWS:*" in each.principals and not each.address.startswith("aws_vpc_endpoint"):
            narrowed = each.condition["StringEquals"]["aws:PrincipalArn"]
            assert narrowed.endswith(":role/aws-service-role/autoscaling.amazonaws.com/AWSServiceRoleForAutoScaling")


def test_managed_policies_are_these(applied):
    attached = {
        (each["role"].removeprefix("oriel-eu-central-1-"), each["policy_arn"].removeprefix("arn:aws:iam::aws:policy/"))
        for each in of_type(applied, "aws_iam_role_policy_attachment").values()
    }
    assert attached == {
        ("cluster", "AmazonEKSClusterPolicy"),
        ("node", "AmazonEKSWorkerNodePolicy"),
        ("node", "AmazonEC2ContainerRegistryPullOnly"),
        ("vpc-cni", "AmazonEKS_CNI_Policy"),
        ("ebs-csi", "service-role/AmazonEBSCSIDriverPolicy"),
    }


def test_pods_take_a_role_by_the_name_of_their_service_account(applied):
    accounts = {
        "gateway": ("oriel", "gateway"),
        "inference": ("oriel", "inference"),
        "autoscaler": ("kube-system", "cluster-autoscaler"),
        "ebs-csi": ("kube-system", "ebs-csi-controller-sa"),
        "vpc-cni": ("kube-system", "aws-node"),
    }
    trusts = {each.address: each for each in statements(of_type(applied, "aws_iam_role"))}
    for role, (namespace, account) in accounts.items():
        trust = trusts.pop(f'aws_iam_role.pod["{role}"]')
        assert trust.principals == ("Service:pods.eks.amazonaws.com",)
        assert set(trust.actions) == {"sts:AssumeRole", "sts:TagSession"}
        assert trust.condition["StringEquals"] == {
            "aws:SourceAccount": "123456789012",
            "aws:RequestTag/eks-cluster-arn": "arn:aws:eks:eu-central-1:123456789012:cluster/oriel",
            "aws:RequestTag/kubernetes-namespace": namespace,
            "aws:RequestTag/kubernetes-service-account": account,
        }
    assert {each.principals for each in trusts.values()} == {
        ("Service:eks.amazonaws.com",),
        ("Service:ec2.amazonaws.com",),
    }
    associated = {
        (each["namespace"], each["service_account"]): each["role_arn"].rpartition("-")[2]
        for each in of_type(applied, "aws_eks_pod_identity_association").values()
    }
    assert associated == {accounts[role]: role for role in ("gateway", "inference", "autoscaler")}
    deployed = {each["metadata"]["name"] for each in objects(applied) if each["kind"] == "ServiceAccount"}
    assert {"gateway", "inference", "logic"} <= deployed


def test_the_bucket_is_read_by_two_and_written_by_none(applied):
    folders = {"gateway": "policies", "inference": "models"}
    arn = "arn:aws:s3:::oriel-models-123456789012-eu-central-1"
    assert applied.made["aws_s3_bucket.models"]["bucket"] == arn.rpartition(":")[2]
    assert applied.state.outputs["model_repository_url"] == "s3://oriel-models-123456789012-eu-central-1/models"
    touched = {}
    for each in statements(of_type(applied, "aws_iam_role_policy")):
        for action in each.actions:
            if action.startswith("s3:"):
                touched.setdefault((each.address.split('"')[1], action), set()).update(each.resources)
                if action == "s3:ListBucket":
                    folder = folders[each.address.split('"')[1]]
                    assert each.condition == {"StringLike": {"s3:prefix": [folder, f"{folder}/*"]}}
    assert touched == {
        (role, action): {resource}
        for role, folder in folders.items()
        for action, resource in (("s3:ListBucket", arn), ("s3:GetObject", f"{arn}/{folder}/*"))
    }
    (only_tls,) = statements(of_type(applied, "aws_s3_bucket_policy"))
    assert (only_tls.effect, only_tls.principals) == ("Deny", ("AWS:*",))
    assert only_tls.condition == {"Bool": {"aws:SecureTransport": "false"}}
    assert applied.made["aws_s3_bucket_versioning.models"]["versioning_configuration"][0]["status"] == "Enabled"


def test_pools_labels_taints_and_floors(applied):
    pools = {re.search(r'"(.*)"', name)[1]: each for name, each in of_type(applied, "aws_eks_node_group").items()}
    sizes = {
        pool: tuple(each["scaling_config"][0][f"{size}_size"] for size in ("min", "desired", "max"))
        for pool, each in pools.items()
    }
    assert sizes == {"system": (2, 2, 2), "cpu": (0, 0, 10), "gpu": (0, 0, 4)}
    assert all(each["labels"]["oriel.dev/pool"] == pool for pool, each in pools.items())
    assert {pool: each["taint"] for pool, each in pools.items() if each["taint"]} == {
        "gpu": [{"key": "nvidia.com/gpu", "value": "present", "effect": "NO_SCHEDULE"}]
    }
    outputs = applied.state.outputs
    assert outputs["gpu_taint"] == {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}
    assert outputs["gpu_node_selector"].items() <= pools["gpu"]["labels"].items()
    # What the autoscaler can't see of a group without nodes.
    tags = of_type(applied, "aws_autoscaling_group_tag")
    for pool, disk_gb in (("cpu", 100), ("gpu", 200)):
        tag = tags[f'aws_autoscaling_group_tag.local_storage["{pool}"]']
        assert tag["autoscaling_group_name"] == pools[pool]["resources"][0]["autoscaling_groups"][0]["name"]
        assert tag["tag"][0]["key"] == "k8s.io/cluster-autoscaler/node-template/resources/ephemeral-storage"
        assert tag["tag"][0]["value"] == f"{disk_gb}Gi"


def test_gpu_nodes_and_endpoints_are_where_they_are_offered(terraform, tree, tmp_path):
    offered = {
        "data.aws_ec2_instance_type_offerings": {"set": {"locations": ["eu-central-1b", "eu-central-1x"]}},
        "data.aws_vpc_endpoint_service": {"set": {"availability_zones": ["eu-central-1b", "eu-central-1x"]}},
    }
    given = {"region": "eu-central-1", "deploy_platform": False}
    with Workspace("aws", tmp_path / "some", tree=tree, rules=offered) as workspace:
        workspace.init()
        workspace.apply('aws_subnet.private["eu-central-1b"]', **given)
        state = workspace.state()
        plan = workspace.plan(**given)
        offering = [state.values('aws_subnet.private["eu-central-1b"]')["id"]]
        assert plan.values('aws_eks_node_group.this["gpu"]')["subnet_ids"] == offering
        endpoints = plan.resources("aws_vpc_endpoint")
        assert {str(each["subnet_ids"]) for name, each in endpoints.items() if "interface" in name} == {str(offering)}
    offered["data.aws_ec2_instance_type_offerings"]["set"]["locations"] = ["eu-central-1x"]
    with Workspace("aws", tmp_path / "none", tree=tree, rules=offered) as workspace:
        workspace.init()
        with pytest.raises(TerraformFailed, match=r"no zone of .* has g6\.2xlarge"):
            workspace.plan(**given)
        workspace.plan(**given, gpu_enabled=False)


def test_pods_cannot_take_the_nodes_role(applied):
    for template in of_type(applied, "aws_launch_template").values():
        (options,) = template["metadata_options"]
        assert (options["http_tokens"], options["http_put_response_hop_limit"]) == ("required", 1)


def test_the_autoscaler_takes_gpu_nodes_last(applied):
    (values,) = map(json.loads, applied.made["helm_release.autoscaler[0]"]["values"])
    assert values["extraArgs"]["expander"] == "priority"
    ranks = dict(re.findall(r"(?m)^(\d+):\n +- (.+)$", values["expanderPriorities"]))
    for pool, rank in (("cpu", "20"), ("gpu", "10")):
        (group,) = applied.made[f'aws_eks_node_group.this["{pool}"]']["resources"][0]["autoscaling_groups"]
        assert [each for each, pattern in ranks.items() if re.search(pattern, group["name"])] == [rank]
        (scale,) = [each for each in statements(applied.made) if each.sid == "Scale"]
        assert re.fullmatch(scale.resources[0].rpartition("/")[2].replace("*", ".*"), group["name"])


def test_redis_password_is_random_and_only_where_it_has_to_be(applied):
    (group,) = of_type(applied, "aws_elasticache_replication_group").values()
    password = group["auth_token"]
    assert re.fullmatch(r"[0-9a-f]{64}", password)
    (given,) = applied.made["module.platform[0].helm_release.oriel"]["set_sensitive"]
    reference = applied.state.outputs["redis_auth_secret_ref"]
    assert (given["name"], given["value"]) == (
        f"infrastructure.secrets.{reference['name']}.{reference['key']}",
        password,
    )
    holders = {address for address, values in applied.made.items() if password in json.dumps(values)}
    assert holders == {
        "aws_elasticache_replication_group.limiter[0]",
        "module.platform[0].helm_release.oriel",
        "terraform_data.redis_password[0]",
    }
    assert password not in json.dumps(applied.state.outputs)
    assert applied.state.outputs["redis_url"].startswith("rediss://")


def test_the_protection_waits_for_everything(applied):
    after = applied.state.dependencies()
    assert set(after) - {"terraform_data.deletion_protection"} <= after["terraform_data.deletion_protection"]
