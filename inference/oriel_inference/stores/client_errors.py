"""Translates the errors of the object-store client into load failures."""

from collections.abc import Mapping

from oriel_inference import errors
from oriel_inference.errors import LoadFailed
from oriel_wire.objects import errors as client_errors
from oriel_wire.objects.errors import ObjectStoreError

_KINDS: Mapping[type[ObjectStoreError], type[LoadFailed]] = {
    client_errors.StoreUnavailable: errors.StoreUnavailable,
    client_errors.ObjectChanged: errors.ObjectChanged,
    client_errors.ObjectRefused: errors.ObjectRefused,
    client_errors.TooManyObjects: errors.TooManyObjects,
}


def load_failed(error: ObjectStoreError) -> LoadFailed:
    """The load failure with the same text, of the corresponding class."""
    return _KINDS.get(type(error), LoadFailed)(str(error))
