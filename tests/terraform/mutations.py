"""Mistakes that are put into the .tf files on purpose, each with the test that has to fail because of it.

PYTHONPATH=tests python -m terraform.mutations      # the table for the docs
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Mutation:
    name: str  # what is wrong then
    file: str  # under terraform/
    old: str  # stands there exactly `times` times
    new: str
    caught_by: str  # test_file.py::test_name, with its parameters where one of them is enough
    times: int = 1

    def apply(self, tree: Path) -> None:
        """Make the change. Raises ValueError if the file does not contain the text that is to be changed."""
        file = tree / self.file
        text = file.read_text()
        if text.count(self.old) != self.times:
            raise ValueError(f"{self.name}: {self.file} has {text.count(self.old)} times {self.old!r}")
        file.write_text(text.replace(self.old, self.new))


_VALID = "test_lifecycle.py::test_it_is_valid_without_a_warning"
_WORKLOADS = "test_objects_workloads.py::"
_NETWORK = "test_objects_network.py::"
_PLACEMENT = "test_objects_placement.py::"
_MODELS = "test_objects_models.py::test_models_are_placed_in_the_pools_of_the_groups_that_ask_for_it"

MUTATIONS = (
    Mutation(
        "an argument is renamed",
        "aws/network.tf",
        "  enable_dns_hostnames =",
        "  enable_dns_names =",
        f"{_VALID}[aws]",
    ),
    Mutation(
        "a block is spelled as an attribute",
        "azure/cluster.tf",
        "  identity {\n",
        "  identity = {\n",
        f"{_VALID}[azure]",
    ),
    Mutation(
        "nodes do not wait for their role's policies",
        "aws/nodes.tf",
        "    aws_iam_role_policy_attachment.node,\n",
        "",
        "test_lifecycle.py::test_apply_change_and_destroy[aws-gpu-zero]",
    ),
    Mutation(
        "the bucket does not wait for the right to its key",
        "gcp/models.tf",
        "  depends_on = [google_kms_crypto_key_iam_member.this]\n",
        "",
        "test_lifecycle.py::test_apply_change_and_destroy[gcp-cpu-one]",
    ),
    Mutation(
        "a taint's effect as Kubernetes spells it, given to EKS",
        "aws/nodes.tf",
        'NoSchedule = "NO_SCHEDULE"',
        'NoSchedule = "NoSchedule"',
        "test_aws.py::test_pools_labels_taints_and_floors",
    ),
    Mutation(
        "another taint's effect: GPU nodes take everything",
        "azure/nodes.tf",
        'nvidia.com/gpu=present:NoSchedule"',
        'nvidia.com/gpu=present:PreferNoSchedule"',
        "test_azure.py::test_pools_grow_from_zero_and_gpu_nodes_have_our_taint",
    ),
    Mutation(
        "a security group is open to the world",
        "aws/endpoints.tf",
        "  cidr_ipv4         = var.network_cidr",
        '  cidr_ipv4         = "0.0.0.0/0"',
        "test_aws.py::test_nothing_is_public_but_the_gateways_addresses",
    ),
    Mutation(
        "a subnet's network has host bits",
        "aws/network.tf",
        "  private_cidrs = { for i, zone in local.zones : zone => cidrsubnet(var.network_cidr, 2, i) }",
        '  private_cidrs = { for i, zone in local.zones : zone => "10.42.${64 * i}.1/18" }',
        "test_aws.py::test_a_second_plan_is_empty",
    ),
    Mutation(
        "nodes have public addresses",
        "gcp/cluster.tf",
        "    enable_private_nodes    = true",
        "    enable_private_nodes    = false",
        "test_gcp.py::test_nothing_is_public_but_the_gateways_address",
    ),
    Mutation(
        "the models' storage takes calls from the internet",
        "azure/models.tf",
        "  public_network_access_enabled     = !local.private",
        "  public_network_access_enabled     = true",
        "test_azure.py::test_nothing_is_public_but_the_gateways_address",
    ),
    Mutation(
        "models are encrypted with somebody else's key",
        "aws/models.tf",
        '      sse_algorithm     = "aws:kms"\n',
        '      sse_algorithm     = "AES256"\n',
        "test_aws.py::test_what_is_stored_is_encrypted_with_our_keys",
    ),
    Mutation(
        "Kubernetes' secrets are not encrypted",
        "gcp/cluster.tf",
        '    state    = "ENCRYPTED"',
        '    state    = "DECRYPTED"',
        "test_gcp.py::test_secrets_disks_and_models_are_encrypted_with_a_key_each",
    ),
    Mutation(
        "who reads the bucket may write it",
        "aws/identity.tf",
        '      Action   = "s3:GetObject"',
        '      Action   = ["s3:GetObject", "s3:PutObject"]',
        "test_aws.py::test_the_bucket_is_read_by_two_and_written_by_none",
    ),
    Mutation(
        "a wider role on the bucket",
        "gcp/identity.tf",
        "roles/storage.objectViewer",
        "roles/storage.objectAdmin",
        "test_gcp.py::test_every_right_that_is_given",
    ),
    Mutation(
        "an identity for another service account",
        "azure/identity.tf",
        "system:serviceaccount:${local.namespace}:${each.key}",
        "system:serviceaccount:${local.namespace}:default",
        "test_azure.py::test_pods_exchange_their_service_accounts_token",
    ),
    Mutation(
        "a provider's version that was never promised",
        "modules/platform/versions.tf",
        'version = "~> 3.1"',
        'version = ">= 2.0"',
        "test_static.py::test_versions_are_those_that_are_promised[modules/platform]",
    ),
    Mutation(
        "one cloud's variable has another default",
        "gcp/variables.tf",
        'default     = "10.42.0.0/16"',
        'default     = "10.43.0.0/16"',
        "test_static.py::test_the_clouds_take_the_same_variables",
    ),
    Mutation(
        "one cloud's output has another name",
        "azure/outputs.tf",
        'output "redis_tls"',
        'output "redis_has_tls"',
        "test_static.py::test_outputs_are_what_the_platform_takes[azure]",
    ),
    Mutation(
        "any pod may ask Redis",
        "modules/platform/network.tf",
        '        from  = [{ podSelector = { matchLabels = { "app.kubernetes.io/component" = "gateway" } } }]\n'
        '        ports = [{ protocol = "TCP", port = 6379 }]',
        '        from  = [{ podSelector = {} }]\n        ports = [{ protocol = "TCP", port = 6379 }]',
        f"{_NETWORK}test_each_door_holds_by_itself",
    ),
    Mutation(
        "pods without a policy of their own may ask the world",
        "modules/platform/network.tf",
        'spec       = { podSelector = {}, policyTypes = ["Ingress", "Egress"] }',
        'spec       = { podSelector = {}, policyTypes = ["Ingress"] }',
        f"{_NETWORK}test_each_door_holds_by_itself",
    ),
    Mutation(
        "models have fifteen seconds to load",
        "modules/platform/inference.tf",
        "failureThreshold = ceil(group.load_grace_s / 5)",
        "failureThreshold = 3",
        f"{_WORKLOADS}test_probes_ask_what_the_units_answer_and_leave_models_time_to_load",
    ),
    Mutation(
        "a pod is killed before it has drained",
        "modules/platform/inference.tf",
        "terminationGracePeriodSeconds = local.pause_s.inference + local.unit_drain_s + local.stop_margin_s",
        "terminationGracePeriodSeconds = local.pause_s.inference",
        f"{_WORKLOADS}test_a_pod_that_stops_is_out_of_names_and_balancers_first_and_has_the_time_its_unit_takes",
    ),
    Mutation(
        "a gateway is asked for a page that it has not",
        "modules/platform/gateway.tf",
        'path = "/health/live", port = "admin" }\n                  periodSeconds    = 2\n',
        'path = "/healthz", port = "admin" }\n                  periodSeconds    = 2\n',
        f"{_WORKLOADS}test_probes_ask_what_the_units_answer_and_leave_models_time_to_load",
    ),
    Mutation(
        "volumes stay root's",
        "modules/platform/main.tf",
        "    fsGroup        = 65532\n",
        "",
        f"{_WORKLOADS}test_every_pod_keeps_the_restricted_level_of_pod_security",
    ),
    Mutation(
        "GPU pods displace nobody",
        "modules/platform/placement.tf",
        "globalDefault             = false\n",
        'globalDefault             = false\n      preemptionPolicy          = "Never"\n',
        f"{_PLACEMENT}test_a_gpu_pod_displaces_cpu_pods_and_nobody_displaces_it",
    ),
    Mutation(
        "the autoscaler hears nothing of a pool's disks",
        "aws/nodes.tf",
        "node-template/resources/ephemeral-storage",
        "node-template/resources/ephemeral_storage",
        "test_aws.py::test_pools_labels_taints_and_floors",
    ),
    Mutation(
        "containers may write to their own files",
        "modules/platform/main.tf",
        "readOnlyRootFilesystem   = true",
        "readOnlyRootFilesystem   = false",
        f"{_WORKLOADS}test_every_pod_keeps_the_restricted_level_of_pod_security",
    ),
    Mutation(
        "a CPU pod may start a GPU node",
        "modules/platform/placement.tf",
        'labelSelector = { matchLabels = { "oriel.dev/cpu-here" = "true" } }',
        "labelSelector = {}",
        f"{_PLACEMENT}test_a_cpu_pod_grows_the_cpu_pool_and_never_the_gpu_pool",
    ),
    Mutation(
        "CPU pods are worth as much as GPU pods",
        "modules/platform/placement.tf",
        "{ gpu = 100000, gateway = 50000, cpu = 0 }",
        "{ gpu = 100000, gateway = 50000, cpu = 100000 }",
        f"{_PLACEMENT}test_a_gpu_pod_displaces_cpu_pods_and_nobody_displaces_it",
    ),
    Mutation(
        "inference has an address of its own",
        "modules/platform/inference.tf",
        '          clusterIP = "None"\n          selector  = local.selectors.inference',
        '          type      = "LoadBalancer"\n          selector  = local.selectors.inference',
        f"{_NETWORK}test_nothing_is_public_but_the_gateway",
    ),
    Mutation(
        "the gateway may read every object of the namespace",
        "modules/platform/gateway.tf",
        'resources = ["endpointslices"]',
        'resources = ["*"]',
        f"{_WORKLOADS}test_only_the_gateway_may_ask_kubernetes_and_only_for_endpoint_slices",
    ),
    Mutation(
        "the gateway cannot reach the API server of kind",
        "modules/platform/network.tf",
        "local.to_kubernetes, ",
        "",
        f"{_NETWORK}test_exactly_these_reach_each_other",
    ),
    Mutation(
        "a failing gateway wakes pools that are at zero",
        "modules/platform/scaling.tf",
        "key => value if target.replicas.min > 0 }",
        "key => value }",
        "test_objects_scaling.py::test_to_no_replica_only_with_keda_and_when_asked_for",
    ),
    Mutation(
        "a group without a pod shares its pool with others",
        "modules/platform/policies.tf",
        "if var.keda.enabled || length(group.models) > 0",
        "if length(group.models) > 0",
        "test_objects_scaling.py::test_a_call_says_which_group_it_needs",
    ),
    Mutation(
        "a pattern hides another group's model",
        "modules/platform/policies.tf",
        'strcontains(model, "*") ? "pattern" : "name"',
        '"pattern"',
        "test_objects_scaling.py::test_a_call_says_which_group_it_needs",
    ),
    Mutation(
        "KEDA asks a port that no gateway opens",
        "modules/platform/gateway.tf",
        'var.keda.enabled ? ["--scaler-port", tostring(local.ports.gateway.scaler)] : []',
        "[]",
        "test_objects_scaling.py::test_without_keda_nothing_is_planned_and_no_port_is_open_for_it",
    ),
    Mutation(
        "the gateway plans fewer pods than KEDA may start",
        "modules/platform/policies.tf",
        '"maximum = ${target.replicas.max}"',
        '"maximum = ${target.replicas.max - 1}"',
        "test_objects_scaling.py::test_the_gateway_plans_for_each_scaled_object_within_its_bounds",
    ),
    Mutation(
        "a field that Kubernetes does not know",
        "modules/platform/gateway.tf",
        "revisionHistoryLimit ",
        "revisionHistory      ",
        "test_objects_valid.py::test_every_object_is_one_that_kubernetes_takes",
    ),
    Mutation(
        "servers whose models the gateway places load all of them at the start",
        "modules/platform/inference.tf",
        'group.place_models ? "demand" : "poll"',
        '"poll"',
        f"{_MODELS}[True]",
    ),
)


def run_test(words: list[str], root: Path, tree: Path, printed: Path) -> None:
    """Run pytest in this process and exit with its status.

    words: pytest's arguments.
    root: the folder of the checkout, in which pytest starts.
    tree: the copy of terraform/ that the tests read.
    printed: the file for what pytest and the tests print.
    """
    with printed.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(root)
    os.environ["ORIEL_TERRAFORM_TREE"] = str(tree)
    import pytest

    raise SystemExit(int(pytest.main(words)))


def table() -> str:
    """Return the Markdown table of the mistakes, their files and the tests that fail."""
    lines = ["| mistake | in | caught by |", "|---|---|---|"]
    lines += [f"| {each.name} | `{each.file}` | `{each.caught_by}` |" for each in MUTATIONS]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(table())
