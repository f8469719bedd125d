"""The settings that a tuner changes: what they are now, which values are tried, and how they are written. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from oriel_cli.errors import CommandFailed
from oriel_tools.tune.config_text import Unreadable, append, put, put_parameter
from oriel_wire.errors import BadMessage, StartFailed
from oriel_wire.v2.metadata import parse_config_text
from oriel_wire.v2.proto import model_config_pb2 as pb

CONFIG_FILE = "config.pbtxt"
THREADS_KEY, PROVIDER_KEY = "intra_op_thread_count", "oriel.execution_provider"
COMPILE_KEY, VARIANT_KEY = "oriel.compile", "oriel.variant"
DELAYS = (0.02, 0.05, 0.1, 0.2, 0.4)  # parts of the objective's bound
PREFERRED = (2, 4, 8)  # parts of the largest batch
ON_DEVICE = (1, 2, 4)  # instances that are tried on a device other than the CPU
# Field of a setting -> its name for people. Of two changes that do equally well the first one is put back, so what may
# change the outputs of the model comes before what does not.
FIELDS = {
    "variant": VARIANT_KEY,
    "compiler": COMPILE_KEY,
    "provider": PROVIDER_KEY,
    "max_rows": "max_batch_size",
    "preferred": "preferred_batch_size",
    "delay_us": "max_queue_delay_microseconds",
    "instances": "instance_group.count",
    "threads": THREADS_KEY,
    "replicas": "replicas",
}
ENGINE = ("instances", "threads", "provider", "compiler", "variant")  # the fields that decide how long batches take
# Parameters that say what executes a model: where one of them is, its owner has chosen.
_CHOSEN = (PROVIDER_KEY, COMPILE_KEY, VARIANT_KEY)


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """The part of a setting on which the times of batches depend.

    provider, compiler, variant: "" for the configured one; at most one of them is another one.
    """

    instances: int
    threads: int
    provider: str = ""
    compiler: str = ""
    variant: str = ""

    @property
    def has_artefact(self) -> bool:
        """True for an engine that is built and checked while the model's own file serves."""
        return bool(self.compiler or self.variant)

    def __str__(self) -> str:
        on = f" on {self.provider}" if self.provider else ""
        by = f" compiled by {self.compiler}" if self.compiler else ""
        of = f" of variant {self.variant}" if self.variant else ""
        return f"{self.instances} x {self.threads} thread{'s' if self.threads > 1 else ''}{on}{by}{of}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting of a model. max_rows: the bound on rows of a batch; 0 if every request runs alone. replicas: servers
    of the pool.
    """

    max_rows: int
    instances: int
    threads: int
    preferred: tuple[int, ...] = ()
    delay_us: int = 0
    provider: str = ""
    compiler: str = ""
    variant: str = ""
    replicas: int = 1

    @property
    def engine(self) -> Engine:
        return Engine(**{field: getattr(self, field) for field in ENGINE})

    def on(self, engine: Engine) -> "Setting":
        return replace(self, **{field: getattr(engine, field) for field in ENGINE})

    def with_rows(self, max_rows: int) -> "Setting":
        """Return the setting with another largest batch; preferred sizes above it are dropped."""
        return replace(self, max_rows=max_rows, preferred=tuple(each for each in self.preferred if each <= max_rows))

    def shown(self, field: str) -> str:
        """Write the value of a field for people."""
        value = getattr(self, field)
        if field == "preferred":
            return ", ".join(map(str, value)) or "none"
        return str(value) or "as configured"


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model that is tuned, on a server of its own with `cores` cores.

    text: text of its config.pbtxt; "" if there is none. completed: its configuration as the server completes it.
    """

    model: str
    text: str
    completed: pb.ModelConfig
    cores: int
    replicas: int = 1

    @property
    def written(self) -> pb.ModelConfig:
        return parse_config_text(self.text)

    @property
    def batches(self) -> bool:
        """True if requests share executions."""
        return self.completed.max_batch_size > 1 and _parameter(self.completed, "oriel.batching") != "off"

    @property
    def on_device(self) -> bool:
        """True if its configuration puts it on another device than the CPU."""
        config = self.completed
        gpus = any(group.kind == pb.ModelInstanceGroup.KIND_GPU or group.gpus for group in config.instance_group)
        listed = config.optimization.execution_accelerators
        return gpus or bool(listed.gpu_execution_accelerator or listed.cpu_execution_accelerator)

    @property
    def present(self) -> Setting:
        config = self.completed
        return Setting(
            max_rows=config.max_batch_size if self.batches else 0,
            preferred=tuple(sorted(set(config.dynamic_batching.preferred_batch_size))) if self.batches else (),
            delay_us=config.dynamic_batching.max_queue_delay_microseconds if self.batches else 0,
            instances=sum([(group.count or 1) * max(1, len(group.gpus)) for group in config.instance_group]) or 1,
            threads=_threads(self.written, self.cores),
            replicas=self.replicas,
        )

    def check(self) -> None:
        """Raise StartFailed if it cannot be tuned."""
        config = self.completed
        if config.WhichOneof("scheduling_choice") == "ensemble_scheduling":
            raise StartFailed(f"{self.model} is an ensemble: tune the models of its steps")
        if config.model_transaction_policy.decoupled:
            raise StartFailed(
                f"{self.model} is decoupled and cannot be tuned: an execution lasts as long as its caller reads"
            )


def _threads(written: pb.ModelConfig, cores: int) -> int:
    """Return the threads of one instance: the configured ones, or what a server with this model alone gives it."""
    text = _parameter(written, THREADS_KEY)
    if text.isascii() and text.isdigit() and int(text):
        return int(text)
    return max(1, cores // max(1, sum([group.count or 1 for group in written.instance_group])))


def _parameter(config: pb.ModelConfig, key: str) -> str:
    return config.parameters[key].string_value.strip() if key in config.parameters else ""


def engines(
    subject: Subject, providers: Sequence[str] = (), compilers: Sequence[str] = (), variants: Sequence[str] = ()
) -> list[Engine]:
    """Return the engines that are tried, the present one first, then those that use most of the cores.

    providers, compilers: names of those that the installation has beside the configured one.
    variants: names of the variants in the model's folder.
    """
    present, cores = subject.present.engine, subject.cores
    written = subject.written
    counted = len(written.instance_group) <= 1 and not any(group.gpus for group in written.instance_group)
    found: set[Engine] = set()
    if subject.on_device:
        found = {Engine(instances=each, threads=present.threads) for each in ON_DEVICE if counted}
    else:
        threaded = subject.completed.backend == "onnxruntime"
        executed = [present]
        if threaded and not any(key in written.parameters for key in _CHOSEN):
            executed += [replace(present, provider=each) for each in providers]
            executed += [replace(present, compiler=each) for each in compilers]
            executed += [replace(present, variant=each) for each in variants]
        for threads in _doubled(1, cores) if threaded else [present.threads]:
            most = max(1, cores // threads)
            for instances in _doubled(1, most) if counted else [present.instances]:
                found |= {replace(each, instances=instances, threads=threads) for each in executed}
    found.discard(present)
    order = sorted(found, key=_promising)
    return [present, *order]


def _promising(engine: Engine) -> tuple[int, int, str, str, str]:
    """Order engines by the cores that they use. Engines with equally many threads come one after the other, so that
    each provider, compiler and variant is measured for some threads even if the time does not suffice for all.
    """
    return -engine.instances * engine.threads, engine.threads, engine.provider, engine.compiler, engine.variant


def _doubled(least: int, most: int) -> list[int]:
    """Return numbers from `least` that double up to `most`, and `most` itself."""
    found = [least]
    while found[-1] * 2 <= most:
        found.append(found[-1] * 2)
    return found if found[-1] >= most else [*found, most]


def neighbours(setting: Setting, subject: Subject, *, rows: int, bound_ms: float) -> dict[str, list[Setting]]:
    """Return the settings that differ in one of the fields of batching, by field.

    rows: least size of the largest batch. bound_ms: tightest bound of the objectives; a delay can only be a part of it.
    """
    if not subject.batches:
        return {}
    present, most = subject.present, subject.completed.max_batch_size
    sizes = {each for each in _doubled(1, most) if each >= rows} | {most}
    delays = {0, present.delay_us} | {round(bound_ms * 1e3 * part, -2) for part in DELAYS}
    parts: set[tuple[int, ...]] = {(setting.max_rows // part,) for part in PREFERRED if setting.max_rows // part > 1}
    kept = tuple(each for each in present.preferred if each <= setting.max_rows)
    return {
        "max_rows": [setting.with_rows(each) for each in sorted(sizes, reverse=True) if each != setting.max_rows],
        "delay_us": [replace(setting, delay_us=int(each)) for each in sorted(delays) if each != setting.delay_us],
        "preferred": [
            replace(setting, preferred=each) for each in sorted({(), kept} | parts) if each != setting.preferred
        ],
    }


def changes(present: Setting, wanted: Setting) -> list[str]:
    """Return the fields in which two settings differ."""
    return [each for each in FIELDS if getattr(present, each) != getattr(wanted, each)]


def changed(subject: Subject, wanted: Setting) -> str:
    """Return the text of the configuration with another setting, of which the replicas are not in it.

    Raises CommandFailed if the text is written in a way in which it cannot be changed.
    """
    text, now, written = subject.text, subject.present, subject.written
    expected = subject.written
    try:
        if wanted.max_rows != now.max_rows:
            text, expected.max_batch_size = put(text, "max_batch_size", str(wanted.max_rows)), wanted.max_rows
            if subject.completed.HasField("dynamic_batching") and not written.WhichOneof("scheduling_choice"):
                # It was completed because the file said nothing about batches.
                text = append(text, "dynamic_batching { }")
                expected.dynamic_batching.SetInParent()
        if wanted.delay_us != now.delay_us:
            value = str(wanted.delay_us) if wanted.delay_us else None
            text = put(text, "max_queue_delay_microseconds", value, within="dynamic_batching")
            expected.dynamic_batching.max_queue_delay_microseconds = wanted.delay_us
        if wanted.preferred != now.preferred:
            value = f"[ {', '.join(map(str, wanted.preferred))} ]" if wanted.preferred else None
            text = put(text, "preferred_batch_size", value, within="dynamic_batching")
            expected.dynamic_batching.preferred_batch_size[:] = wanted.preferred
        # Without a count the server chooses one, by the threads and the provider.
        by_demand = len(written.instance_group) < 2 and not any(group.count for group in written.instance_group)
        if wanted.instances != now.instances or (by_demand and wanted.engine != now.engine):
            text = _with_instances(text, written, expected, wanted.instances)
        if wanted.threads != _threads(expected, subject.cores):
            text = put_parameter(text, THREADS_KEY, str(wanted.threads))
            expected.parameters[THREADS_KEY].string_value = str(wanted.threads)
        for key, value in zip(_CHOSEN, (wanted.provider, wanted.compiler, wanted.variant), strict=True):
            if value:
                text = put_parameter(text, key, value)
                expected.parameters[key].string_value = value
        if parse_config_text(text) == expected:
            return text
        why = "it would say something else"
    except (Unreadable, BadMessage) as unread:
        why = str(unread)
    raise CommandFailed(f"{subject.model}/{CONFIG_FILE} cannot be changed by this command: {why}")


def _with_instances(text: str, written: pb.ModelConfig, expected: pb.ModelConfig, instances: int) -> str:
    if not written.instance_group:
        expected.instance_group.add(count=instances)
        return append(text, f"instance_group [ {{ count: {instances} }} ]")
    expected.instance_group[0].count = instances
    return put(text, "count", str(instances), within="instance_group")
