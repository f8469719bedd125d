"""The required configuration of a Python model, and the stores from which code runs."""

from oriel_inference.errors import ConfigInvalid
from oriel_inference.repository.config import instance_count, validate
from oriel_inference.repository.spec import fill_defaults
from oriel_inference.stores import ModelStore
from oriel_wire.v2.proto import model_config_pb2 as pb

ENVIRONMENT = "EXECUTION_ENV_PATH"


def require_trusted(store: ModelStore, file: str, kind: str) -> None:
    """Raise ConfigInvalid if the operator did not put the files there. kind: models of this kind are code."""
    if not store.runs_code:
        reason = (
            f"{kind} run only from a folder of this machine: the right to write to an object store, or to send "
            f"files with a request, is not the right to start processes here, see docs/python-models.md"
        )
        raise ConfigInvalid(file, "backend", reason)


def check_python(config: pb.ModelConfig, store: ModelStore, file: str, *, sent: bool) -> None:
    """Raise ConfigInvalid if the model may not run here. sent: the configuration came with a request."""
    require_trusted(store, file, "Python models")
    if sent and ENVIRONMENT in config.parameters:
        reason = "a request cannot choose what runs here: write it into the configuration file"
        raise ConfigInvalid(file, f"parameters[{ENVIRONMENT!r}]", reason)


def judge_completed(config: pb.ModelConfig, model: str, file: str) -> int:
    """Check a configuration that the model's own code has completed, and fill in its defaults; return the number of
    instances. Raises ConfigInvalid.
    """
    validate(config, model, file)
    if not config.output:
        reason = "is missing: name the tensors here, or in auto_complete_config of the model"
        raise ConfigInvalid(file, "output", reason)
    fill_defaults(config)
    return instance_count(config)
