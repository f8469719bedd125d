"""Opens the client for a location. This is the only module that knows every kind of store."""

from typing import TYPE_CHECKING

from oriel_wire.objects.client import ClientLimits, Location, ObjectClient, ObjectWriter
from oriel_wire.objects.errors import ClientUnusable

if TYPE_CHECKING:
    from oriel_wire.objects.obstore import ObstoreClient
    from oriel_wire.objects.s3 import S3Client

_EXTRAS = {"s3": "s3", "gs": "gcs", "az": "azure"}


def open_writer(location: Location, limits: ClientLimits | None = None) -> ObjectWriter:
    """A client that writes to the bucket of `location`; nothing is sent yet. Raises ClientUnusable."""
    return _open(location, limits)


def open_client(location: Location, limits: ClientLimits | None = None) -> ObjectClient:
    """A client for the bucket of `location`; nothing is sent yet. Raises ClientUnusable."""
    return _open(location, limits)


def _open(location: Location, limits: ClientLimits | None) -> "S3Client | ObstoreClient":
    limits = limits or ClientLimits()
    try:
        if location.kind == "s3":
            from oriel_wire.objects.s3 import S3Client

            return S3Client(location, limits)
        from oriel_wire.objects.obstore import open_obstore

        return open_obstore(location, limits)
    except ImportError as error:
        extra = _EXTRAS[location.kind]
        raise ClientUnusable(f"{location.kind}:// needs more packages: pip install 'oriel-serving[{extra}]'") from error
