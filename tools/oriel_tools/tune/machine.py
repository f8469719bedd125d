"""Measures settings of one model on a server of its own, whose models lie where they are: configurations are sent with
the requests to load them, so no file of the repository is written.
"""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.parse import quote

from oriel_cli.errors import CommandFailed
from oriel_cli.up.unit import Timings, Unit
from oriel_cli.up.units import Address, UnitSpec, free_ports
from oriel_tools.load.command import offer
from oriel_tools.load.generator import Record
from oriel_tools.load.lag import LagRule
from oriel_tools.load.scenario import Scenario
from oriel_tools.load.tally import Tally, total
from oriel_tools.simulate.calibrate import callers_of, measured
from oriel_tools.simulate.profile import Profile
from oriel_wire.engine.client import HttpClient
from oriel_wire.errors import BadMessage, UpstreamError
from oriel_wire.process.process import LIFELINE_VARIABLE
from oriel_wire.v2.metadata import config_json, parse_config_json, parse_config_text
from oriel_wire.v2.proto import model_config_pb2 as pb

HOST = "127.0.0.1"
LOAD_WITHIN_S = 600.0
STOP_S = 10.0
ATTEMPTS = 2  # attempts at a load in which the generator lagged
BETWEEN_S = 0.3  # pause before each turn of a profile
MORE_TURNS = 4  # the last turn of a profile is three times as long, and there are two of refused calls
SETTLE_S = 1.0  # seconds assumed for the load of a model
POLL_S = 0.1  # between two questions for the state of an artefact
ARTEFACT_S = 60.0
SETTLED = ("serving", "refused")  # states of an artefact that do not change by themselves


class Machine:
    """A server with one model. Its methods raise CommandFailed."""

    def __init__(self, port: int, metrics_port: int, model: str) -> None:
        self.url = f"http://{HOST}:{port}"
        self._model = model
        self._port = port
        self._metrics_port = metrics_port

    async def completed(self) -> pb.ModelConfig:
        """Return the configuration of the model as the server completes it."""
        document = await self._request("GET", f"/v2/models/{quote(self._model, safe='')}/config")
        try:
            return parse_config_json(document)
        except BadMessage as bad:
            raise CommandFailed(f"{self.url}: {bad.message}") from bad

    async def load(self, text: str, *, within_s: float = ARTEFACT_S) -> str:
        """Load the model with the text of a config.pbtxt, and wait until the artefact serves that it asks for, if any.

        Returns the reason if the model's own file serves instead; "" if the artefact serves. within_s: seconds allowed
        for the artefact.
        """
        parameters = {"config": config_json(parse_config_text(text))}
        target = f"/v2/repository/models/{quote(self._model, safe='')}/load"
        await self._request("POST", target, json.dumps({"parameters": parameters}).encode())
        deadline = monotonic() + within_s
        while (state := artefact_of(await self._models(), self._model)) is None:
            if monotonic() >= deadline:
                return f"it was not ready after {within_s:.0f} s: build it beforehand with 'oriel engines build'"
            await asyncio.sleep(POLL_S)
        return state

    async def _models(self) -> Any:
        return json.loads(await self._request("GET", "/models", port=self._metrics_port))

    async def profile(self, *, seconds: float, rows: int, instances: int) -> Profile:
        """Measure how long the batches of the model take. seconds: the time for each number of callers. instances: that
        can run at once.
        """
        try:
            return await measured(self.url, self._model, seconds=seconds, rows=rows, instances=instances)
        except UpstreamError as error:
            raise CommandFailed(f"{self.url}: {error}") from error

    async def offered(self, scenario: Scenario, *, attempts: int = ATTEMPTS) -> tuple[list[Tally], str]:
        """Send a load; return the tallies of its last phase, and why they must not be quoted ("" if they may be).

        A load in which the generator lagged is sent again. Raises KeyboardInterrupt if it was interrupted.
        """
        for _ in range(attempts):
            record = await offer(scenario)
            if record.interrupted:
                raise KeyboardInterrupt
            if not (objection := _objection(scenario, record)):
                break
        return record.tallies[-1], objection

    async def _request(self, method: str, target: str, body: bytes = b"", *, port: int = 0) -> bytes:
        client = HttpClient(host=HOST, port=port or self._port)
        try:
            answer = await client.request(method, target, [], body, deadline=monotonic() + LOAD_WITHIN_S)
        except UpstreamError as error:
            raise CommandFailed(f"{self.url}: {error}") from error
        finally:
            await client.close()
        if answer.status != 200:
            try:
                reason = str(json.loads(answer.body)["error"])
            except (ValueError, KeyError, TypeError):
                reason = f"the server answers {answer.status} to {target}"
            raise CommandFailed(" ".join(reason.split())[:600])
        return bytes(answer.body)


def artefact_of(models: Sequence[Mapping[str, Any]], model: str) -> str | None:
    """Return why the artefacts of a model's versions do not serve; "" if they do, or there are none; None if that is
    not decided. models: the lines of a server about its versions.
    """
    found = [line["artefact"] for line in models if line["name"] == model and "artefact" in line]
    objections = [f"{each['state']}: {each['reason']}" for each in found if each["state"] != "serving"]
    undecided = any(each["state"] not in SETTLED and not each["reason"] for each in found)
    return None if undecided else "; ".join(objections)


def _objection(scenario: Scenario, record: Record) -> str:
    number = len(scenario.phase) - 1
    whole = total(record.tallies[number])
    rule = LagRule(max_lag_ms=scenario.max_lag_ms)
    return rule.objection(whole.lag, sum(whole.unsent.values()), record.busy.get(number, 0.0)) or ""


def profile_s(seconds: float, max_rows: int, rows: int) -> float:
    """Return how long it takes to measure a profile, with loading the model."""
    turns = len(callers_of(max_rows, rows)) + 2
    return SETTLE_S + turns * min(BETWEEN_S, seconds) + (turns + MORE_TURNS) * seconds


def seconds_within(budget_s: float, max_rows: int, rows: int) -> float:
    """Return how many seconds each turn of a profile may last so that all of it takes `budget_s`; 0 for too little."""
    turns = len(callers_of(max_rows, rows)) + 2
    long = (budget_s - SETTLE_S - turns * BETWEEN_S) / (turns + MORE_TURNS)
    return long if long >= BETWEEN_S else max(0.0, (budget_s - SETTLE_S) / (2 * turns + MORE_TURNS))


@asynccontextmanager
async def serving(repository: Path, model: str, *, cores: int, flags: Sequence[str] = ()) -> AsyncIterator[Machine]:
    """A server with this model alone, which ends with the block, or with this process. Raises StartFailed."""
    port, metrics_port = free_ports(HOST, 2)
    command = [sys.executable, "-m", "oriel_cli.main", "inference", "--model-repository", str(repository)]
    command += ["--model-control-mode", "explicit", "--load-model", model, "--exit-on-error", "true"]
    command += ["--http-port", str(port), "--metrics-port", str(metrics_port), "--allow-grpc", "false"]
    command += ["--cores", str(cores)]
    command += ["--usage", "none", "--log-info", "false", "--log-warning", "false", *flags]
    spec = UnitSpec(
        name="inference",
        argv=command,
        addresses={"http": Address(what="inference HTTP", host=HOST, port=port, flag="--http-port")},
        ready=("http", "/v2/health/ready"),
    )
    lifeline, held = os.pipe()
    try:
        unit = Unit(spec, {**os.environ, LIFELINE_VARIABLE: str(lifeline)}, lifeline, Timings())
        try:
            await unit.start()
            yield Machine(port, metrics_port, model)
        finally:
            await asyncio.shield(unit.stop(monotonic() + STOP_S, lambda _: None))
    finally:
        os.close(held)
        os.close(lifeline)
