"""A model, profiles and a server that are made up, for tests of `oriel tune`."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

from oriel_tools.load.scenario import Scenario
from oriel_tools.load.tally import Outcome, Tally
from oriel_tools.simulate.profile import Profile, Size
from oriel_tools.tune.machine import Machine
from oriel_tools.tune.objective import parse
from oriel_tools.tune.search import Effort
from oriel_tools.tune.setting import Engine, Subject
from oriel_tools.tune.trial import Load, Simulator
from oriel_wire.v2.metadata import parse_config_text
from oriel_wire.v2.proto import model_config_pb2 as pb

QUICK = Effort(short=50, long=200)
ENGINES = [Engine(instances=1, threads=1), Engine(instances=2, threads=1), Engine(instances=1, threads=2)]


def subject(batching: str = "", *, max_rows: int = 16, replicas: int = 1, more: str = "") -> Subject:
    text = f"max_batch_size: {max_rows} dynamic_batching {{ {batching} }} instance_group {{ count: 1 }}"
    text += f' parameters {{ key: "intra_op_thread_count" value {{ string_value: "1" }} }} {more}'
    return Subject(model="m", text=text, completed=completed(text), cores=2, replicas=replicas)


def completed(text: str) -> pb.ModelConfig:
    config = parse_config_text(text)
    config.backend = "onnxruntime"
    return config


def sizes(milliseconds: Mapping[int, float]) -> list[Size]:
    return [Size(rows=rows, mean_ms=each, batches=100) for rows, each in milliseconds.items()]


FLAT = sizes({1: 10.0, 16: 10.4})  # loading the weights is all there is to it
STEEP = sizes({1: 4.0, 8: 16.0, 9: 60.0, 16: 110.0})  # more than eight rows do not fit the cache
ALONE = sizes({1: 10.0, 16: 160.0})  # a batch brings nothing: 100 rows a second


def times(factor: float, milliseconds: Sequence[Size]) -> list[Size]:
    return [Size(rows=each.rows, mean_ms=factor * each.mean_ms, batches=each.batches) for each in milliseconds]


def simulator(goal: str, milliseconds: Sequence[Size], engines: int = 1) -> Simulator:
    """Simulate engines of which the second runs two batches at once, and the third is slower."""
    by_engine = {each: times(1.5 if each.threads == 2 else 1.0, milliseconds) for each in ENGINES[:engines]}
    return simulator_of(goal, by_engine)


def simulator_of(goal: str, by_engine: Mapping[Engine, Sequence[Size]]) -> Simulator:
    return Simulator(Load(model="m", objectives=[parse(goal)]), profiles_of(by_engine))


def profiles_of(by_engine: Mapping[Engine, Sequence[Size]]) -> dict[Engine, Profile]:
    return {
        engine: Profile(model="m", max_rows=16, instances=engine.instances, sizes=list(milliseconds))
        for engine, milliseconds in by_engine.items()
    }


class CountingMachine:
    """Answers as many of a hundred calls in time as are known for the setting that is loaded, else none. A turn takes a
    second of its own clock.
    """

    url = "http://made-up"

    def __init__(self, in_time: Mapping[str, int]) -> None:
        self.in_time, self.loaded, self.now = in_time, list[str](), 0.0

    async def load(self, text: str, *, within_s: float) -> str:
        self.loaded.append(text)
        return ""

    async def offered(self, scenario: Scenario) -> tuple[list[Tally], str]:
        self.now += 1.0
        tally = Tally(scheduled=100)
        for number in range(100):
            latency_s = 0.01 if number < self.in_time.get(self.loaded[-1], 0) else 0.09
            tally.finished(Outcome("good"), latency_s, latency_s, 0.05)
        return [tally], ""


class MadeUpMachine:
    """Executes a model in virtual time, by the true times of its engines. All that it does takes time of its own clock.

    profiled: the times that a calibration sees. refused: why artefacts do not serve, by a part of the configuration.
    objection: why no measurement may be quoted.
    """

    url = "http://made-up"

    def __init__(
        self,
        text: str,
        true: Mapping[Engine, Sequence[Size]],
        profiled: Mapping[Engine, Sequence[Size]],
        load: Load,
        refused: Mapping[str, str],
        objection: str,
    ) -> None:
        self.now = 0.0
        self.loads: list[str] = []
        self._text = text
        self._profiled = profiles_of(profiled)
        self._simulator = Simulator(load, profiles_of(true))
        self._refused = refused
        self._objection = objection

    def clock(self) -> float:
        """Return the time; each question takes some as well, so that a search in virtual time ends."""
        self.now += 0.25
        return self.now

    @asynccontextmanager
    async def serve(self, repository: Path, model: str, *, cores: int) -> AsyncIterator[Machine]:
        yield cast(Machine, self)

    async def completed(self) -> pb.ModelConfig:
        return completed(self._text)

    async def load(self, text: str, *, within_s: float) -> str:
        self.now += 1.0
        self.loads.append(text)
        return next((why for part, why in self._refused.items() if part in text), "")

    async def profile(self, *, seconds: float, rows: int, instances: int) -> Profile:
        self.now += 10.0 * seconds
        return self._profiled[self._engine()]

    async def offered(self, scenario: Scenario) -> tuple[list[Tally], str]:
        seconds = scenario.phase[-1].seconds
        self.now += 3.0 * seconds  # as if it had been repeated, so that tests are short
        text = self.loads[-1]
        setting = Subject(model="m", text=text, completed=completed(text), cores=2).present.on(self._engine())
        record, _ = self._simulator.record(setting, seconds)
        return record.tallies[-1], self._objection

    def _engine(self) -> Engine:
        text = self.loads[-1]
        written = parse_config_text(text).parameters
        present = Subject(model="m", text=text, completed=completed(text), cores=2).present

        def value_of(key: str) -> str:
            return written[key].string_value if key in written else ""

        return Engine(
            instances=present.instances,
            threads=present.threads,
            provider=value_of("oriel.execution_provider"),
            compiler=value_of("oriel.compile"),
            variant=value_of("oriel.variant"),
        )
