"""Loads the model of a repository that somebody else has written, and the configurations of such models."""

from pathlib import Path
from typing import Any

from oriel_inference.backends import find_backend
from oriel_inference.errors import LoadFailed
from oriel_inference.repository.load import LoadedVersion, Loading, load_model
from oriel_inference.stores.local import LocalStore

from . import models


def labelled(filename: str) -> str:
    start, _, end = models.DOUBLE.rpartition("dims: [ 4 ]")
    return f'{start}dims: [ 4 ] label_filename: "{filename}"{end}'


LABELS = labelled("labels.txt")
WARM = """
    model_warmup [ { name: "w" batch_size: 1
      inputs { key: "x" value { data_type: TYPE_FP32 dims: [ 4 ] input_data_file: "FILE" } } } ]
"""


def load(root: Path, **more: Any) -> dict[int, LoadedVersion | LoadFailed | None]:
    store = more.pop("store", None) or LocalStore(root)
    return load_model(Loading(store, "double", find_backend=find_backend, cores=1, models=1, **more))


def refusal(root: Path, **more: Any) -> str:
    try:
        (found,) = load(root, **more).values()
    except LoadFailed as failure:
        found = failure
    assert isinstance(found, LoadFailed), "it was loaded"
    assert str(root) not in found.reason and len(found.reason) <= 500
    return found.reason
