"""Reads the reference of a version, with which its samples are compared. See docs/prediction-quality.md."""

import logging

from oriel_inference.errors import LoadFailed
from oriel_inference.stores import ModelStore
from oriel_policies.quality.reference import REFERENCE_FILE, Reference, parse_reference

_log = logging.getLogger(__name__)


def read_reference(store: ModelStore, model: str, version: int) -> Reference | None:
    """Return the reference of a version; None if it has none. One that cannot be read is reported, and the version
    serves without it.
    """
    name = f"{version}/{REFERENCE_FILE}"
    try:
        text = store.text(model, name)
        return None if text is None else parse_reference(text)
    except (LoadFailed, ValueError) as error:
        reason = error.reason if isinstance(error, LoadFailed) else str(error)
        _log.warning("%s/%s is not used: %s", model, name, reason)
        return None
