"""The harness and the stand-in, on a root of their own."""

from pathlib import Path

import pytest

from .harness import TerraformFailed

SMALL = Path(__file__).parent / "roots" / "small"


def test_from_nothing_to_nothing_again(workspace):
    small = workspace(SMALL)
    assert small.validate() == []
    plan = small.plan()
    assert plan.changes
    assert set(plan.actions().values()) == {"create"}
    assert len(plan.actions()) == 5
    assert plan.values("aws_vpc.main")["cidr_block"] == "10.42.0.0/16"
    state = small.apply()
    assert state.outputs["vpc"] == state.values("aws_vpc.main")["id"] == state.values("aws_subnet.private[1]")["vpc_id"]
    made = {call.address for call in small.calls if call.action == "create"}
    assert made == set(state.resources())
    assert not small.plan().changes
    changed = small.plan(replicas=3)
    assert changed.actions() == {"helm_release.platform[0]": "update"}
    assert small.destroy().resources() == {}
    assert {call.id for call in small.history if call.action == "delete"} == {
        call.id for call in small.history if call.action == "create"
    }


def test_objects_are_known_once_the_infrastructure_is_there(workspace):
    small = workspace(SMALL)
    with pytest.raises(ValueError, match="helm_release.platform"):
        small.plan().objects()
    (settings,) = small.plan_known(replicas=2).objects()
    assert settings["data"]["replicas"] == "2"
    assert settings["data"]["bucket"] == small.state().values("aws_s3_bucket.models")["arn"]


@pytest.mark.parametrize("half_done", [False, True])
def test_a_fault_midway_is_repaired_by_the_next_apply(workspace, half_done):
    small = workspace(SMALL)
    small.fail_at("aws_subnet", 2, half_done=half_done)
    with pytest.raises(TerraformFailed, match="aws_subnet: injected fault"):
        small.apply()
    assert len(small.state().resources("aws_subnet")) == (2 if half_done else 1)
    assert len(small.apply().resources("aws_subnet")) == 2
    assert not small.plan().changes


def test_what_only_the_provider_says_cannot_be_written(workspace):
    def edit(folder: Path) -> None:
        file = folder / "small" / "main.tf"
        file.write_text(file.read_text().replace("  cidr_block", '  arn        = "mine"\n  cidr_block', 1))

    (said,) = workspace(SMALL, edit=edit).validate()
    assert (said.severity, said.summary) == ("error", "Value for unconfigurable attribute")
    assert said.detail == "arn is the provider's to say"
