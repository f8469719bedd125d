"""Starting, crashing, recovering and stopping, with real processes."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest
from paused import LAIN_S, TIMEOUT_MS, Caller, Door, executions, stopped
from stacks import EXAMPLES, START_S, STOP_S, Stack, command, key, picture, started

from oriel_wire.v2.proto import v2_pb2

from ..waiting import wait_until

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks processes up in /proc")

# The supervisor, the three units, and logic's fork server with two workers; and one spare worker, which logic keeps
# where starting a worker takes half a second, as on a busy machine.
MOST_PROCESSES = 7 + 1


@pytest.fixture(scope="module")
def own(state_folder: Path) -> Iterator[Stack]:
    """A stack that these tests may damage; it recovers between them."""
    with started(state_folder / "own") as running:
        yield running


def with_models(own: Stack, state: Path) -> Path:
    """Copy the demo's models into a state folder, as after a first run: making them takes seconds."""
    (made,) = Path(own.environ["ORIEL_STATE"]).glob("demo-models-*")
    shutil.copytree(made, state / made.name)
    return state


def oriel_up(state: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run an `oriel up --demo` that is expected to refuse to start."""
    environ = {**os.environ, "ORIEL_STATE": str(state)}
    return subprocess.run(
        command("up", "--demo", *words), env=environ, capture_output=True, text=True, timeout=START_S, check=False
    )


def serves(stack: Stack) -> bool:
    try:
        fields = {**key("gold"), "content-type": "image/png"}
        url = f"{stack.base}/v1/services/digits"
        answer = httpx.post(url, content=picture(7), headers=fields, timeout=60, trust_env=False)
    except httpx.TransportError:
        return False
    return answer.status_code == 200 and answer.json()["label"] == 7


def until_none_left(stack: Stack) -> None:
    """Wait until no process of the stack is left."""
    wait_until(lambda: not stack.processes())


def until_a_handful(stack: Stack) -> None:
    """Wait until only the usual processes are left.

    For a moment there are also processes that are ending, and those in which logic tries new services.
    """
    wait_until(lambda: len(stack.processes()) <= MOST_PROCESSES)


def processes_of(stack: Stack, unit: str) -> list[int]:
    """Return the processes in the group of `unit`, which leads a session of its own."""
    named = re.compile(rb"(^|/|\0)oriel(_cli\.main)?\0" + unit.encode() + rb"\0")
    leaders = []
    for pid in stack.processes():
        try:
            if named.search(Path(f"/proc/{pid}/cmdline").read_bytes()) and os.getpgid(pid) == pid:
                leaders.append(pid)
        except (FileNotFoundError, ProcessLookupError):
            pass  # it has ended since
    return leaders


def test_the_whole_demo_is_a_handful_of_processes(own: Stack) -> None:
    assert serves(own)
    until_a_handful(own)


def test_the_table_names_the_provider_in_use(own: Stack) -> None:
    models = {model["name"]: model for model in own.ready["models"]}
    assert set(models) == {"digits", "mlp", "mlp_single"}
    assert {(model["state"], model["provider"]) for model in models.values()} == {("READY", "CPUExecutionProvider")}


@pytest.mark.parametrize("unit", ["gateway", "logic", "inference"])
def test_a_killed_unit_comes_back_and_the_path_serves_again(own: Stack, unit: str) -> None:
    (before,) = processes_of(own, unit)
    os.kill(before, signal.SIGKILL)
    wait_until(lambda: processes_of(own, unit) not in ([], [before]) and serves(own))
    until_a_handful(own)


def doors(own: Stack) -> dict[str, Door]:
    tensors = (EXAMPLES / "digits" / "7.v2.json").read_bytes()
    gold = f"authorization: {key('gold')['authorization']}\r\n"
    service, infer = "/v1/services/digits", "/v2/models/digits/infer"
    image = "content-type: image/png\r\n"
    return {
        "gateway": Door(unit="gateway", path=infer, timeout="x-request-timeout-ms", fields=gold, body=tensors),
        "logic": Door(unit="logic", path=service, timeout="x-oriel-timeout-ms", fields=image, body=picture(7)),
        "inference": Door(unit="inference", path=infer, timeout="x-oriel-timeout-ms", fields="", body=tensors),
    }


@pytest.mark.parametrize("unit", ["gateway", "logic", "inference"])
def test_what_expired_while_a_unit_was_stopped_is_not_executed(own: Stack, unit: str) -> None:
    """R11b: calls lay in its sockets past their deadlines, or their callers left; when it goes on they run no model."""
    door, address = doors(own)[unit], own.address(unit, "http")
    with contextlib.ExitStack() as closing:

        def connected() -> Caller:
            return closing.enter_context(Caller(address))

        kept = [connected() for _ in range(5)]
        for caller in kept * 3:  # several times, because a gateway recognises a head that it has judged before
            caller.send(door.request(60_000))
            assert caller.answer()[0] == 200
        before = executions(own)
        with stopped(processes_of(own, unit)[0]):
            callers = kept + [connected() for _ in range(5)]
            late, leaving, patient = callers[1::2], callers[::2], connected()
            for caller in late:
                caller.send(door.request(TIMEOUT_MS))
            for caller in (*leaving, patient):
                caller.send(door.request(60_000))
            late[0].hears_nothing_for(LAIN_S)
            for caller in leaving:
                caller.close()
        assert patient.answer()[0] == 200  # this call came while the unit was stopped as well, and has time left
        for caller in late:
            status, body = caller.answer()
            assert status == 504 and b"deadline" in body, body
        late[0].send(door.request(100 * TIMEOUT_MS))
        assert late[0].answer()[0] == 200
        assert executions(own) == before + 2
    wait_until(lambda: serves(own))


@pytest.mark.parametrize("unit", ["gateway", "inference"])
def test_what_expired_over_grpc_while_a_unit_was_stopped_is_not_executed(own: Stack, unit: str) -> None:
    gold = ("authorization", key("gold")["authorization"])
    timeout = "x-request-timeout-ms" if unit == "gateway" else "x-oriel-timeout-ms"
    request = v2_pb2.ModelInferRequest(model_name="digits")
    tensor = request.inputs.add(name="image", datatype="FP32", shape=[1, 64])
    tensor.contents.fp32_contents.extend([0.0] * 64)
    message, address = request.SerializeToString(), own.address(unit, "grpc")
    options = [("grpc.use_local_subchannel_pool", 1)]  # gives each of two channels a connection of its own
    with grpc.insecure_channel(address, options) as one, grpc.insecure_channel(address, options) as other:
        waiting, leaving = (each.unary_unary("/inference.GRPCInferenceService/ModelInfer") for each in (one, other))
        for infer in (waiting, leaving):
            infer(message, metadata=[gold], timeout=60)
        before = executions(own)
        with stopped(processes_of(own, unit)[0]):
            short = [gold, (timeout, str(TIMEOUT_MS))]
            late = [waiting.future(message, metadata=short, timeout=60) for _ in range(5)]
            late += [leaving.future(message, metadata=[gold], timeout=TIMEOUT_MS / 1e3) for _ in range(5)]
            with pytest.raises(grpc.FutureTimeoutError):
                late[0].result(timeout=LAIN_S)
        assert {call.code() for call in late} == {grpc.StatusCode.DEADLINE_EXCEEDED}
        waiting(message, metadata=[gold], timeout=60)
    assert executions(own) == before + 1
    wait_until(lambda: serves(own))


def test_a_unit_that_refuses_its_files_stops_everything_with_its_line(
    own: Stack, state_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "tenants.toml").write_text("[tenants.a]\ntier = 'none'\nkeys = []\n")
    done = oriel_up(with_models(own, state_folder / "refusing"), "--free-ports", "--policies", str(tmp_path))
    assert done.returncode == 2 and done.stdout == ""
    assert "oriel gateway: " in done.stderr and "tenants.a.tier" in done.stderr and "Traceback" not in done.stderr


def test_published_keys_are_never_served_beyond_this_machine(tmp_path: Path) -> None:
    done = oriel_up(tmp_path, "--host", "0.0.0.0")
    assert done.returncode == 2 and "loopback" in done.stderr


def test_the_demo_measures_what_batching_brings(own: Stack) -> None:
    done = own.oriel("demo", "--seconds", "0.3", "--json")
    assert done.returncode == 0, done.stderr
    models = json.loads(done.stdout)["models"]
    assert set(models["mlp_single"]["executions_by_rows"]) == {"1"}
    assert max(map(int, models["mlp"]["executions_by_rows"])) > 1
    assert all(model["answers"] > 0 and not model["others"] for model in models.values())


def test_sigterm_leaves_nothing_running(own: Stack) -> None:
    """It ends the stack that all tests before it have shared."""
    assert serves(own)
    own.process.send_signal(signal.SIGTERM)
    assert own.process.wait(STOP_S) == 0
    until_none_left(own)
    assert own.oriel("trace", "x").stderr.startswith("oriel: no 'oriel up' runs here")
