"""The stand-in's modules one by one: what it refuses as the providers do, its wire format, the converter of schemas."""

import pytest

from .harness import HERE
from .standin import rules, schema, wire
from .standin.checks import out_of_order, unsettable, wrong
from .standin.planning import made, planned


@pytest.fixture(scope="module")
def aws():
    return schema.load(HERE / "schemas" / "aws-6.25.0.json", rules.load(HERE / "rules" / "aws.toml"))


def refused(kind, config):
    return [*wrong(kind, config), *unsettable(kind, config), *out_of_order(kind, config)]


@pytest.mark.parametrize(
    ("type_name", "config", "said"),
    [
        ("aws_eks_node_group", {"taint": [{"key": "a", "value": "b", "effect": "NoSchedule"}]}, "taint.effect"),
        ("aws_eks_node_group", {"launch_template": [{"id": "1", "name": "n"}]}, "Conflicting"),
        ("aws_eks_node_group", {"scaling_config": [{"min_size": -1, "max_size": 1, "desired_size": 1}]}, "min_size"),
        ("aws_subnet", {"cidr_block": "10.0.0.1/8"}, "host bits"),
        ("aws_vpc", {}, "one of cidr_block, ipv4_ipam_pool_id"),
        ("aws_iam_role", {"name": "n", "name_prefix": "p"}, "only one of name, name_prefix"),
        ("aws_security_group", {"description": "the cluster's nodes"}, "description"),
        (
            "aws_eks_node_group",
            {"scaling_config": [{"min_size": 9, "max_size": 3, "desired_size": 9}]},
            "scaling_config.max_size does not hold",
        ),
        ("aws_eks_cluster", {"name": "n", "arn": "arn:aws:eks::1:x"}, "arn is the provider's to say"),
        ("aws_eks_cluster", {"name": "n", "endpoint": wire.UNKNOWN}, "endpoint is the provider's to say"),
        ("aws_vpc", {"cidr_block": "10.0.0.0/16", "main_route_table_id": "rtb"}, "main_route_table_id"),
        ("aws_cloudwatch_log_group", {"retention_in_days": 31}, "retention_in_days"),
    ],
)
def test_what_the_provider_would_refuse_is_refused(aws, type_name, config, said):
    found = refused(aws.types[type_name], config)
    assert found
    assert said in " ".join(" ".join(each) for each in found)


@pytest.mark.parametrize(
    ("type_name", "config", "said"),
    [
        ("node_pool", {"autoscaling": [{"total_min_node_count": 0, "min_node_count": 1}]}, "total_min_node_count"),
        ("node_pool", {"autoscaling": [{"total_min_node_count": 3, "total_max_node_count": 2}]}, "does not hold"),
        ("node_pool", {"node_count": 1, "initial_node_count": 1}, "only one of node_count"),
        ("cluster", {"remove_default_node_pool": True}, "one of initial_node_count"),
    ],
)
def test_what_google_would_refuse_is_refused(type_name, config, said):
    google = schema.load(HERE / "schemas" / "google-6.50.0.json", rules.load(HERE / "rules" / "google.toml"))
    found = refused(google.types[f"google_container_{type_name}"], config)
    assert said in " ".join(" ".join(each) for each in found)
    assert not refused(google.types["google_container_node_pool"], {"autoscaling": [{"total_min_node_count": 0}]})


def test_what_is_not_known_yet_is_not_judged(aws):
    assert list(wrong(aws.types["aws_subnet"], {"cidr_block": wire.UNKNOWN})) == []
    assert list(wrong(aws.types["aws_vpc"], {"cidr_block": wire.UNKNOWN})) == []


def test_planned_with_defaults_and_unknowns_then_made(aws):
    vpc = aws.types["aws_vpc"]
    proposed = dict.fromkeys(vpc.block["attributes"]) | {"cidr_block": "10.0.0.0/16"}
    value, replaced = planned(vpc, None, proposed)
    assert (value["instance_tenancy"], value["id"], replaced) == ("default", wire.UNKNOWN, [])
    before = made(vpc, value, "seed")
    assert wire.UNKNOWN not in before.values()
    after, replaced = planned(vpc, before, dict(before) | {"cidr_block": "10.1.0.0/16", "id": None})
    assert (after["id"], replaced) == (before["id"], ["cidr_block"])


def test_a_computed_block_is_made_and_kept():
    google = schema.load(HERE / "schemas" / "google-6.50.0.json", rules.load(HERE / "rules" / "google.toml"))
    cluster = google.types["google_container_cluster"]
    empty = dict.fromkeys(cluster.block["attributes"]) | {name: [] for name in cluster.block["block_types"]}
    value, _ = planned(cluster, None, empty | {"name": "n", "location": "l"})
    assert value["master_auth"] is wire.UNKNOWN
    before = made(cluster, value, "seed")
    assert before["master_auth"][0]["cluster_ca_certificate"]
    again, _ = planned(cluster, before, dict(before) | {"master_auth": []})
    assert again["master_auth"] == before["master_auth"]


def test_values_go_over_the_wire_and_come_back():
    value = {"a": [1, -2, "x", None, True], "b": {"c": wire.UNKNOWN}, "d": 1.5}
    assert wire.decoded(wire.encoded(value)) == value
    body = wire.field(1, "text") + wire.field(2, 300) + wire.message(3, b"") + wire.field(4, None)
    assert wire.parsed(body) == {1: [b"text"], 2: [300], 3: [b""]}
    with pytest.raises(ValueError, match="wire type"):
        wire.parsed(bytes([1 << 3 | 5, 0, 0, 0, 0]))
